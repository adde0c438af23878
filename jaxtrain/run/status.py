"""The exit statuses of the command line."""

DONE, FAILED, USER_ERROR, PREEMPTED = 0, 1, 2, 75
