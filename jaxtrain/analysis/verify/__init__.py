"""Verification of a config on simulated devices (`jaxtrain verify`)."""
