"""One start of a run and the next: its lock and its watch, its end on disk, who starts it again."""
