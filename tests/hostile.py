"""Mutations of small valid files, and a bounded process that reads them."""

import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEMORY = 1 << 30  # bytes that a reader may add to its process
SECONDS = 10  # of processor time


@dataclasses.dataclass(frozen=True)
class Reader:
    """One way of reading other people's files.

    Attributes:
      make: writes a small valid file or folder into an empty folder.
      read: reads what is in that folder, as the program would.
      files: the names of the files that are mutated; a suffix decides how.
      words: tokens of the format that a mutation inserts, besides JSON's and bytes.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: tuple[str, ...]
    words: tuple[bytes, ...] = ()


# -- mutations ------------------------------------------------------------------------------------

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
DEEP = "[" * 100_000
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 10**9, 10**30, 10**400, 0.5, -0.5, 1e308,
    float("inf"), float("nan"), "", "x", "\ud800", "\x00", "../../etc/passwd", "/dev/zero",
    "a" * 100_000, [], {}, [None], [[]], {"": None}, [0] * 1000, [1, 2], ["a", "b"], {"x": "y"},
]  # fmt: skip
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62,
           2**63, 2**64 - 1]  # fmt: skip


def mutate(content: bytes, name: str, words: tuple[bytes, ...], rng: random.Random) -> bytes:
    """A file's content with one to three changes; of JSON mostly of its values."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if name.endswith(JSON_SUFFIXES) and rng.random() < 0.8:
            content = _mutate_json(content, name, rng)
        elif name.endswith(".safetensors") and rng.random() < 0.7:
            content = _mutate_header(content, rng)
        else:
            content = _mutate_bytes(content, words, rng)
    return content


def _mutate_bytes(content: bytes, words: tuple[bytes, ...], rng: random.Random) -> bytes:
    found, at = bytearray(content), rng.randrange(len(content) + 1)
    # The beginning of a binary file says how the rest is read.
    at = min(at, rng.choice((16, 64, 256, len(content), len(content))))
    size = rng.choice((1, 2, 4, 8, 64, 4096))
    match rng.randrange(8):
        case 0:
            del found[at:]
        case 1:
            del found[at : at + size]
        case 2:
            found[at:at] = bytes(rng.randrange(256) for _ in range(min(size, 64)))
        case 3:
            found[at:at] = found[at : at + size]
        case 4 if found:
            found[min(at, len(found) - 1)] ^= 1 << rng.randrange(8)
        case 5 if words:
            found[at:at] = rng.choice(words)
        case 6:
            found[at : at + size] = bytes(size)
        case _:
            form = rng.choice(("<B", "<H", "<I", "<Q"))
            room = struct.calcsize(form)
            number = rng.choice(NUMBERS) % (1 << 8 * room)
            found[at : at + room] = struct.pack(form, number)
    return bytes(found)


def _mutate_json(content: bytes, name: str, rng: random.Random) -> bytes:
    lines = content.splitlines() if not name.endswith(".json") else [content]
    if not lines:
        return content
    number = rng.randrange(len(lines))
    try:
        tree = json.loads(lines[number])
    except (ValueError, RecursionError):
        return content
    lines[number] = _mutated_tree(tree, rng)
    return b"\n".join(lines) + b"\n"


def _mutated_tree(tree: Any, rng: random.Random) -> bytes:
    """A tree with one of its values replaced, removed or doubled, as text."""
    places: list[tuple[Any, Any]] = []
    level = [tree]
    while level:
        one = level.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else range(len(one))
            places += [(one, key) for key in keys]
            level += [one[key] for key in keys]
    if not places or rng.random() < 0.03:
        return json.dumps(rng.choice(VALUES)).encode()
    # Of a long list of numbers one is as good as another: the tables above it come first.
    outer = [(one, key) for one, key in places if len(one) < 64]
    one, key = rng.choice(outer if outer and rng.random() < 0.8 else places)
    match rng.randrange(10):
        case 0:
            del one[key]
        case 1 if isinstance(one, list):
            one.insert(key, rng.choice(one))
        case 1:
            one[rng.choice(("", "x", "type", f"{key}s"))] = one[key]
        case 2:
            one[key] = "\x01deep"
        case 3 if isinstance(one[key], int):
            one[key] = rng.choice((-one[key], one[key] + 1, one[key] - 1, one[key] * 10**6))
        case 4:
            other, there = rng.choice(places)
            one[key] = json.loads(json.dumps(other[there]))
        case _:
            one[key] = rng.choice(VALUES)
    return json.dumps(tree).replace('"\\u0001deep"', DEEP).encode()


