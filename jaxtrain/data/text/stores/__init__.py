"""Token stores: prepare, read, upload and download tokenized text."""
