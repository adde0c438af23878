"""Analysis of a run without trusting it: plans for target machines, verification, profiles."""
