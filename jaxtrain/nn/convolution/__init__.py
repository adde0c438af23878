"""Convolutions, pooling, and stacks of them."""
