"""Offload of the train state to host memory or disk."""
