"""Data: sources, tokenizers, packing and batches; every source yields the same `Batch`."""
