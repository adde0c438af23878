"""Published weights: an architecture's names and settings elsewhere, a file a family."""
