"""Attempts of a run: lock, watchdog, exit record, restarts."""
