"""A trained model in few bits, for use after training."""
