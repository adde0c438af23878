"""Text generation: decoding, sampling, beam search, speculative decoding."""
