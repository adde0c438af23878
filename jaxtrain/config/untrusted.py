"""Bounded reading of untrusted files: regular files of a limited size, JSON of a limited depth.

Every reader of untrusted files goes through here, so that none of them blocks on a FIFO, fills
the memory or exhausts Python's stack.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors

# The largest published tokenizer.json files have 33 MB and 2 million values. Python needs up to
# about 100 bytes for a value, and 6 times the text: together these limits stay below 1 GB.
MAX_JSON_BYTES = 64 << 20
MAX_JSON_VALUES = 5_000_000
MAX_JSON_DEPTH = 64  # the deepest published files have 10 levels; Rust's reader stops at 128
_MAX_DIGITS = 38  # a float holds such a number; transformers writes 10**30 for "no limit"
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class MalformedError(ValueError):
    """Content that is not what its format allows, or exceeds a limit of this module."""


def open_regular(path: Path, *, named: str | None = None) -> BinaryIO:
    """Open a regular file for reading, without ever waiting for a FIFO's writer.

    Args:
      path: the file.
      named: its name in messages; None: its path.

    Raises:
      UserError: it is a folder, a FIFO, a socket or a device, or the system denies it.
    """
    named = named or str(path)
    with path_errors(named, needs="use a file that can be read"):
        # A path is checked before it is opened: opening a device may have side effects.
        _require_regular(os.stat(path).st_mode, named)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    stream = os.fdopen(handle, "rb")
    try:
        _require_regular(os.fstat(handle).st_mode, named)
    except UserError:
        stream.close()
        raise
    return stream


def _require_regular(mode: int, named: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise UserError(f"{named} is {kind}, not a file; use a file that can be read")


def read_bounded(path: AnyPath, *, named: str | None = None, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
      UserError: it is larger, not a regular file, or cannot be read.
    """
    named = named or str(path)
    if isinstance(path, BucketPath):
        with path_errors(named, needs="use a file that can be read"):
            content = path.read_bytes() if path.size() <= limit else None
    else:
        with open_regular(path, named=named) as stream:
            # `read(limit)` allocates the limit, whatever the size; a file may also grow meanwhile.
            size = min(os.fstat(stream.fileno()).st_size, limit)
            content = stream.read(size + 1)
            if len(content) > size:
                content += stream.read(limit + 1 - len(content))
    if content is None or len(content) > limit:
        raise UserError(f"{named} is larger than {limit:,} bytes, which no such file is")
    return content


def parse_json(content: bytes | str, *, unique_names: bool = False) -> Any:
    """Return the value of a JSON text, within this module's limits of size, depth and digits.

    Args:
      content: UTF-8 text.
      unique_names: whether an object with a name twice is malformed; else the last value counts.

    Raises:
      MalformedError: it is not JSON, or exceeds a limit.
    """
    if len(content) > MAX_JSON_BYTES:
        raise MalformedError(f"{len(content):,} bytes, at most {MAX_JSON_BYTES:,} are read")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        if sum(map(text.count, "[{,")) > MAX_JSON_VALUES:
            raise MalformedError(f"more than {MAX_JSON_VALUES:,} values")
        value = (_UNIQUE if unique_names else _ANY).decode(text)
    except MalformedError:
        raise
    except RecursionError:
        raise MalformedError(f"nested more than {MAX_JSON_DEPTH} levels deep") from None
    except ValueError as error:
        raise MalformedError(str(error)) from error
    _require_shallow(value)
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise MalformedError(f"a number of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise MalformedError("a name stands in it twice")
    return names


_ANY = json.JSONDecoder(parse_int=_parse_int)
_UNIQUE = json.JSONDecoder(parse_int=_parse_int, object_pairs_hook=_unique)


def _require_shallow(value: Any) -> None:
    """Count levels without recursion: deeper values cannot be printed or written again."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise MalformedError(f"nested more than {MAX_JSON_DEPTH} levels deep")


def parse_json_object(
    content: bytes, *, named: str, advice: str = "fetch it again"
) -> dict[str, Any]:
    """Return the object of a JSON file of another program.

    Args:
      content: of the file.
      named: the file, for messages.
      advice: what to do, for messages.

    Raises:
      UserError: it is not a JSON object within the limits, or holds an unpaired surrogate,
        which can be neither printed nor written.
    """
    try:
        value = parse_json(content)
        if b"\\ud" in content or b"\\uD" in content:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{named} holds an unpaired surrogate; {advice}") from error
    except MalformedError as error:
        raise UserError(f"{named} is not JSON ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise UserError(f"{named} is not a JSON object; {advice}")
    return value


def read_json_object(
    path: AnyPath, *, named: str | None = None, advice: str = "fetch it again"
) -> dict[str, Any]:
    """Return the object of another program's JSON file: `read_bounded`, then `parse_json_object`.

    Raises:
      UserError: see both.
    """
    content = read_bounded(path, named=named)
    return parse_json_object(content, named=named or str(path), advice=advice)
