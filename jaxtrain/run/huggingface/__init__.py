"""Import from and export to Hugging Face."""

RECEIPT = "parity.json"  # how far a written model is that of its run
