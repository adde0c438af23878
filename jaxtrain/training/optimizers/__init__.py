"""Optimizers: update rules, schedules, state."""
