"""Inference on images, texts and feature vectors: predictions, logits, embeddings."""
