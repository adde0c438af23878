"""Pipeline parallelism: schedules as timetables, run by one engine."""
