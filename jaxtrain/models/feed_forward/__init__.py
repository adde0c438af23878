"""Models that are layers of vectors, one after the other."""
