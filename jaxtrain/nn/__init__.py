"""What models are made of: parameters, products, norms, attention, experts; how they are run."""
