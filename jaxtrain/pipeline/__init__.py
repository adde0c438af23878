"""Pipeline parallelism: schedules are tables, one engine runs them, a simulator draws them."""
