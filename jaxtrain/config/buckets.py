"""Google Cloud Storage paths with the `pathlib` methods that data and runs need.

gcsfs, of jaxtrain[gcs], sends the requests, here and under Orbax and TFDS; arrays go to the bucket
through TensorStore's own driver. An object is complete or absent, and a write of one process is
visible to all others at once, so nothing is renamed and nothing is flushed.

`etils.epath` reads the same buckets through the same gcsfs, and could take over 45 of the 200 lines
of code here. It creates no object that must be new, which the lock needs, shows half an object
after an error, reads in 4 requests and copies through this machine in 14 (here 1 and 1), lists
names that lead out of the folder and leaves out those that end in ~, knows no MD5, and passes on
errors that are no OSError (`test_what_epath_lacks`).
"""

import base64
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from jaxtrain.config.errors import UserError

SCHEME = "gs://"
_THREADS = 16  # requests wait for the network: many concurrent ones take as long as one
# pathlib makes one slash of two.
_ADDRESS = re.compile(r"gs:/+(?P<bucket>[^/]*)/*(?P<rest>.*)", re.DOTALL)


class BucketError(OSError):
    """Error of a bucket: it cannot be reached, or it rejects the request."""


class BucketAccessError(BucketError, PermissionError):
    """Bucket access denied: no permission, or no valid login."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Object below a folder of a bucket.

    Attributes:
      name: its name below the folder, with slashes.
      bytes: its size.
      md5: hex digest of its content as the bucket computed it; None for composed objects.
    """

    name: str
    bytes: int
    md5: str | None


@dataclasses.dataclass(frozen=True, order=True)
class BucketPath:
    """`gs://bucket/folder/name`; its methods have the semantics and errors of pathlib.Path.

    Besides those errors everything here raises BucketError.

    Attributes:
      address: begins with gs://, no slash at its end.
    """

    address: str

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str | PurePosixPath) -> "BucketPath":
        return BucketPath(f"{self.address}/{name}")

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.address.removeprefix(SCHEME).partition("/")[0]

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.address.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """Last part without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """Suffix of the last part, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "BucketPath":
        """Folder that contains this path; a bucket's root is its own parent."""
        above = self.address.rpartition("/")[0]
        return BucketPath(above) if len(above) > len(SCHEME) else self

    def relative_to(self, folder: "BucketPath") -> PurePosixPath:
        """Return the relative path from a folder to this path."""
        assert self.address.startswith(f"{folder}/"), (self, folder)
        return PurePosixPath(self.address[len(folder.address) + 1 :])

    # -- queries -----------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there is an object below this name."""
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        """Return False: buckets have no links."""
        return False

    def iterdir(self) -> Iterator["BucketPath"]:
        """Yield the objects and folders in this folder, in order; FileNotFoundError if it
        is empty.
        """
        found = _ask(self, lambda files: files.ls(self.address, detail=False))
        for name in found:
            inside = f"{SCHEME}{name}".rstrip("/")
            if inside != self.address:
                yield _check(inside, self)

    def list_objects(self) -> list[Stored]:
        """Return all objects below this folder, at any depth, sorted by name.

        Raises:
          UserError: a name leads out of the folder, as names with '..' would on a disk.
        """
        found = _ask(self, lambda files: files.find(self.address, detail=True))
        rows = []
        for name, facts in sorted(found.items()):
            address = f"{SCHEME}{name}"
            # An object whose name ends with a slash represents a folder in some tools.
            if address.endswith("/") or address == self.address:
                continue
            below = _check(address, self).relative_to(self).as_posix()
            rows.append(Stored(below, int(facts["size"]), _hex(facts.get("md5Hash"))))
        return rows

    def size(self) -> int:
        """Return the size of the object in bytes; FileNotFoundError if it does not exist."""
        return int(_ask(self, lambda files: files.info(self.address))["size"])

    # -- reading and writing -----------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """Return the object's content."""
        return _ask(self, lambda files: files.cat_file(self.address))

    def read_range(self, begin: int, end: int) -> bytes:
        """Return the object's bytes from `begin` to before `end`."""
        return _ask(self, lambda files: files.cat_file(self.address, start=begin, end=end))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the object's content, decoded."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Create or replace the object, atomically."""
        _ask(self, lambda files: files.pipe_file(self.address, content))

    def upload(self, file: Path) -> None:
        """Create or replace the object with a file's content, sent in parts; it appears when
        complete.
        """
        _ask(self, lambda files: files.put_file(str(file), self.address))

    def create(self, content: bytes) -> None:
        """Create the object if it does not exist: of concurrent callers, one succeeds.

        Raises:
          FileExistsError: there is one. Perhaps our own: a request whose answer was lost is sent
            again.
        """
        _ask(self, lambda files: files.pipe_file(self.address, content, mode="create"))

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Do nothing: a folder exists while it has contents."""

    def rmdir(self) -> None:
        """Do nothing, like `mkdir`."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            _ask(self, lambda files: files.rm_file(self.address))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all objects below this folder, if there are any."""
        with contextlib.suppress(FileNotFoundError):
            _ask(self, lambda files: files.rm(self.address, recursive=True))

    def copy_to(self, other: "BucketPath") -> None:
        """Copy the object within the storage, not through this machine."""
        _ask(self, lambda files: files.cp_file(self.address, other.address))

    def _kind(self) -> str | None:
        try:
            return _ask(self, lambda files: files.info(self.address))["type"]
        except FileNotFoundError:
            return None


AnyPath = Path | BucketPath


