"""Full disks: detect them under library errors, and describe the file system."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Full; over the user's quota; larger than a file may be here.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(OSError):
    """A file cannot be written for want of space; a sentence that says where and why."""


def full_disk(error: BaseException) -> str | None:
    """What the system says of a full disk, in an error or in what led to it; None: it is not that.

    Libraries wrap what the system says into messages of their own, some screens long.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    told = next((os.strerror(one) for one in _FULL if os.strerror(one) in str(error)), None)
    led_to_it = error.__cause__ or error.__context__
    return told if told or led_to_it is None else full_disk(led_to_it)


def room(path: Path) -> str:
    """What is free at a place, and on which file system: "0 bytes are free there, on ... "."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    mounted = place.resolve()
    while not mounted.is_mount():
        mounted = mounted.parent
    return (
        f"{usage.free:,} bytes are free there, of the {usage.total:,} of the file system mounted "
        f"at {mounted}"
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file.

    Raises:
      FullDiskError: the file system has no room for it.
      OSError: anything else that the system says.
    """
    try:
        yield
    except OSError as error:
        reason = full_disk(error)
        if reason is None:
            raise
        raise FullDiskError(f"{path}: {reason}; {room(path)}") from error
