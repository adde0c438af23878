"""Training a part of a model, the rest held as it is."""
