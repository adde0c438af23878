"""Runs that begin with a published model, and runs that become one."""
