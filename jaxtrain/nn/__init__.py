"""Layers that models share: parameters, matmuls, norms, attention, experts, and execution."""
