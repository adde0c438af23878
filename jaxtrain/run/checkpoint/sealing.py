"""Completion of a save, and retention: sealing, deletion of old steps, failures, leftovers.

The `Sealer` waits for a save in a thread, seals it, and counts failures. A finished checkpoint is a
sealed folder whose name is its step; everything else in the folder is a leftover.
"""

import concurrent.futures
import functools
import itertools
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import jax

from jaxtrain.config.buckets import AnyPath, BucketError, BucketPath, in_threads, library_errors
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import full_disk, remove_tree, room
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.manifest import FILE, CheckpointError, Leaf, is_sealed

FOLDER = "checkpoints"
LOCAL_ID_FILE = "local.json"  # in it: the id of local checkpoints; the supervisor reads it too
# Orbax's name of an unfinished folder: `<step>.orbax-checkpoint-tmp`, and with a
# number after it in some versions.
_UNFINISHED = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_DELETED, _DAMAGED = "deleted-", "damaged-"


def sealed_steps(root: AnyPath) -> list[int]:
    """Return the steps of all finished checkpoints in `root`, in order."""
    return sorted(int(path.name) for path in _entries(root) if _is_step(path) and is_sealed(path))


def require_sealed(root: AnyPath, step: int) -> None:
    """Raise UserError if there is no finished checkpoint of a step; name the nearest."""
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
    """Return the steps that need not stay: all but the newest `keep`, the multiples of
    `keep_every`, and the best.

    Args:
      steps: of all finished checkpoints.
      keep: number of newest checkpoints to keep.
      keep_every: multiples of this are kept too; None: only the newest.
      best: steps that were each better than those before; the last finished one
        is kept, so that the previous one is deleted only when that is complete.
    """
    old = sorted(steps)[:-keep]
    stays = max((step for step in best if step in steps), default=None)
    return [s for s in old if s != stays and (keep_every is None or s % keep_every)]


def delete(root: AnyPath, step: int) -> None:
    """Delete a checkpoint; a kill meanwhile leaves nothing that looks like a finished one."""
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


def put_aside(root: AnyPath, step: int) -> AnyPath:
    """Rename a damaged checkpoint, so that its step may be saved again; return the new path."""
    target, count = root / f"{_DAMAGED}{step}", 1
    while target.exists():
        count += 1
        target = root / f"{_DAMAGED}{step}-{count}"
    folder = root / str(step)
    if not isinstance(folder, BucketPath):
        folder.rename(folder.with_name(target.name))
        return target
    # Buckets cannot rename: copied, within the storage, and deleted. A kill during the copy
    # leaves the checkpoint, to be found damaged again; one during the deletion leaves the copy.
    in_threads(
        lambda row: (folder / row.name).copy_to(root / target.name / row.name),
        folder.list_objects(),
    )
    delete(root, step)
    return target


def leftovers(root: AnyPath) -> list[AnyPath]:
    """Return the remains of killed and failed saves: nothing of a finished checkpoint."""
    return [
        path
        for path in _entries(root)
        if (_is_step(path) and not is_sealed(path))
        or _UNFINISHED.fullmatch(path.name)
        or path.name.startswith(_DELETED)
    ]


def reject_others(workdir: AnyPath) -> None:
    """Reject a folder whose checkpoints are another program's, which `sweep` would delete.

    Raises:
      UserError: there are unfinished saves, but neither a finished one nor `config.gin`, which a
        run writes before its first save.
    """
    root = workdir / FOLDER
    found = leftovers(root)
    if found and not sealed_steps(root) and not (workdir / "config.gin").exists():
        raise UserError(
            f"--workdir {workdir}: {found[0]} is not a jaxtrain checkpoint, and there is no "
            "config.gin to mark this folder as a run; use another folder, or remove what is in "
            "the way"
        )


