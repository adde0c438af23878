"""The folder that holds a run's checkpoints: which are finished, which stay, what is swept out."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.checkpoint.manifest import is_sealed

# What Orbax calls a folder that it is still writing: `<step>.orbax-checkpoint-tmp`, and with a
# number behind it in some versions.
_UNFINISHED = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_DELETED, _DAMAGED = "deleted-", "damaged-"


def sealed_steps(root: Path) -> list[int]:
    """The steps of all finished checkpoints in `root`, in order."""
    return sorted(int(path.name) for path in _entries(root) if _is_step(path) and is_sealed(path))


def expired(steps: Iterable[int], *, keep: int, keep_every: int | None) -> list[int]:
    """The steps that need not stay: all but the newest `keep` and the multiples of `keep_every`."""
    old = sorted(steps)[:-keep]
    return [step for step in old if keep_every is None or step % keep_every]


def delete(root: Path, step: int) -> None:
    """Deletes a checkpoint; a kill meanwhile leaves nothing that looks like one."""
    doomed = root / f"{_DELETED}{step}"
    if doomed.exists():
        shutil.rmtree(doomed)
    (root / str(step)).rename(doomed)
    shutil.rmtree(doomed)


def put_aside(root: Path, step: int) -> Path:
    """Renames a damaged checkpoint, so that its step may be saved again; returns the new place."""
    aside, count = root / f"{_DAMAGED}{step}", 1
    while aside.exists():
        count += 1
        aside = root / f"{_DAMAGED}{step}-{count}"
    (root / str(step)).rename(aside)
    return aside


def leftovers(root: Path) -> list[Path]:
    """What killed and failed saves left behind: nothing of a finished checkpoint, nor of others."""
    return [
        path
        for path in _entries(root)
        if (_is_step(path) and not is_sealed(path))
        or _UNFINISHED.fullmatch(path.name)
        or path.name.startswith(_DELETED)
    ]


def sweep(root: Path) -> list[str]:
    """Removes the leftovers; returns a line for each, its name, size and what it was.

    Raises:
      OSError: something cannot be removed.
    """
    lines = []
    for path in leftovers(root):
        if path.is_symlink():
            path.unlink()
            lines.append(f"removed {path}, a link to no finished checkpoint")
            continue
        deleted = path.name.startswith(_DELETED)
        was = "a checkpoint being deleted" if deleted else "a save that was never finished"
        lines.append(f"removed {path} ({size(path):,} bytes), the remains of {was}")
        shutil.rmtree(path)
    return lines


def size(folder: Path) -> int:
    """Bytes of all files in a folder, its links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() or path.is_symlink())
    except FileNotFoundError:
        return []


def _is_step(path: Path) -> bool:
    # As this package writes it: another name of the same number is somebody else's.
    return path.name.isascii() and path.name.isdigit() and str(int(path.name)) == path.name
