"""Memory of the host: garbage collection outside the step, and settings of glibc's malloc."""

import ctypes
import functools
import gc
import os
import platform
from typing import Self

ARENA_VARIABLES = {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}  # by which users of glibc say it
_ARENA_MAX = -8  # M_ARENA_MAX of <malloc.h>
LONG_RUN = 500  # steps of one call of `train`; to settle takes a third of a second


class Garbage:
    """Has the cycles collected that drawings, evaluations and saves leave behind, one after each.

    They wait for the collector, which looks at old objects when a quarter of them is new: with
    the half million that imports and compilation make that is seldom. Meanwhile several saves'
    arrays and tens of megabytes of drawings pile up. So what is there when the step is compiled is
    left out of account until the run ends, and the rest is looked at in milliseconds.
    """

    def __init__(self, steps: int) -> None:
        """Args: steps: of the run; a short one is left to Python."""
        self._is_long, self._is_settled = steps >= LONG_RUN, False

    def __enter__(self) -> Self:
        return self

    def settle(self) -> None:
        """To be called when the step is compiled; nothing where somebody froze objects already."""
        if self._is_long and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_settled = True

    def collect(self) -> None:
        """To be called after an evaluation or a save; what becomes free is the system's again."""
        if self._is_settled:
            gc.collect()
            give_back()

    def __exit__(self, *_: object) -> None:
        if self._is_settled:
            gc.unfreeze()


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
    """Give the system all pages that glibc has free, in milliseconds; nothing with another libc.

    By itself glibc returns at most the memory above the last block in use, and with
    `compilation.keep_memory` not that. Where a drawing and a save fall together they leave a few
    small blocks above all else, and everything below stays. The step after it takes its own again.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
