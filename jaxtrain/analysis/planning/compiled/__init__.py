"""What a compiler made of a step: memory, collectives and arrays, held against the textbook."""
