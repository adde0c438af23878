"""Analysis of training runs: plans for target machines, verification, profiles."""
