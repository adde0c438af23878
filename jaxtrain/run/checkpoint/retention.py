"""Checkpoint retention: which steps are complete, kept, or deleted."""

import re
from collections.abc import Collection, Iterable

from jaxtrain.config.buckets import BucketPath, Place, in_threads
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import remove_tree
from jaxtrain.run.checkpoint.manifest import FILE, is_sealed

FOLDER = "checkpoints"
# What Orbax calls a folder that it is still writing: `<step>.orbax-checkpoint-tmp`, and with a
# number behind it in some versions.
_UNFINISHED = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_DELETED, _DAMAGED = "deleted-", "damaged-"


def sealed_steps(root: Place) -> list[int]:
    """The steps of all finished checkpoints in `root`, in order."""
    return sorted(int(path.name) for path in _entries(root) if _is_step(path) and is_sealed(path))


def require_sealed(root: Place, step: int) -> None:
    """Raises UserError where there is no finished checkpoint of a step; names the nearest."""
    steps = sealed_steps(root)
    if step in steps:
        return
    there = "there is none at all"
    if steps:
        near = min(steps, key=lambda other: abs(other - step))
        there = f"there are {', '.join(map(str, steps))}; the nearest is {near}"
    raise UserError(f"no checkpoint of step {step} in {root}; {there}")


def select_expired(
    steps: Collection[int], *, keep: int, keep_every: int | None, best: Iterable[int] = ()
) -> list[int]:
    """The steps that need not stay: all but the newest `keep`, the multiples of `keep_every`, and
    the best.

    Args:
      steps: of all finished checkpoints.
      keep: how many of the newest stay.
      keep_every: multiples of this stay too; None: only the newest.
      best: steps of which each was better than those before it; the last of them that is finished
        stays, so that the one before it goes only when that is whole.
    """
    old = sorted(steps)[:-keep]
    stays = max((step for step in best if step in steps), default=None)
    return [s for s in old if s != stays and (keep_every is None or s % keep_every)]


def delete(root: Place, step: int) -> None:
    """Deletes a checkpoint; a kill meanwhile leaves nothing that looks like one."""
    folder = root / str(step)
    if isinstance(folder, BucketPath):
        (folder / FILE).unlink(missing_ok=True)
        remove_tree(folder)
        return
    doomed = folder.with_name(f"{_DELETED}{step}")
    if doomed.exists():
        remove_tree(doomed)
    folder.rename(doomed)
    remove_tree(doomed)


def put_aside(root: Place, step: int) -> Place:
    """Renames a damaged checkpoint, so that its step may be saved again; returns the new place."""
    aside, count = root / f"{_DAMAGED}{step}", 1
    while aside.exists():
        count += 1
        aside = root / f"{_DAMAGED}{step}-{count}"
    folder = root / str(step)
    if not isinstance(folder, BucketPath):
        folder.rename(folder.with_name(aside.name))
        return aside
    # A bucket renames nothing: copied, within the storage, and deleted. A kill while it is copied
    # leaves the checkpoint, to be found damaged again; one while it is deleted leaves the copy.
    in_threads(
        lambda row: (folder / row.name).copy_to(root / aside.name / row.name), folder.list_objects()
    )
    delete(root, step)
    return aside


def leftovers(root: Place) -> list[Place]:
    """What killed and failed saves left behind: nothing of a finished checkpoint, nor of others."""
    return [
        path
        for path in _entries(root)
        if (_is_step(path) and not is_sealed(path))
        or _UNFINISHED.fullmatch(path.name)
        or path.name.startswith(_DELETED)
    ]


def reject_others(workdir: Place) -> None:
    """Rejects a folder whose checkpoints are another program's, which `sweep` would delete.

    Raises:
      UserError: there are unfinished saves, but neither a finished one nor `config.gin`, which a
        run writes before its first save.
    """
    root = workdir / FOLDER
    found = leftovers(root)
    if found and not sealed_steps(root) and not (workdir / "config.gin").exists():
        raise UserError(
            f"--workdir {workdir}: {found[0]} is no checkpoint of jaxtrain's, and no config.gin "
            "says that this folder is a run's; use another folder, or remove what is in the way"
        )


def sweep(root: Place) -> list[str]:
    """Removes the leftovers; returns a line for each, its name, size and what it was.

    Raises:
      OSError: something cannot be removed.
    """
    lines = []
    for path in leftovers(root):
        if path.is_symlink():
            assert not isinstance(path, BucketPath)
            path.unlink()
            lines.append(f"removed {path}, a link to no finished checkpoint")
            continue
        deleted = path.name.startswith(_DELETED)
        was = "a checkpoint being deleted" if deleted else "a save that was never finished"
        lines.append(f"removed {path} ({size(path):,} bytes), the remains of {was}")
        remove_tree(path)
    return lines


def size(folder: Place) -> int:
    """Bytes of all files in a folder, its links not followed."""
    if isinstance(folder, BucketPath):
        return sum(row.bytes for row in folder.list_objects())
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _entries(root: Place) -> list[Place]:
    try:
        if isinstance(root, BucketPath):
            # What is no folder has no manifest in it and no name of Orbax's.
            return list(root.iterdir())
        return sorted(path for path in root.iterdir() if path.is_dir() or path.is_symlink())
    except FileNotFoundError:
        return []


def _is_step(path: Place) -> bool:
    # As this package writes it: another name of the same number is somebody else's.
    return path.name.isascii() and path.name.isdigit() and str(int(path.name)) == path.name
