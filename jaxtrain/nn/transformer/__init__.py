"""Transformer blocks and stacks, positional embeddings, and the interface of language models."""
