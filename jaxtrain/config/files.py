"""Atomic writes of files, file locks, path validation, full disks, and the cache folder."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.config.buckets import AnyPath, BucketAccessError, BucketPath, on_disk
from jaxtrain.config.errors import UserError

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# Disk full; over the user's quota; larger than the maximum file size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors caused by the path itself. A disk that is full, missing or broken is not a user error.
_ACCESS_ERRNOS = {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


@contextlib.contextmanager
def path_errors(named: str, *, needs: str) -> Iterator[None]:
    """Turn system errors at the first use of a user's path into UserError, within the context.

    Args:
      named: the argument or binding and its value, for the message.
      needs: what is required instead.

    Raises:
      UserError: there is no such path, no permission, or something else has its name.
      OSError: the disk or the bucket fails.
    """
    try:
        yield
    except BucketAccessError as error:
        raise UserError(f"{named}: {error}") from error
    except OSError as error:
        if error.errno not in _ACCESS_ERRNOS:
            raise
        where = "" if error.filename is None else f" ({error.filename})"
        raise UserError(f"{named}: {error.strerror}{where}; {needs}") from error


def writable(option: str, name: str | None) -> Path | None:
    """Check that an option's file can be written, before the work starts, and return its path."""
    if name is None:
        return None
    file, named = on_disk(name), f"{option} {name!r}"
    folder = file.absolute().parent
    with path_errors(named, needs="name a file in a folder that can be written"):
        if not folder.is_dir():
            raise UserError(f"{named}: there is no folder {folder}")
        if not file.name or (file.exists() and not file.is_file()):
            raise UserError(
                f"{named} is not a file; name one, such as {file / f'out.{option[2:]}'}"
            )
        if option == "--png" and file.suffix.lower() not in ("", ".png"):
            raise UserError(f"{named}: plots are PNG files; use {file.with_suffix('.png')}")
        if option == "--html" and file.suffix.lower() not in ("", ".html", ".htm"):
            raise UserError(f"{named}: the page is HTML; use {file.with_suffix('.html')}")
        tempfile.TemporaryFile(dir=folder).close()
    return file


def write_atomically(file: AnyPath, content: bytes) -> None:
    """Write a temporary file and rename it: readers see the old content or the new, never a part.

    Raises:
      FullDiskError: there is no room; the old content stays.
    """
    if isinstance(file, BucketPath):
        file.write_bytes(content)
        return
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with writing(file), temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk, whichever process wrote it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def create(file: AnyPath, content: bytes) -> None:
    """Create the file with its whole content if it does not exist: of concurrent callers, one
    succeeds.

    Return without an error if the file exists, perhaps written by ourselves: networks repeat
    requests whose answer they lost. The file's content shows who succeeded.
    """
    if isinstance(file, BucketPath):
        with contextlib.suppress(FileExistsError):
            file.create(content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.stem}.{uuid.uuid4().hex}.tmp")
    write_atomically(temporary, content)
    try:
        os.link(temporary, file)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links on this file system: until the content is written, the file identifies
        # nobody.
        with contextlib.suppress(FileExistsError), file.open("xb") as stream:
            stream.write(content)
    finally:
        temporary.unlink(missing_ok=True)


def remove_tree(folder: AnyPath) -> None:
    """Delete a folder and its contents; other processes may delete files there too."""
    if isinstance(folder, BucketPath):
        folder.remove_tree()
        return
    while folder.exists():
        # TensorStore removes its lock files, perhaps between the listing and the deletion.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def cache_folder(kind: str) -> Path:
    """Return the cache folder for one kind of result: under $JAXTRAIN_CACHE, or else the home
    folder.
    """
    chosen = os.environ.get("JAXTRAIN_CACHE")
    if chosen:
        return Path(chosen) / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxtrain" / kind


class FullDiskError(OSError):
    """Disk full: the file that cannot be written, and why."""


def full_disk(error: BaseException) -> str | None:
    """Return the system's message if an error or its cause is a full disk (or quota), else None.

    Libraries wrap the system's message into messages of their own, some screens long.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    message = next((os.strerror(one) for one in _FULL if os.strerror(one) in str(error)), None)
    led_to_it = error.__cause__ or error.__context__
    return message if message or led_to_it is None else full_disk(led_to_it)


def room(path: Path) -> str:
    """Return the free space at a path and its file system, as "0 bytes are free there, of ... "."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    mounted = folder.resolve()
    while not mounted.is_mount():
        mounted = mounted.parent
    return (
        f"{usage.free:,} bytes are free there, of the {usage.total:,} of the file system mounted "
        f"at {mounted}"
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk while writing a file into FullDiskError, within the context.

    Raises:
      FullDiskError: the file system has no room for it.
      OSError: any other system error.
    """
    try:
        yield
    except OSError as error:
        reason = full_disk(error)
        if reason is None:
            raise
        raise FullDiskError(f"{path}: {reason}; {room(path)}") from error


class Appended:
    """File to which pieces are appended atomically; pieces wait while the disk is full.

    A save in progress may fill a disk for a while, and is deleted if it fails: pieces that found no
    room stay in memory until the next append.

    Args:
      file: created if it does not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with writing(file):
            self._stream = file.open("ab", buffering=0)
        self._end = self._stream.tell()
        self._waiting = b""

    @property
    def closed(self) -> bool:
        """Whether the file accepts no more pieces."""
        return self._stream.closed

    def append(self, piece: bytes) -> None:
        """Append pending pieces and a new one; they stay pending while the disk is full."""
        self._waiting += piece
        try:
            self._write()
        except OSError as error:
            if full_disk(error) is None:
                raise

    def close(self) -> None:
        """Append pending pieces and close.

        Raises:
          FullDiskError: there is still no room for it; the pieces before it are complete.
        """
        try:
            with writing(self._file):
                self._write()
        finally:
            self._stream.close()

    def _write(self) -> None:
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            self._stream.truncate(self._end)
            raise
        self._end += len(self._waiting)
        self._waiting = b""


LOCK = ".lock"
_WAIT_SECONDS = 1.0


class BusyFolderError(UserError):
    """Another process holds this folder's lock."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when this process ends.

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
    """Create the contents of a cache folder, or wait until another process has.

    Args:
      folder: of the cache.
      done: whether it exists.
      make: creates it, or continues an interrupted creation, under the folder's lock.

    Raises:
      UserError: the cache folder cannot be written; or what `make` raises.
    """
    with path_errors(f"the cache folder {folder}", needs="set JAXTRAIN_CACHE to another"):
        while not done():
            try:
                make()
            except BusyFolderError:
                time.sleep(_WAIT_SECONDS)
