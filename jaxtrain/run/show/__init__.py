"""Displays of a run: tables, progress, figures, notebooks."""
