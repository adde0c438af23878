"""Questions with known answers, told apart by how probable a model finds them."""
