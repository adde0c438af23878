"""Goodput of a planned run: failures, recovery, checkpoint saves, and the cost of each."""
