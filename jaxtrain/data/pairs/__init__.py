"""Pairs of texts: a source, and a target that is told from it."""
