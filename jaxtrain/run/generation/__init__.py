"""What trained language models write, and how their next tokens are chosen."""
