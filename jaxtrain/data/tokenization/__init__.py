"""Tokenizers, their files, and tokenization of long texts."""
