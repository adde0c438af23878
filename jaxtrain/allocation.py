"""What a CPU's programs allocate stays the process's, instead of coming from the system each step.

XLA asks for a program's temporaries anew at every run. Above 32 MiB glibc maps such memory, which
the system gives out page by page, zeroed, while the step runs: a fifth of a step's time. So XLA
makes several blocks of less, and glibc keeps what is freed.
"""

import ctypes
import os
import sys
import warnings

from jaxlib import utils as jaxlib_utils

# Of a block of temporaries that holds more than one array. Programs of one block stay in the cache
# of compiled programs, those of several XLA cannot write down.
BLOCK_BYTES = 31 * 2**20

# mallopt's options (glibc's malloc.h) and their values. Blocks up to 32 MiB, glibc's limit, are not
# mapped; the free end of a heap is not given back; and a thread's heap, of 64 MiB, stays where it
# is empty, since it would go only if that much were free in the heap before it.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = -3, -1, -2
_KEPT = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 * 2**20}
_WARNING, _ERROR = "1", 2  # of XLA's log


def keep_memory(platform: str) -> bool:
    """Has this process keep what its programs free, where they run on CPUs.

    Whoever set glibc's `MALLOC_*` or `GLIBC_TUNABLES` has chosen, and the memory is left alone. Two
    complaints about programs of several blocks are dropped: XLA's log of every array above
    BLOCK_BYTES, and with it its other warnings, unless `TF_CPP_MIN_LOG_LEVEL` is set to another
    level than JAX's own; and JAX's that such a program cannot be kept on disk.

    Args:
      platform: of the devices: "cpu", "gpu" or "tpu".

    Returns:
      whether the memory is kept: not without glibc.
    """
    if platform != "cpu":
        return False
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", _WARNING) == _WARNING:
        jaxlib_utils.absl_set_min_log_level(_ERROR)
    unwritten = "Error writing persistent compilation cache entry.*Multiple temp buffer"
    warnings.filterwarnings("ignore", message=unwritten, category=UserWarning)
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(library.mallopt(option, value) for option, value in _KEPT.items())
