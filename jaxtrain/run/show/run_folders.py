"""Discovery of run folders: several runs, or those of a sweep."""

from collections.abc import Iterator
from pathlib import Path

_DEPTH = 3  # a folder of runs may hold a sweep's folder, which holds runs
_SHOWN = 8


def runs_in(folder: Path, file: str) -> list[Path]:
    """The folders below this one that hold a file of runs, in order of their names.

    Args:
      folder: a folder.
      file: what a run's folder has, such as `config.gin`.
    """
    return list(_below(folder, file, _DEPTH))


def _below(folder: Path, file: str, depth: int) -> Iterator[Path]:
    for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
        if (inside / file).is_file():
            yield inside
        elif depth > 1 and not inside.name.startswith("."):
            yield from _below(inside, file, depth - 1)


def list_names(runs: list[Path]) -> str:
    """Some runs by their paths, for a message."""
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return ", ".join(map(str, runs[:_SHOWN])) + more
