"""The processes of a run: found, joined by its token; they notice a loss and stop together."""
