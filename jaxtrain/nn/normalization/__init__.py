"""Batch norm and group norm of convolutional networks."""
