"""Memory of the host: garbage collection outside the step, and settings of glibc's malloc."""

import ctypes
import functools
import gc
import os
import platform
from typing import Self

ARENA_VARIABLES = {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}  # by which users set it
_ARENA_MAX = -8  # M_ARENA_MAX of <malloc.h>
LONG_RUN = 500  # steps of one call of `train`; settling takes a third of a second
# Thresholds of the collector during a start. What imports and traces allocate stays: with Python's
# own thresholds the collector scans it 800 times, a twelfth of the start's processor time.
_AT_START = (50_000, 20, 50)
_USUAL = gc.get_threshold()


class Garbage:
    """Collects the garbage of figures, evaluations and saves after each of them.

    By default cycles wait for the collector, which scans old objects when a quarter of them is new:
    with the half million objects of imports and compilation that is rare. Meanwhile several saves'
    arrays and tens of megabytes of figures pile up. So objects that exist when the step is compiled
    are frozen until the run ends, and the rest is scanned in milliseconds.
    """

    def __init__(self, steps: int) -> None:
        """Args: steps: of the run; a short one is left to Python."""
        self._is_long, self._is_settled = steps >= LONG_RUN, False

    def __enter__(self) -> Self:
        return self

    def settle(self) -> None:
        """Call when the step is compiled: restores the thresholds that `collect_rarely` raised, and
        freezes the objects of a long run, unless some are frozen already.
        """
        if gc.get_threshold() == _AT_START:
            gc.set_threshold(*_USUAL)
        if self._is_long and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_settled = True

    def collect(self) -> None:
        """Call after an evaluation or a save; free memory is returned to the system."""
        if self._is_settled:
            gc.collect()
            give_back()

    def __exit__(self, *_: object) -> None:
        if self._is_settled:
            gc.unfreeze()


def collect_rarely() -> None:
    """Raise the garbage collector's thresholds until `Garbage.settle`; call before imports."""
    gc.set_threshold(*_AT_START)


def share_arenas() -> None:
    """Limit glibc to one malloc arena per core instead of eight; does nothing with another libc.

    Each save's threads start with another arena, whose free memory serves no other:
    a run's memory grew until all arenas had reached the peak of a save. Call before
    libraries start threads. The user's settings win (`ARENA_VARIABLES`).
    """
    library = _glibc()
    if library is not None and not ARENA_VARIABLES & os.environ.keys():
        library.mallopt(_ARENA_MAX, os.cpu_count() or 1)


def give_back() -> None:
    """Return all free pages of glibc to the system, in milliseconds; does nothing with another
    libc.

    By itself glibc returns at most the memory above the last block in use, and with
    `compilation.keep_memory` not even that. If a figure and a save coincide they leave a few
    small blocks at the top, and everything below stays. The next step allocates its own again.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
