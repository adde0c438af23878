"""Matmuls: sharded contraction, collective matmul, 8-bit and grouped ones, quantized weights."""
