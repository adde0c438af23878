"""Vectors: tables of features with labels or regression targets."""
