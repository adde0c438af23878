"""Where a step's time goes: a trace of a few steps, read as layers and operations."""
