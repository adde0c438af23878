"""How many arenas of free memory the C library keeps for this process's threads."""

import ctypes
import os
import platform

ARENA_VARIABLES = {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}  # by which users of glibc say it
_ARENA_MAX = -8  # M_ARENA_MAX of <malloc.h>


def share_arenas() -> None:
    """Has glibc keep an arena of free memory a core, in place of eight; nothing with another libc.

    Each save's threads begin with another arena, and what they have freed there serves no other:
    a run's memory grew until all arenas had seen the most that a save takes. To be called before
    libraries start threads. What the user says stays (`ARENA_VARIABLES`).
    """
    if ARENA_VARIABLES & os.environ.keys():
        return
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_ARENA_MAX, os.cpu_count() or 1)
