"""Multiple-choice tasks, scored by log-likelihood."""
