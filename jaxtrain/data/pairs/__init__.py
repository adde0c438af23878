"""Pairs of texts: source and target of sequence-to-sequence models."""
