"""Families of published models: their tensors and their config.json, one file per group."""
