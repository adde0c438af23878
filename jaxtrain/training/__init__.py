"""A configuration becomes one checked, pure program: what a step computes."""
