"""Target machines of a plan, and compile-only devices of them; their chips: `parallel.chips`."""
