"""Profile of a step: a trace of a few steps, by layers and operations."""
