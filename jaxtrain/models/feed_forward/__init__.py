"""Feed-forward networks on vectors."""
