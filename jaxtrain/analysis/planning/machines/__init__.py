"""Target machines, and compile-only devices of them."""
