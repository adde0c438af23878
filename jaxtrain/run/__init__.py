"""One run: its loop, its files, its processes, and its displays."""
