"""Transformers."""
