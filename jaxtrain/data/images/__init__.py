"""Images: files, arrays and TFDS to augmented batches."""
