"""Proves a user's config on simulated devices."""
