"""Settings of glibc's malloc: the number of arenas, and when free memory is returned."""

import ctypes
import functools
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
    library = _glibc()
    if library is not None and not ARENA_VARIABLES & os.environ.keys():
        library.mallopt(_ARENA_MAX, os.cpu_count() or 1)


def give_back() -> None:
    """Gives the system all pages that glibc has free, in milliseconds; nothing with another libc.

    By itself glibc gives back at most what lies above the last block in use, and with
    `compilation.keep_memory` not that. Where a drawing and a save fall together they leave a few
    small blocks above all else, and everything below stays. The step after it takes its own again.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
