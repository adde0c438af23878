"""Update rules, their schedules and what they keep."""
