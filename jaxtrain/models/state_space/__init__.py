"""State space models."""
