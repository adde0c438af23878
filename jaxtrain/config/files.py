"""Atomic writes of files, path validation, and the cache folder."""

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.config.buckets import BucketPath, BucketRefusedError, Place, on_disk
from jaxtrain.config.disks import writing
from jaxtrain.config.errors import UserError

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# What a path is to blame for. A disk that is full, away or broken is no error of the user's.
_REFUSALS = {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


@contextlib.contextmanager
def path_errors(named: str, *, needs: str) -> Iterator[None]:
    """Around the first use of a path of the user's: what the system rejects is the user's error.

    Args:
      named: the argument or binding and its value, for the message.
      needs: what would do instead.

    Raises:
      UserError: there is no such path, no permission, or something else in its place.
      OSError: the disk or the bucket fails.
    """
    try:
        yield
    except BucketRefusedError as error:
        raise UserError(f"{named}: {error}") from error
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        place = "" if error.filename is None else f" ({error.filename})"
        raise UserError(f"{named}: {error.strerror}{place}; {needs}") from error


def writable(option: str, name: str | None) -> Path | None:
    """The file that an option names, which can be written; said before the work and not after."""
    if name is None:
        return None
    file, named = on_disk(name), f"{option} {name!r}"
    folder = file.absolute().parent
    with path_errors(named, needs="name a file in a folder that can be written"):
        if not folder.is_dir():
            raise UserError(f"{named}: there is no folder {folder}")
        if not file.name or (file.exists() and not file.is_file()):
            raise UserError(f"{named} is no file; name one, such as {file / f'out.{option[2:]}'}")
        if option == "--png" and file.suffix.lower() not in ("", ".png"):
            raise UserError(f"{named}: what is drawn is PNG; use {file.with_suffix('.png')}")
        if option == "--html" and file.suffix.lower() not in ("", ".html", ".htm"):
            raise UserError(f"{named}: the page is HTML; use {file.with_suffix('.html')}")
        tempfile.TemporaryFile(dir=folder).close()
    return file


def write_atomically(file: Place, content: bytes) -> None:
    """Writes beside the file and renames: readers see the old content or the new, never a part.

    Raises:
      FullDiskError: there is no room; the old content stays.
    """
    if isinstance(file, BucketPath):
        file.write_bytes(content)
        return
    beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with writing(file), beside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when a file's or folder's content, written by whomever, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def create(file: Place, content: bytes) -> None:
    """Makes the file with its whole content unless there is one: of all who try, one succeeds.

    Returns quietly where there is one, perhaps by ourselves: networks repeat requests whose answer
    they lost. Who succeeded is seen in the file.
    """
    if isinstance(file, BucketPath):
        with contextlib.suppress(FileExistsError):
            file.create(content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.stem}.{uuid.uuid4().hex}.tmp")
    write_atomically(beside, content)
    try:
        os.link(beside, file)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No links on this file system. Until the content is there nobody can be judged by it.
        with contextlib.suppress(FileExistsError), file.open("xb") as stream:
            stream.write(content)
    finally:
        beside.unlink(missing_ok=True)


def remove_tree(folder: Place) -> None:
    """Deletes a folder and all in it; others may be deleting what is theirs there."""
    if isinstance(folder, BucketPath):
        folder.remove_tree()
        return
    while folder.exists():
        # TensorStore takes its lock files away, perhaps between the listing and the deletion.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def cache_folder(kind: str) -> Path:
    """Where results of one kind are kept for later processes: under $JAXTRAIN_CACHE, else home."""
    chosen = os.environ.get("JAXTRAIN_CACHE")
    if chosen:
        return Path(chosen) / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxtrain" / kind
