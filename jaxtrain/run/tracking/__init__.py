"""A run's metrics given to others: to services, or to a function."""
