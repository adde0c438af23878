"""A TFDS builder of a dozen short texts."""
