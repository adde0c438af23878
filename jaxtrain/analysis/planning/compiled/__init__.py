"""Memory, collectives and arrays of a compiled step, compared with the closed forms."""