def _mutate_header(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header of the right length."""
    size = int.from_bytes(content[:8], "little")
    try:
        header = _mutated_tree(json.loads(content[8 : 8 + size]), rng)
    except (ValueError, RecursionError):
        return content
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


# -- a bounded process ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a reading ended.

    Attributes:
      kind: "read", "rejected" (an error that the command line prints in a sentence) or "failed".
      told: the sentence, or the traceback.
    """

    kind: str
    told: str = ""


def polite() -> tuple[type[BaseException], ...]:
    """What the command line tells in a sentence, `cli._failures` among it."""
    from jaxtrain.config.buckets import BucketError
    from jaxtrain.config.errors import UserError
    from jaxtrain.run.checkpoint.manifest import CheckpointError

    return UserError, BucketError, CheckpointError


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Within, the process can take MEMORY more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(read: Callable[[Path], object], folder: Path) -> Outcome:
    """Read a folder in this process."""
    try:
        read(folder)
    except polite() as error:
        told = str(error)
        long = len(told) > 4000 or told.count("\n") > 40
        return Outcome("failed" if long or not told else "refused", told)
    except BaseException:  # noqa: BLE001 - panics of Rust are none of Exception
        return Outcome("failed", traceback.format_exc())
    return Outcome("read")


def _serve(connection: Any, readers: Callable[[], dict[str, Reader]], cache: str) -> None:
    os.environ["JAXTRAIN_CACHE"] = cache
    os.environ["JAX_PLATFORMS"] = "cpu"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    faulthandler.disable()
    table = readers()
    while True:
        name, folder, limited = connection.recv()
        if not limited:
            connection.send(attempt(table[name].read, folder))
            continue
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of all its threads; ends the process
        with little_memory():
            outcome = attempt(table[name].read, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(outcome)


class Bounded:
    """A process that reads folders with bounds of memory and time; another follows a dead one.

    Args:
      readers: gives the table; a function of a module, since the process imports it.
      cache: a folder of its own for what the program keeps.
    """

    def __init__(self, readers: Callable[[], dict[str, Reader]], cache: Path) -> None:
        self._readers, self._cache = readers, str(cache)
        self._process: Any = None
        self._warm: set[str] = set()

    def warm(self, name: str, valid: Callable[[], Path]) -> None:
        """Read a valid folder without bounds, unless this process has: imports take of both."""
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(
                target=_serve, args=(theirs, self._readers, self._cache), daemon=True
            )
            self._process.start()
            theirs.close()
            self._warm = set()
        if name not in self._warm:
            outcome = self._ask(name, valid(), limited=False, seconds=300)
            assert outcome.kind == "read", f"{name} does not read a valid file: {outcome.told}"
            self._warm.add(name)

    def read(self, name: str, folder: Path) -> Outcome:
        """Read a folder within the bounds, after `warm`."""
        return self._ask(name, folder, limited=True, seconds=30 * SECONDS)

    def _ask(self, name: str, folder: Path, *, limited: bool, seconds: float) -> Outcome:
        self._connection.send((name, folder, limited))
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
            told = f"no answer within {seconds} s"
        except EOFError:
            self._process.join()
            told = f"the process ended with {self._process.exitcode}"
        self.close()
        return Outcome("failed", told)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def fresh(folder: Path) -> Path:
    """An empty folder of this name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def copy(source: Path, folder: Path) -> None:
    """Make `folder` a copy of another."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, symlinks=True)


def write_mutated(reader: Reader, valid: Path, folder: Path, rng: random.Random) -> str:
    """Copy a valid folder with one of its files mutated; returns that file's name."""
    copy(valid, folder)
    name = rng.choice(reader.files)
    content = (valid / name).read_bytes()
    (folder / name).write_bytes(mutate(content, name, reader.words, rng))
    return name
