"""Order of the examples: shuffle, mixtures, length buckets, rows of a batch."""