def to_path(name: str | Path | BucketPath) -> AnyPath:
    """Return the path of a name: in a bucket if it begins with gs://, else on a disk.

    Raises:
      UserError: it names another storage, no bucket, leaves the bucket, or names an unknown user's
        home.
    """
    text = str(name)
    found = _ADDRESS.fullmatch(text)
    if found is None:
        scheme, separator, _ = text.partition("://")
        if separator and scheme.isalnum():
            raise UserError(f"{text}: only {SCHEME} URLs and local paths are supported")
        return on_disk(text)
    bucket, rest = found["bucket"], PurePosixPath(found["rest"])
    # gcsfs would interpret stars, question marks and brackets as a pattern.
    if not bucket or "@" in bucket or ".." in (bucket, *rest.parts) or re.search(r"[*?\[]", text):
        raise UserError(
            f"{re.sub('//.*@', '//...@', text)}: write gs://BUCKET/FOLDER, without '..', '*', '?' "
            "and '[', and without credentials"
        )
    return BucketPath(f"{SCHEME}{bucket}/{rest}" if rest.parts else f"{SCHEME}{bucket}")


def on_disk(name: str) -> Path:
    """Return the path of a name, `~` expanded: shells do not expand it after a `=`.

    Raises:
      UserError: it begins with a ~ and there is no such user, or it is not UTF-8, as config.gin
        requires.
    """
    try:
        name.encode()
        return Path(name).expanduser()
    except UnicodeEncodeError as error:
        raise UserError(f"{name!r} is not UTF-8; rename it, or use another path") from error
    except RuntimeError as error:
        user = Path(name).parts[0]
        raise UserError(
            f"{name}: no home folder of {user!r} is known; write the path without '~'"
        ) from error


def require(setting: str, path: BucketPath) -> None:
    """Check that a bucket can be read, before anything is started.

    Args:
      setting: the setting that names the path, for the message.
      path: in the bucket.

    Raises:
      UserError: no such bucket, no permission, no login, or jaxtrain[gcs] is missing.
      BucketError: it cannot be reached.
    """
    try:
        _ask(path, lambda files: files.ls(path.bucket, max_results=1))
    except FileNotFoundError as error:
        raise UserError(
            f"{setting} {path}: there is no bucket {path.bucket!r}; make it with 'gcloud storage "
            f"buckets create {SCHEME}{path.bucket}', or name another"
        ) from error
    except (BucketAccessError, UserError) as error:
        raise UserError(f"{setting} {path}: {error}") from error


def in_threads(function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """Call a function that waits for a bucket on each argument in threads; return the results in
    order.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="bucket") as threads:
        return list(threads.map(function, arguments))


def _check(address: str, folder: BucketPath) -> BucketPath:
    """Return the path of a name that a listing returned, if it is below the folder."""
    below = address[len(folder.address) + 1 :]
    if str(PurePosixPath(below)) != below or ".." in PurePosixPath(below).parts or "\0" in below:
        raise UserError(
            f"{folder}: it holds an object called {below!r}, which is not a file name; rename or "
            "delete that object"
        )
    return BucketPath(address)


def _hex(md5: str | None) -> str | None:
    return None if md5 is None else base64.b64decode(md5).hex()


# -- gcsfs -----------------------------------------------------------------------------------------


@functools.cache
def _files() -> Any:
    """Return the file system that gcsfs opens; UserError if it is not installed."""
    try:
        gcsfs = importlib.import_module("gcsfs")
        config = importlib.import_module("fsspec.config")
    except ImportError as error:
        raise UserError(
            f"buckets need jaxtrain[gcs] ({error}); run: pip install 'jaxtrain[gcs]'"
        ) from error
    # Other processes write there concurrently, so a cached listing would be stale. The settings
    # also reach the file systems of Orbax and TFDS, and keep TensorFlow, if installed, out.
    for scheme in ("gs", "gcs"):
        config.conf.setdefault(scheme, {})["use_listings_cache"] = False
    os.environ.setdefault("EPATH_USE_TF", "false")
    # It logs the traceback of every error before it raises it.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    return gcsfs.GCSFileSystem()


def _ask(path: BucketPath, question: Callable[[Any], Any]) -> Any:
    """Return the result of a gcsfs call; translate its errors into ours."""
    with _translate(path):
        return question(_files())


@contextlib.contextmanager
def _translate(path: BucketPath) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError, UserError):
        raise
    # RuntimeError and the others: gcsfs raises them for malformed responses.
    except (OSError, ValueError, RuntimeError, KeyError, *library_errors()) as error:
        detail = " ".join(str(error).split())[:300] or type(error).__name__
        if str(error).startswith("Forbidden") or _code(error) in (401, 403):
            raise BucketAccessError(
                f"the bucket {path.bucket!r} does not permit it to whoever is logged in here "
                f"({detail}); log in with 'gcloud auth application-default login', or ask for the "
                "role Storage Object User"
            ) from error
        raise BucketError(f"{path.address} did not answer ({detail})") from error


def library_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of gcsfs and its libraries other than OSError; () while it is not
    loaded.
    """
    if "gcsfs" not in sys.modules:
        return ()
    classes = [
        ("gcsfs.retry", "HttpError"),
        ("gcsfs.retry", "ChecksumError"),
        ("gcsfs.retry", "NonRetryableError"),
        ("aiohttp", "ClientError"),
        ("google.auth.exceptions", "GoogleAuthError"),
    ]
    return tuple(getattr(importlib.import_module(module), name) for module, name in classes)


def _code(error: Exception) -> int | None:
    """Return the HTTP status in a gcsfs error."""
    code = str(vars(error).get("code"))
    return int(code) if code.isdigit() else None
