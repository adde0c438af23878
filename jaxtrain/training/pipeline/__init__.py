"""Pipeline parallelism: schedules as tables, run by one engine."""
