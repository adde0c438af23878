"""Attempts of a run: lock, watchdog, exit record, restarts."""

# Exit statuses of the command line; 75 requests a restart (sysexits.h: EX_TEMPFAIL).
DONE, FAILED, USER_ERROR, PREEMPTED = 0, 1, 2, 75
