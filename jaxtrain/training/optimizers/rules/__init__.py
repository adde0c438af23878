"""Update rules by family: elementwise, layer-wise, factored, 8-bit, for matrices."""
