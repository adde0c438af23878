"""Predicted step time: executed FLOPs, efficiency factors, schedules, pipeline timelines."""
