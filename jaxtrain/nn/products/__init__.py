"""Matmuls of activations and weights: gathered, quantized, grouped, overlapped."""
