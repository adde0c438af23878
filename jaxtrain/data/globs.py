"""Glob patterns of data files: `*`, `?`, `[...]` in a name, `**` for folders."""

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.data.source import existing_path, walk_files


def is_glob(source: str) -> bool:
    """Whether a source is a pattern of paths and not the path of something."""
    return bool(re.search(r"[*?\[]", source)) and ("://" in source or not Path(source).exists())


def glob_files(source: str, setting: str) -> list[Place]:
    """The files that a pattern names, in order of their paths' parts.

    Args:
      source: the pattern, from this folder, from a root or in a bucket.
      setting: the binding, for the message.

    Raises:
      UserError: the folder that it begins with is not there, none matches, or a link leads out of
        that folder.
    """
    under = _root(source)
    root = existing_path(setting, under)
    patterns = (source if under == "." else source.removeprefix(under)).strip("/").split("/")
    walked = list(walk_files(root, setting))
    paths = [path for path, name, _ in walked if _matches(name.split("/"), patterns)]
    if not paths:
        raise UserError(
            f"{setting} = {source!r}: none of the {len(walked):,} files under {root} matches it; "
            "'*' stays within a name, '**' stands for any folders"
        )
    return paths


def _root(source: str) -> str:
    """The folder under which everything is that a pattern can match."""
    parts = source.split("/")
    first = next(place for place, part in enumerate(parts) if re.search(r"[*?\[]", part))
    return "/".join(parts[:first]) or ("/" if source.startswith("/") else ".")


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    first, *others = patterns
    if first == "**":
        return any(_matches(names[begin:], others) for begin in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], first) and _matches(names[1:], others)
