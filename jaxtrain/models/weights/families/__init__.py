"""Families of published models: their tensors and their config.json, one file a group."""
