"""A TFDS builder of the form of CIFAR-10."""
