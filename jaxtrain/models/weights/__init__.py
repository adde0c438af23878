"""Weight conversion: name maps and settings of Hugging Face models, one file per family."""
