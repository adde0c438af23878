"""What models are trained to do: losses in float32, masked, whole or a chunk at a time."""
