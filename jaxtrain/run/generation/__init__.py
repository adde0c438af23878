"""Text generation: decoding, sampling, beam search, speculative decoding."""

BATCH_SIZE = 8  # prompts that are answered at once, by default
