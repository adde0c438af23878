"""Profile of the train step by layer and operation, from a trace of a few steps."""
