"""What a configuration becomes: a layout, and the pure functions of a run."""
