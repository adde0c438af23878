"""Sources, tokenizers, packing and batches: everything yields the same Batch."""
