"""Objectives: losses in float32, masked, chunked."""
