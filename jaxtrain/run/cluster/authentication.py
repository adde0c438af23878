"""The run's secret token, and the HMAC handshake that authenticates two processes.

A launcher can pass the token in an environment variable. Otherwise, the token is in a file in the
run's workdir, which all processes share. Process 0 creates the file at the first launch, readable
only by its user. In a bucket, it is an object, readable by everyone with access to the workdir.

The client sends the protocol name and a 32-byte nonce, and process 0 answers with its own nonce.
Each side proves possession of the token by an HMAC-SHA256 over both nonces. The client does so
first: an unauthenticated client receives nothing that allows an offline guess of the token. The
message keys, one per direction, are derived from the token and both nonces, so that no message can
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

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError

VARIABLE = "JAXTRAIN_TOKEN"
_FEWEST, _MOST = 32, 1024  # characters: 32 hexadecimal digits are 128 bits
_GRAMMAR = re.compile(rb"[!-~]{%d,%d}" % (_FEWEST, _MOST))
_WAY_OUT = (
    f"set the same {VARIABLE} for all processes of the run, or unset it for all and use a shared "
    "--workdir"
)


class RunToken:
    """Token of a run, from the environment variable or the file in the workdir."""

    def __init__(
        self,
        environment: Mapping[str, str],
        file: AnyPath,
        *,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Read the environment variable; `make` and `find` read the file.

        Args:
          environment: `os.environ`, or a mapping in tests.
          file: the token file in the workdir, used if the variable is not set.
          report: called with a warning if other users can read the file.

        Raises:
          UserError: the value of the variable is not a valid token.
        """
        self._file, self._report = file, report
        self._given: bytes | None = None
        if VARIABLE not in environment:
            return
        given = environment[VARIABLE].strip()
        self._given = _read(given.encode("utf-8", "surrogateescape"))
        if self._given is None:
            # The message must not contain the value.
            raise UserError(
                f"{VARIABLE} is set to {len(given)} characters: a token has {_FEWEST} to {_MOST}, "
                "none of them blank; make one with 'openssl rand -hex 32', the same for all "
                "processes"
            )

    def make(self) -> bytes:
        """Return the token on process 0; write a new token file if there is no private one.

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
        """Return the token on another process; None if process 0 has not created the file yet.

        Raises:
          UserError: the file belongs to another user.
        """
        return self._given or self._read_private(private=False)

    def share(self) -> bytes:
        """Return the token of hosts that start concurrently: the first creates the file.

        Raises:
          OSError: the file cannot be written.
          UserError: the file belongs to another user.
        """
        found = self.find()
        if found is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            _store(self._file, secrets.token_hex(32).encode() + b"\n", is_first=True)
            found = self.find()
        if found is None:
            raise UserError(f"{self._file} is not a token; remove it")
        return found

    def absent(self, coordinator: str, process: int) -> UserError:
        """Return the error for a process that reaches process 0 but has no token."""
        return UserError(
            f"the coordinator {coordinator} answers, but process {process} has no token to show it:"
            f" {VARIABLE} is not set, and there is no {self._file}; {_WAY_OUT}"
        )

    def differs(self, coordinator: str, process: int) -> UserError:
        """Return the error for a process with a different token than process 0."""
        source = VARIABLE if self._given is not None else str(self._file)
        return UserError(
            f"the coordinator {coordinator} has a different token from the one that process "
            f"{process} has from {source}: it belongs to another run, or has its own token; "
            f"{_WAY_OUT}"
        )

    def _read_private(self, *, private: bool) -> bytes | None:
        """Read the file; with `private`, only if no other user can read or write it."""
        if isinstance(self._file, BucketPath):
            with contextlib.suppress(FileNotFoundError):
                return _read(self._file.read_bytes())
            return None
        try:
            # Do not follow a symbolic link, and do not block on a pipe.
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
    """Return a token without surrounding whitespace; None if it is not a valid token."""
    token = text.strip()
    return token if _GRAMMAR.fullmatch(token) else None


def _store(file: AnyPath, content: bytes, *, is_first: bool = False) -> None:
    """Write a token file; with `is_first`, unless there is one."""
    if isinstance(file, BucketPath):
        with contextlib.suppress(FileExistsError):
            file.create(content) if is_first else file.write_bytes(content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # Created with mode 0600, and renamed after it is complete.
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(handle)
        if is_first:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file)
        else:
            Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)


PROTOCOL = b"jaxtrain-peers-2"
_RANDOM = 32
_PROOF = 32
# Sent instead of process 0's proof if the client's proof is wrong. It is not authenticated: an
# attacker who can inject it could also close the connection.
_WRONG_TOKEN = b"another token".ljust(_PROOF, b"\0")


class UnauthenticatedError(Exception):
    """The peer failed to authenticate; the message describes what it did."""


class OtherTokenError(UnauthenticatedError):
    """The two peers have different tokens."""


class MessageKey:
    """HMAC key of one direction; it protects messages against forgery, replay and reordering."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def mark(self, body: bytes) -> bytes:
        """Return the HMAC of the next message, 32 bytes."""
        number = struct.pack("!Q", self._count)
        self._count += 1
        return hmac.digest(self._key, number + body, "sha256")


# Yields (bytes to send, exact number of bytes to read) and is sent the bytes read; returns the keys
# of the sending and of the receiving direction.
Handshake = Generator[tuple[bytes, int], bytes, tuple[MessageKey, MessageKey]]


def client_handshake(token: bytes) -> Handshake:
    """Run the client side of the handshake, as a generator without I/O.

    Raises:
      OtherTokenError: process 0 has a different token.
      UnauthenticatedError: the server does not use this protocol.
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
    """Run the server side of the handshake (process 0); see `client_handshake`."""
    _same_protocol((yield b"", len(PROTOCOL)))
    joiner, own = (yield b"", _RANDOM), secrets.token_bytes(_RANDOM)
    keys = _Keys.of(token, joiner, own)
    proof = yield PROTOCOL + own, _PROOF
    if not hmac.compare_digest(proof, keys.joiner_proof):
        yield _WRONG_TOKEN, 0
        raise OtherTokenError("could not prove this run's token")
    yield keys.zero_proof, 0
    return MessageKey(keys.from_zero), MessageKey(keys.to_zero)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Keys that both peers derive from the token and both nonces, 32 bytes each."""

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
