"""SPMD training on JAX and Flax whose claims can be checked before an accelerator is rented."""
