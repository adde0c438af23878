"""Local (multi-tier) checkpoints: on each host's own disk or in its memory."""
