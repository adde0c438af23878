"""Closed forms: parameters, FLOPs, memory and traffic of a step, with their sources."""
