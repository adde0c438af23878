"""Goodput planned before a run: failures, recovery, saves, and what each of them costs."""
