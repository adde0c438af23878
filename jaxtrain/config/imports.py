"""Trusted imports of modules that a config names, without extending Python's search path.

A folder on `sys.path` would give every library that is loaded meanwhile the files in it: a
`matplotlib.py` next to a downloaded config would run in place of the library.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class _Finder:
    """A path finder limited to some folders, and to one top-level module if a name is given."""

    def __init__(self, folders: Sequence[Path], name: str | None = None) -> None:
        self._folders, self._name = [str(folder) for folder in folders], name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a top-level module is; None if it is in none of the folders."""
        if path is not None or self._name not in (None, name):
            return None
        return PathFinder.find_spec(name, self._folders, target)


def import_trusted(module: str, folders: Sequence[Path]) -> None:
    """Import a module that the user trusts, from these folders first.

    What it imports in turn is looked for in the usual places first and in the folders last, so that
    no file there replaces an installed library.

    Raises:
      ImportError: no such module, or another module of that name is loaded already.
    """
    name = module.partition(".")[0]
    own = PathFinder.find_spec(name, [str(folder) for folder in folders])
    loaded = sys.modules.get(name)
    if own is not None and own.origin is not None and loaded is not None:
        origin = getattr(loaded.__spec__, "origin", None)
        if origin is not None and Path(origin).resolve() != Path(own.origin).resolve():
            raise ImportError(
                f"{own.origin} has the name of a module that is loaded already, {origin}; rename it"
            )
    with _search_first(folders, name):
        importlib.import_module(module)


@contextlib.contextmanager
def _search_first(folders: Sequence[Path], name: str) -> Iterator[None]:
    """Within, the module `name` is looked for in the folders first, and all others last."""
    first, last = _Finder(folders, name), _Finder(folders)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
