"""The run's secret token, and the HMAC handshake that authenticates two processes.

A launcher passes the token in an environment variable. Otherwise it is a file in the run's
folder, which the processes share anyway: process 0 creates it at the first launch, readable by its
user alone. In a bucket it is an object, readable by everyone with access to the run's folder.

The process that connects sends the protocol's name and 32 random bytes, process 0 answers with 32
of its own. Each proves that it has the token by an HMAC-SHA256 over both, the one that connects
first: an unauthenticated client receives nothing that a guess could be tried on. The keys of the
messages are derived from the token and both numbers, one for each direction, so that no message can
be replayed on another connection.
"""

import contextlib
import dataclasses
import hmac
import os
import re
import secrets
import stat
import struct
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Self

from jaxtrain.config.buckets import BucketPath, Place
from jaxtrain.config.errors import UserError

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
        self,
        environment: Mapping[str, str],
        file: Place,
        *,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Look at the environment; the file is read when it is requested.

        Args:
          environment: `os.environ`, or one made for a test.
          file: in the run's folder, where the environment has none.
          report: called with a line where the file cannot be kept from others.

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
        """Return the others': the variable's, or the file's; None: process 0 has left none there
        yet.

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
        """Read the file; with `private` only if nobody else could read or write it."""
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
                f"{self._file} belongs to another user than this process; {_WAY_OUT}"
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
    """Return a token without the end of its line; None: it is none."""
    token = text.strip()
    return token if _GRAMMAR.fullmatch(token) else None


def _store(file: Place, content: bytes) -> None:
    if isinstance(file, BucketPath):
        file.write_bytes(content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # Of mode 0600 from the first moment, and renamed when it is whole.
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(handle)
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)


PROTOCOL = b"jaxtrain-peers-2"
_RANDOM = 32
_PROOF = 32
# Instead of process 0's proof: it does not accept the other's. Without the token nobody could tell
# who says so, and whoever can say it could as well close the connection.
_REFUSED = b"another token".ljust(_PROOF, b"\0")


class UnauthenticatedError(Exception):
    """The other end does not prove that it belongs to the run; the text says what it did."""


class OtherTokenError(UnauthenticatedError):
    """The two ends have different tokens."""


class MessageKey:
    """Marks the messages of one direction: who has no key cannot write, repeat or reorder them."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def mark(self, body: bytes) -> bytes:
        """Return the mark of the next message, 32 bytes."""
        number = struct.pack("!Q", self._count)
        self._count += 1
        return hmac.digest(self._key, number + body, "sha256")


# Yields what to send and how many bytes to wait for, more of which must not be read, and takes
# those bytes; returns the keys for what is sent and for what is received.
Handshake = Generator[tuple[bytes, int], bytes, tuple[MessageKey, MessageKey]]


def client_handshake(token: bytes) -> Handshake:
    """Prove the token as the process that connects; nothing is sent and received here.

    Raises:
      OtherTokenError: process 0 has another token.
      UnauthenticatedError: what it sent is not what a process of the run sends.
    """
    own = secrets.token_bytes(_RANDOM)
    answer = yield PROTOCOL + own, len(PROTOCOL) + _RANDOM
    _same_protocol(answer[: len(PROTOCOL)])
    keys = _Keys.of(token, own, answer[len(PROTOCOL) :])
    proof = yield keys.joiner_proof, _PROOF
    if not hmac.compare_digest(proof, keys.zero_proof):
        raise OtherTokenError("has another token")
    return MessageKey(keys.to_zero), MessageKey(keys.from_zero)


def server_handshake(token: bytes) -> Handshake:
    """Prove the token as process 0; see `client_handshake`."""
    _same_protocol((yield b"", len(PROTOCOL)))
    joiner, own = (yield b"", _RANDOM), secrets.token_bytes(_RANDOM)
    keys = _Keys.of(token, joiner, own)
    proof = yield PROTOCOL + own, _PROOF
    if not hmac.compare_digest(proof, keys.joiner_proof):
        yield _REFUSED, 0
        raise OtherTokenError("could not prove this run's token")
    yield keys.zero_proof, 0
    return MessageKey(keys.from_zero), MessageKey(keys.to_zero)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Keys that both ends derive from the token and both random numbers, 32 bytes each."""

    joiner_proof: bytes
    zero_proof: bytes
    to_zero: bytes
    from_zero: bytes

    @classmethod
    def of(cls, token: bytes, joiner: bytes, zero: bytes) -> Self:
        both = PROTOCOL + joiner + zero
        names = [field.name.encode() for field in dataclasses.fields(cls)]
        return cls(*(_mac(token, name, both) for name in names))


def _same_protocol(message: bytes) -> None:
    if message != PROTOCOL:
        raise UnauthenticatedError("sent an invalid handshake")


def _mac(key: bytes, label: bytes, message: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + message, "sha256")
