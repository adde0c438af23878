"""Post-training quantization (AWQ)."""
