"""Vectors of numbers: tables of examples and their labels or numbers."""
