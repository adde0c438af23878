"""What is known of a run without trusting it: plans for machines not there, proofs, profiles."""
