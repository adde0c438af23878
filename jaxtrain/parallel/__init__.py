"""Meshes and shardings: one table from logical axes to mesh axes."""
