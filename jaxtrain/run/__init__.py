"""One run from start to end: its loop, its files, its processes, and what people see of it."""
