"""Conversations as training data: chat templates, preference pairs."""
