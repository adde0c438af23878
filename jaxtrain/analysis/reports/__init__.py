"""HTML reports of plans and verifications: the terminal output as a self-contained page."""
