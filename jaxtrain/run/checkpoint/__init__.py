"""Checkpoints: sealed with digests, restored on any mesh, complete or absent."""
