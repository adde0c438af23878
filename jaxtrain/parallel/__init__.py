"""Meshes, and where arrays lie on them: one table from a dimension's meaning to a mesh axis."""