def sweep(root: AnyPath) -> list[str]:
    """Remove the leftovers; return a line for each, its name, size and what it was.

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
        lines.append(f"removed {path} ({folder_size(path):,} bytes), the remains of {was}")
        remove_tree(path)
    return lines


def folder_size(folder: AnyPath) -> int:
    """Bytes of all files in a folder, its links not followed."""
    if isinstance(folder, BucketPath):
        return sum(row.bytes for row in folder.list_objects())
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _entries(root: AnyPath) -> list[AnyPath]:
    try:
        if isinstance(root, BucketPath):
            # Anything but a folder has no manifest and no Orbax name.
            return list(root.iterdir())
        return sorted(path for path in root.iterdir() if path.is_dir() or path.is_symlink())
    except FileNotFoundError:
        return []


def _is_step(path: AnyPath) -> bool:
    # As this package writes it: another spelling of the same number is not ours.
    return path.name.isascii() and path.name.isdigit() and str(int(path.name)) == path.name


WRITE_SECONDS = 1200  # for the slowest process's part, and for process 0's digests
_AGREE_SECONDS = 60  # for processes that leave a barrier together to reach the next
_BARRIERS_OF_WRITER = 2  # of one save: all have written; process 0 has renamed
# Errors of Orbax when something cannot be written (a full disk: ValueError with TensorStore's
# RESOURCE_EXHAUSTED), and of the coordination service when another process is missing.
UNWRITTEN = (OSError, ValueError, jax.errors.JaxRuntimeError)
_MOST_COMPLAINTS = 8  # of one save: Orbax's metadata are written next to the arrays
_LATE, _OF_A_FILE = "Event loop is closed", "in OCDBT database"
_CANCELLED = r"coroutine '.*\bwrite_fragment' was never awaited"
_serial = itertools.count()  # of saves: equal on all processes, so that no barrier's name repeats


class Barrier(Protocol):
    """Returns when all processes have come to `key`; raises JaxRuntimeError when time is up."""

    def __call__(self, *, key: str, timeout_ms: int) -> None: ...


def unwritten() -> tuple[type[BaseException], ...]:
    """Return UNWRITTEN, and the errors of bucket libraries, under Orbax too."""
    return (*UNWRITTEN, *library_errors())


def drain(wait: Callable[[], None], first: BaseException | None = None) -> None:
    """Wait for a writer until it raises no more errors, and raise the first of them.

    Remaining errors would be attributed to the next save.

    Args:
      wait: returns when all is written, or raises an error.
      first: an earlier error.
    """
    for _ in range(_MOST_COMPLAINTS):
        try:
            wait()
            break
        except unwritten() as error:
            first = first or error
    if first is not None:
        raise first


@functools.cache  # once in a process
def filter_late_errors() -> None:
    """Suppress messages about a failed save's other files after the first one.

    Orbax closes its event loop at the first: TensorStore then finds the loop closed, and asyncio
      prints a traceback for each at the very end, after our own last line.
    Python warns there too, of the parts of a file whose writing was cancelled before it began.
    """
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if not (isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == _LATE):
            before(found)

    def is_news(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, UNWRITTEN) and _OF_A_FILE in str(error))

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(is_news)
    warnings.filterwarnings("ignore", message=_CANCELLED, category=RuntimeWarning)


class Sealer:
    """Background completion of a save after its arrays have left the devices, on every process."""

    def __init__(
        self,
        folder: AnyPath,
        *,
        keep: int,
        keep_every: int | None,
        max_failures: int,
        barrier: Barrier,
        report: Callable[[str], None],
        may_write: Callable[[], None],
        before_seal: Callable[[], None],
    ) -> None:
        """Prepare the sealer; nothing is written yet.

        Args:
          folder: holds a folder for each step.
          keep: number of newest checkpoints to keep.
          keep_every: multiples of this are kept too.
          max_failures: number of consecutive failed saves that raise.
          barrier: among all processes, safe in any thread.
          report: called with a line about a failed save.
          may_write: raises if another attempt owns the folder; BucketError if unknown.
          before_seal: copies files that belong to a checkpoint to the run's folder;
            process 0 calls it in the thread.
        """
        filter_late_errors()
        self._folder, self._keep, self._keep_every = folder, keep, keep_every
        self.best: tuple[int, ...] = ()
        self._max_failures, self._all_come_to = max_failures, barrier
        self._report, self._may_write, self._before_seal = report, may_write, before_seal
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self._fenced: BaseException | None = None
        self._unsaved: CheckpointError | None = None  # the last save's failure, until it is raised
        self._failures = 0  # in a row
        self._save, self._barriers_passed = -1, 0

    def begin(self) -> None:
        """Prepare for the writer's next save: its barriers are distinct from those of the last
        one."""
        self._save, self._barriers_passed = next(_serial), 0

    def barrier_of_writer(self, *, key: str, timeout_ms: int) -> None:
        """Barrier for the writer; a failing process still passes it.

        Args:
          key: the writer's name of it; unused, because all processes pass them in one order.
          timeout_ms: how long to wait, in milliseconds.
        """
        del key
        self._barriers_passed += 1
        self._barrier(f"writer_{self._barriers_passed}", timeout_ms // 1000)

    def follow(self, step: int, written: Callable[[], None], leaves: dict[str, Leaf]) -> None:
        """Wait in a thread for the writer and then seals the step.

        Args:
          step: of the checkpoint.
          written: returns when this process's part is on disk, or raises.
          leaves: the manifest's entries of the arrays.
        """
        self._pending = step, self._thread.submit(self._finish, step, written, leaves)

    def settle(self) -> None:
        """Wait for the save in progress; a failed one is reported, its remains are removed.

        Raises:
          CheckpointError: there were too many failures.
        """
        if self._pending is None:
            return
        step, finished = self._pending
        error = finished.exception()
        self._pending = None
        sealed = self._is_sealed(step)
        if error is not None and (error is self._fenced or not _is_unwritten(error)):
            raise error
        if sealed:
            self._failures, self._unsaved = 0, None
        if error is None:
            return
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        detail = full_disk(error) or first_line
        if sealed:
            self._report(f"{self._folder}: an old checkpoint could not be deleted ({detail})")
            return
        missing_room = self._room()  # free space at the failure
        self._sweep()
        self._failures += 1
        self._unsaved = CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._folder} ({detail}); "
            f"{missing_room}"
        )
        self._unsaved.__cause__ = error
        if self._failures >= self._max_failures:
            self._raise_unsaved()
        self._report(
            f"{self._unsaved}; the run continues and saves again at the next interval, but stops "
            f"after {self._max_failures} failures in a row (this is number {self._failures})"
        )

    def wait(self) -> None:
        """Return when the last save is sealed.

        Raises:
          CheckpointError: it failed; raised once.
        """
        self.settle()
        self._raise_unsaved()

    def close(self) -> None:
        """End the thread, and remove late leftovers of a failed save's writer; call `wait`
        first."""
        self._thread.shutdown()
        if self._failures:
            self._sweep()

    def warn_of_little_space(self, last: int | None) -> None:
        """Warn if the disk has no room for another checkpoint like that of step `last`."""
        if last is None or jax.process_index() != 0 or isinstance(self._folder, BucketPath):
            return
        size = folder_size(self._folder / str(last))
        free = shutil.disk_usage(self._folder).free
        if free < 2 * size:
            self._report(
                f"{free:,} bytes are free in {self._folder}, less than twice the last "
                f"checkpoint's {size:,}: make space, or lower Checkpoint.keep, before a save fails"
            )

    # -- in the thread -------------------------------------------------------------------------

    def _finish(self, step: int, written: Callable[[], None], leaves: dict[str, Leaf]) -> None:
        """Agree among all processes on whether the step is complete.

        A process that cannot write its part still passes the writer's barriers, so that
        none waits long for it, and skips the next, so that nothing is sealed.
        """
        try:
            written()
        finally:
            while self._barriers_passed < _BARRIERS_OF_WRITER:
                self.barrier_of_writer(key="", timeout_ms=WRITE_SECONDS * 1000)
        self._barrier("written", _AGREE_SECONDS)
        try:
            if jax.process_index() == 0:
                self._seal(step, leaves)
        finally:
            self._barrier("sealed", WRITE_SECONDS)
        if not manifest.is_sealed(self._folder / str(step)):
            raise OSError("process 0 could not complete it")

    def _seal(self, step: int, leaves: dict[str, Leaf]) -> None:
        try:
            self._may_write()
        except BucketError:
            raise  # temporarily unavailable: a failed save, not another attempt's folder
        except BaseException as error:
            self._fenced = error
            raise
        self._before_seal()
        manifest.seal(self._folder / str(step), step, leaves)
        steps = sealed_steps(self._folder)
        for old in select_expired(
            steps, keep=self._keep, keep_every=self._keep_every, best=self.best
        ):
            delete(self._folder, old)

    def _barrier(self, name: str, seconds: int) -> None:
        self._all_come_to(key=f"jaxtrain_save_{self._save}_{name}", timeout_ms=seconds * 1000)

    # -- failures ------------------------------------------------------------------------------

    def _is_sealed(self, step: int) -> bool:
        """Whether a checkpoint is known to be there: no, while its bucket does not answer."""
        try:
            return manifest.is_sealed(self._folder / str(step))
        except BucketError:
            return False

    def _room(self) -> str:
        if isinstance(self._folder, BucketPath):
            return "those before it are whole"
        return room(self._folder)

    def _sweep(self) -> None:
        if jax.process_index() != 0:
            return
        try:
            sweep(self._folder)
        except OSError as error:
            self._report(f"{self._folder}: the remains of a save could not be removed ({error})")

    def _raise_unsaved(self) -> None:
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is not None:
            raise unsaved


def _is_unwritten(error: BaseException) -> bool:
    """Whether the disk or another process is to blame, so that the next save may succeed."""
    if isinstance(error, UserError):
        return False
    return type(error) is Exception or isinstance(error, unwritten())
