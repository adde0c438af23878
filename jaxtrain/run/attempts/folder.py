"""The run's folder as one process writes it: directly, or mirrored to a bucket.

Objects in a bucket cannot be appended to, and a request takes as long as a step may. So metrics,
event files, figures and stacks are written to a local folder, and changed files are
pushed: before a checkpoint is sealed, after evaluations and at the end. Records of ownership and
exits (`records`) and the checkpoints themselves go to the bucket
directly.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jaxtrain.config.buckets import AnyPath, BucketPath, in_threads, require, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import full_disk, remove_tree, sync

# In a run's folder: the published model's config.json, tokenizer etc., for its export.
CARRIED_FOLDER = "huggingface"
QUICKSTART = "gpt_quickstart"  # the config of `train` without a name


def run_folder(config: str | None, workdir: str | None) -> AnyPath:
    """Return the folder of a run: the given one, or runs/ and the name of the config or the
    quickstart.

    Raises:
      UserError: a name is empty, such as a shell's variable that is not set.
    """
    for named, value in (("--workdir", workdir), ("CONFIG", config)):
        if value == "":
            raise UserError(f"{named} is empty; give a name, or leave it out")
    return to_path(workdir or Path("runs") / Path(config or QUICKSTART).stem)


def nothing() -> None:
    """Allow all writes: the folder of a run without other attempts."""


class LostFolderError(RuntimeError):
    """A run's folder became unavailable: no permission any more, a dead disk."""


@contextlib.contextmanager
def explain_folder_errors(workdir: AnyPath) -> Iterator[None]:
    """Turn system errors in a run's folder into a message, within the context."""
    try:
        yield
    except OSError as error:
        file = error.filename
        if full_disk(error) or not isinstance(workdir, Path) or not isinstance(file, str):
            raise
        if not Path(file).absolute().is_relative_to(workdir.absolute()):
            raise
        raise LostFolderError(
            f"--workdir {workdir}: {error.strerror} ({file}); the run ends, since its folder can "
            "no longer be used: make it usable, then run the same command to resume"
        ) from error


class RunFolder:
    """A run's folder and the local path where its files are written.

    Attributes:
      workdir: the run's folder.
      local: where this process writes: the same, or for a bucket a separate folder, so that two
        processes of one machine never share one.
    """

    def __init__(
        self,
        workdir: AnyPath,
        *,
        pull: Iterable[str] = (),
        may_write: Callable[[], None] = nothing,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make the folder on this machine.

        Args:
          workdir: the run's folder.
          pull: names of files of earlier attempts that this one continues.
          may_write: raises or exits if the run's folder belongs to a later attempt by now.
          report: called with a line about files that could not be pushed.

        Raises:
          BucketError: a file cannot be pulled.
        """
        self.workdir = workdir
        self._own, self._may_write, self._report = tuple(pull), may_write, report
        self._pushed: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._pushing: Future[bool] | None = None
        if not isinstance(workdir, BucketPath):
            self.local = workdir
            return
        prefix = f"jaxtrain-{workdir.name[:40]}-"
        self.local = Path(tempfile.mkdtemp(prefix=prefix))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="push")
        for name in self._own:
            self._pull(workdir / name)

    def push(self) -> None:
        """Copy changed files to the bucket; return when they are there.

        Raises:
          BucketError: something could not be copied.
        """
        if not isinstance(self.workdir, BucketPath):
            return
        with self._lock:
            # Before the content is read: files written meanwhile are pushed again.
            now = _stamps(self.local)
            changed = [path for path, stamp in now.items() if self._pushed.get(path) != stamp]
            if not changed:
                return
            self._may_write()
            in_threads(self._copy, changed)
            self._pushed.update({path: now[path] for path in changed})

    def secure(self) -> None:
        """Before a checkpoint is sealed: copy the files that belong to it to the bucket, or
        flush them to disk, so that they survive the machine.

        Raises:
          OSError: the bucket or the disk rejects them.
        """
        self.push()
        if not isinstance(self.workdir, BucketPath):
            for name in self._own:
                with contextlib.suppress(FileNotFoundError):
                    sync(self.workdir / name)

    def push_soon(self) -> None:
        """Push in a thread; a failure is reported, and the next push tries again."""
        if self._thread is not None and (self._pushing is None or self._pushing.done()):
            self._pushing = self._thread.submit(self.push_or_report)

    def close(self) -> None:
        """Push the rest and remove the local folder; keep it if that fails."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.shutdown()
        if self.push_or_report():
            remove_tree(self.local)

    def push_or_report(self) -> bool:
        """Push; return False, with a report, if the bucket rejects it."""
        try:
            self.push()
        except OSError as error:
            self._report(
                f"{self.workdir}: its files are out of date ({error}); {self.local} is current"
            )
            return False
        return True

    def _pull(self, file: BucketPath) -> None:
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return
        path = self.local / file.name
        path.write_bytes(content)
        self._pushed.update(_stamps(path.parent))

    def _copy(self, path: Path) -> None:
        assert isinstance(self.workdir, BucketPath)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            content = path.read_bytes()
            (self.workdir / path.relative_to(self.local).as_posix()).write_bytes(content)


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return modification time and size of each file, except empty and partial ones."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if path.is_file() and stat.st_size and not path.name.startswith("."):
                found[path] = stat.st_mtime_ns, stat.st_size
    return found


def own_folder(workdir: AnyPath, report: Callable[[str], None]) -> RunFolder:
    """Return the folder of a run without a command-line attempt.

    Raises:
      UserError: another process is writing there, or the bucket cannot be reached.
    """
    # Imported here: the command line's attempt has the folder's lock already.
    from jaxtrain.run.attempts.lock import require_not_held
    from jaxtrain.run.metrics.files import METRICS_FILE, POSITION_FILES

    if isinstance(workdir, BucketPath):
        require("workdir", workdir)
    require_not_held(workdir, report)
    return RunFolder(workdir, pull=[METRICS_FILE, *POSITION_FILES], report=report)
