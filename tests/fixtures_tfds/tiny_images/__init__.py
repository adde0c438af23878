"""A TFDS builder of a few encoded images."""
