"""Make a file once for several processes of a machine, under a file lock."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors

LOCK = ".lock"
_WAIT_SECONDS = 1.0


class BusyFolderError(UserError):
    """Another process has this folder's lock."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system frees when this process ends.

    Raises:
      BusyFolderError: another process has it.
    """
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyFolderError(
                f"--out {folder}: another process prepares it now; wait for it, or name another"
            ) from error
        yield


def make_once(folder: Path, done: Callable[[], bool], make: Callable[[], object]) -> None:
    """Makes what a folder of the cache is to hold, or waits until another process has.

    Args:
      folder: of the cache.
      done: whether it is there.
      make: makes it, or goes on with it, under the folder's lock.

    Raises:
      UserError: the cache folder cannot be written; or what `make` raises.
    """
    with path_errors(f"the cache folder {folder}", needs="set JAXTRAIN_CACHE to another"):
        while not done():
            try:
                make()
            except BusyFolderError:
                time.sleep(_WAIT_SECONDS)
