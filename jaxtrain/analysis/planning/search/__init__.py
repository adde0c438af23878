"""Search over layouts of a model on a target: space, candidates, variants, budgets."""
