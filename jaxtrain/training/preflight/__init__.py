"""What a configuration may not ask, said before anything is built."""
