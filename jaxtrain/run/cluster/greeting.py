"""Handshake: mutual authentication of two processes by the run's token (HMAC).

The one that connects sends the protocol's name and 32 random bytes, process 0 answers with 32 of
its own. Each proves that it has the token by an HMAC-SHA256 over both, the one that connects first:
an unauthenticated client receives nothing that a guess could be tried on. The keys of the messages
are derived from the token and both numbers, one for each direction, so that no message can be
replayed on another connection.
"""

import abc
import dataclasses
import hmac
import secrets
import struct
from typing import Self

PROTOCOL = b"jaxtrain-peers-2"
_RANDOM = 32
_PROOF = 32
# In place of process 0's proof: it does not take the other's. Without the token nobody could tell
# who says so, and whoever can say it could as well close the connection.
_REFUSED = b"another token".ljust(_PROOF, b"\0")


class StrangerError(Exception):
    """The other end does not prove that it belongs to the run; the text says what it did."""


class Seal:
    """Marks the messages of one direction: who has no key cannot write, repeat or reorder them."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def mark(self, body: bytes) -> bytes:
        """The mark of the next message, 32 bytes."""
        number = struct.pack("!Q", self._count)
        self._count += 1
        return hmac.digest(self._key, number + body, "sha256")


class Greeting(abc.ABC):
    """One end of a greeting, fed with what the other end says; it opens no socket.

    Attributes:
      wants: bytes that it waits for, 0 when it is over; more are not read before it has judged.
      seals: for what is sent and for what is received, once both ends have proved the token.
      is_refused: whether the other end has another token.
    """

    wants: int

    def __init__(self, token: bytes) -> None:
        self.seals: tuple[Seal, Seal] | None = None
        self.is_refused = False
        self._token = token
        self._own = secrets.token_bytes(_RANDOM)
        self._keys: _Keys | None = None

    @abc.abstractmethod
    def begin(self) -> bytes:
        """What is said before anything is heard."""

    @abc.abstractmethod
    def hear(self, said: bytes) -> bytes:
        """Takes the bytes that it waited for; what is answered.

        Raises:
          StrangerError: they are not what a process of the run says.
        """


class Joiner(Greeting):
    """The end of the process that connects."""

    wants = len(PROTOCOL) + _RANDOM

    def begin(self) -> bytes:
        return PROTOCOL + self._own

    def hear(self, said: bytes) -> bytes:
        if self._keys is None:
            _same_protocol(said[: len(PROTOCOL)])
            self._keys = _Keys.of(self._token, self._own, said[len(PROTOCOL) :])
            self.wants = _PROOF
            return self._keys.joiner_proof
        self.wants = 0
        if not hmac.compare_digest(said, self._keys.zero_proof):
            self.is_refused = True
            raise StrangerError("has another token")
        self.seals = Seal(self._keys.to_zero), Seal(self._keys.from_zero)
        return b""


class Host(Greeting):
    """Process 0's end."""

    wants = len(PROTOCOL)

    def begin(self) -> bytes:
        return b""

    def hear(self, said: bytes) -> bytes:
        if self.wants == len(PROTOCOL):
            _same_protocol(said)
            self.wants = _RANDOM
            return b""
        if self._keys is None:
            self._keys = _Keys.of(self._token, said, self._own)
            self.wants = _PROOF
            return PROTOCOL + self._own
        self.wants = 0
        if not hmac.compare_digest(said, self._keys.joiner_proof):
            self.is_refused = True
            return _REFUSED
        self.seals = Seal(self._keys.from_zero), Seal(self._keys.to_zero)
        return self._keys.zero_proof


@dataclasses.dataclass(frozen=True)
class _Keys:
    """What both ends compute from the token and both random numbers, 32 bytes each."""

    joiner_proof: bytes
    zero_proof: bytes
    to_zero: bytes
    from_zero: bytes

    @classmethod
    def of(cls, token: bytes, joiner: bytes, zero: bytes) -> Self:
        both = PROTOCOL + joiner + zero
        names = [field.name.encode() for field in dataclasses.fields(cls)]
        return cls(*(_mac(token, name, both) for name in names))


def _same_protocol(said: bytes) -> None:
    if said != PROTOCOL:
        raise StrangerError("sent what is no greeting of this program")


def _mac(key: bytes, label: bytes, said: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + said, "sha256")
