"""Layout and program of a configuration."""
