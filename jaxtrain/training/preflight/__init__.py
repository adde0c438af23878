"""Preflight: validation of a configuration before anything is built."""
