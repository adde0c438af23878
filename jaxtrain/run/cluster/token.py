"""The run's secret token, and how each process obtains it.

A launcher hands it on in an environment variable. Where none does, it is a file in the run's
folder, which the processes share anyway: process 0 makes it at the first start, readable by its own
user alone. In a bucket it is an object, which whoever may read the run's folder may read too.
"""

import contextlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.config.buckets import BucketPath, Place
from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.cluster import Say

VARIABLE = "JAXTRAIN_TOKEN"
_FEWEST, _MOST = 32, 1024  # characters: 32 hexadecimal digits are 128 bits
_GRAMMAR = re.compile(rb"[!-~]{%d,%d}" % (_FEWEST, _MOST))
_WAY_OUT = (
    f"give all processes of the run the same {VARIABLE}, or none of them and a --workdir that they "
    "share"
)


class RunToken:
    """A run's token as one of its processes finds it."""

    def __init__(
        self, environment: Mapping[str, str], file: Place, *, report: Say = lambda line: None
    ) -> None:
        """Looks at the environment; the file is read when it is requested.

        Args:
          environment: `os.environ`, or one made for a test.
          file: in the run's folder, where the environment has none.
          report: takes a line where the file cannot be kept from others.

        Raises:
          UserError: the variable holds what is no token.
        """
        self._file, self._report = file, report
        self._given: bytes | None = None
        if VARIABLE not in environment:
            return
        given = environment[VARIABLE].strip()
        self._given = _read(given.encode("utf-8", "surrogateescape"))
        if self._given is None:
            # The value itself is never said.
            raise UserError(
                f"{VARIABLE} is set to {len(given)} characters: a token has {_FEWEST} to {_MOST}, "
                "none of them blank; make one with 'openssl rand -hex 32', the same for all "
                "processes"
            )

    def make(self) -> bytes:
        """Process 0's: the variable's, the file's, or a new one that is left in the file.

        Raises:
          OSError: the file cannot be written.
        """
        if self._given is not None:
            return self._given
        found = self._read_private(private=True)
        if found is None:
            found = secrets.token_hex(32).encode()
            _store(self._file, found + b"\n")
            if self._read_private(private=True) is None:
                self._report(
                    f"{self._file}, the secret of this run's processes, can be read by others: "
                    f"this file system keeps no owners and modes; set {VARIABLE} to keep them out"
                )
        return found

    def find(self) -> bytes | None:
        """The others': the variable's, or the file's; None: process 0 has left none there yet.

        Raises:
          UserError: the file belongs to another user.
        """
        return self._given or self._read_private(private=False)

    def absent(self, coordinator: str, process: int) -> UserError:
        """That process 0 is there, and its token is not."""
        return UserError(
            f"the coordinator {coordinator} answers, but process {process} has no token to show it:"
            f" {VARIABLE} is not set, and there is no {self._file}; {_WAY_OUT}"
        )

    def differs(self, coordinator: str, process: int) -> UserError:
        """That process 0 has another token."""
        source = VARIABLE if self._given is not None else str(self._file)
        return UserError(
            f"the coordinator {coordinator} has another token than process {process} has from "
            f"{source}: it belongs to another run, or was given its own; {_WAY_OUT}"
        )

    def _read_private(self, *, private: bool) -> bytes | None:
        """What is in the file; with `private` only if nobody else could read or write it."""
        if isinstance(self._file, BucketPath):
            with contextlib.suppress(FileNotFoundError):
                return _read(self._file.read_bytes())
            return None
        try:
            # A link is not followed, and a pipe is not waited for.
            handle = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError as error:
            if private:
                return None
            raise UserError(
                f"{self._file} belongs to another user than the one of this process; {_WAY_OUT}"
            ) from error
        except OSError:
            return None
        with os.fdopen(handle, "rb") as stream:
            facts = os.fstat(handle)
            open_to_others = facts.st_mode & 0o077 or facts.st_uid != os.geteuid()
            if not stat.S_ISREG(facts.st_mode) or (private and open_to_others):
                return None
            return _read(stream.read(_MOST + 2))


def _read(text: bytes) -> bytes | None:
    """A token without the end of its line; None: it is none."""
    token = text.strip()
    return token if _GRAMMAR.fullmatch(token) else None


def _store(file: Place, content: bytes) -> None:
    if isinstance(file, BucketPath):
        file.write_bytes(content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # Of mode 0600 from the first moment, and renamed when it is whole.
    handle, beside = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(handle)
        Path(beside).replace(file)
    finally:
        Path(beside).unlink(missing_ok=True)
