"""Commands that train, evaluate and use runs, with their options."""
