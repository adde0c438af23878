"""Pipeline parallelism: schedules are tables, one engine runs them."""
