"""Start of an attempt from the command line: rendezvous, lock, watchdog."""

import contextlib
import hashlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxtrain.config.buckets import AnyPath, BucketPath, require
from jaxtrain.config.files import path_errors
from jaxtrain.parallel.devices import take_gpu_memory
from jaxtrain.run.attempts import FAILED, records
from jaxtrain.run.attempts.attempt import Attempt, Preempted
from jaxtrain.run.attempts.folder import RunFolder
from jaxtrain.run.attempts.goodput import Goodput, read_account
from jaxtrain.run.attempts.lock import RunLock, Superseded
from jaxtrain.run.attempts.signals import (
    SUPERVISOR_VARIABLE,
    attempt_to_supersede,
    maintenance_notices,
)
from jaxtrain.run.attempts.watchdog import Watchdog, dump_stacks, write_reason
from jaxtrain.run.checkpoint import sealing
from jaxtrain.run.cluster import detection
from jaxtrain.run.cluster.cluster import Cluster, ClusterError, Flags, Listeners, OneProcess, Peers
from jaxtrain.run.metrics.files import METRICS_FILE, POSITION_FILES
from jaxtrain.run.phases import Activity, Phases
from jaxtrain.training.settings import Config

# Imported in the functions: what a process that is alone, without a supervisor, does not need.
if TYPE_CHECKING:
    from jaxtrain.run.cluster.authentication import RunToken

SILENCE_SECONDS = 30.0  # after which a silent process is lost
TRACES_SECONDS = 60.0  # for stacks and reason to reach the run's folder, before a process exits
TOKEN_FILE = "token"  # in attempts/: fetched files of a run's folder are next to it
GOODPUT_FILE, GOODPUT_PICTURE = "goodput.json", "goodput.png"

Reporter = Callable[[str], None]


@contextlib.contextmanager
def begin(config: Config, workdir: AnyPath, flags: Flags, *, report: Reporter) -> Iterator[Attempt]:
    """Context of one attempt of training; leaving it records how it ended.

    It detects and joins the other processes, locks the run's folder, starts the watchdog, and turns
    signals, maintenance notices and the end of a supervisor into one request to stop. A process
    that stalls or is lost ends the attempt in all processes; their stacks and the reason are on
    disk.

    Args:
      config: the run's configuration.
      workdir: the run's folder.
      flags: the command line's cluster options.
      report: called with each line to print.

    Raises:
      UserError: the folder is in use, another program's, cannot be created or written, or is in a
        bucket without permission, or the processes disagree.
      BucketError: the bucket cannot be reached.
      ClusterError: a process is missing.
    """
    phases = Phases()
    take_gpu_memory(config.train.gpu_memory_fraction)
    if isinstance(workdir, BucketPath):
        require("--workdir", workdir)
    with _usable(workdir):
        is_new = not workdir.exists()
    with contextlib.ExitStack() as stack:
        with phases.phase("start"):
            cluster = detection.detect(os.environ, flags)
            lock = None
            if cluster.process_id == 0:
                with _usable(workdir):
                    sealing.reject_others(workdir)
                    lock = RunLock.acquire(
                        workdir,
                        report=report,
                        on_superseded=_leave_superseded,
                        supersedes=attempt_to_supersede(),
                    )
                stack.callback(_give_back, lock, is_new)
            token = None
            if cluster.num_processes > 1:
                from jaxtrain.run.cluster.authentication import RunToken

                token_file = workdir / records.ATTEMPTS_FOLDER / TOKEN_FILE
                token = RunToken(os.environ, token_file, report=report)
            number = 0 if lock is None else lock.attempt
            peers = _rendezvous(cluster, config, token, number, report)
            stack.callback(peers.close)
            lock = lock or RunLock.join(workdir, int(peers.welcome["attempt"]))
            own = (METRICS_FILE, GOODPUT_FILE, *POSITION_FILES) if peers.process_id == 0 else ()
            folder = RunFolder(workdir, pull=own, may_write=_fence(lock), report=report)
            stack.callback(folder.close)
        attempt = Attempt(
            peers,
            number=lock.attempt,
            phases=phases,
            goodput=_goodput(folder.local, phases) if peers.process_id == 0 else None,
            may_write=_fence(lock),
            folder=folder,
            token=None if token is None else token.find(),
        )
        end = _End(folder, lock, peers, attempt)
        try:
            listeners = Listeners(
                activity=end.activity, on_lost=end.report_lost, on_failed=end.report_failed
            )
            peers.listen(listeners)
            with phases.phase("start"):
                if cluster.num_processes == 1:
                    report(cluster.found)
                else:
                    from jaxtrain.run.cluster import distributed_init

                    distributed_init.start(
                        cluster,
                        peers,
                        simulated_devices=config.mesh.simulated_devices,
                        report=report,
                    )
            stack.enter_context(attempt.listening(end.report_interrupted))
            stack.enter_context(
                maintenance_notices(
                    attempt.request_stop, os.environ, on_google_cloud=cluster.kind == "TPU VM"
                )
            )
            if SUPERVISOR_VARIABLE in os.environ:
                from jaxtrain.run.attempts.supervise import report_to_supervisor

                report_to_supervisor(
                    lambda: attempt.request_stop("the end of its supervisor"),
                    lambda: phases.seconds.get("step", 0) > 0,
                )
            last_resort = end.folder / f"stacks-{lock.attempt}-{peers.process_id}.last.txt"
            stack.enter_context(
                Watchdog(phases, config.timeouts, end.report_stalled, last_resort=last_resort)
            )
            try:
                yield attempt
            except BaseException as error:
                if peers.num_processes == 1 or isinstance(error, Preempted):
                    end.orderly()
                raise
            end.orderly()
            peers.goodbye()
        except BaseException as error:
            cause = end.record(error)
            if cause is not None:
                raise ClusterError(cause) from error
            raise
        end.record(None)


def _usable(workdir: AnyPath) -> contextlib.AbstractContextManager[None]:
    return path_errors(f"--workdir {workdir}", needs="use a folder that can be made and written")


def _goodput(workdir: Path, phases: Phases) -> Goodput:
    file = workdir / GOODPUT_FILE
    return Goodput(read_account(file), phases, file=file)


def _rendezvous(
    cluster: Cluster, config: Config, token: "RunToken | None", attempt: int, report: Reporter
) -> Peers:
    if token is None:
        return OneProcess({"attempt": attempt})
    from jaxtrain.run.cluster.channel import rendezvous

    names = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    hello: dict[str, str | int] = {name: importlib.metadata.version(name) for name in names}
    hello["python"] = ".".join(map(str, sys.version_info[:3]))
    hello["configuration"] = hashlib.sha256(config.to_gin().encode()).hexdigest()[:16]
    return rendezvous(
        cluster,
        hello,
        token=token,
        report=report,
        welcome={"attempt": attempt},
        heartbeat_seconds=SILENCE_SECONDS / 10,
        silence_seconds=SILENCE_SECONDS,
    )


def _fence(lock: RunLock) -> Callable[[], None]:
    def may_write() -> None:
        try:
            lock.check()
        except Superseded as superseded:
            _leave_superseded(superseded)

    return may_write


def _leave_superseded(superseded: Superseded) -> NoReturn:
    """End this process without writing to the folder, which belongs to another attempt."""
    _leave(f"{superseded}: this process ends, nothing more is written")


def _leave(line: str) -> NoReturn:
    # Not an exception: other threads may wait indefinitely, and JAX's own shutdown waits for peers.
    with contextlib.suppress(OSError):  # a closed terminal
        # A progress bar hides the cursor, and redirects what is written past it.
        if sys.__stdout__ is not None:
            sys.__stdout__.write("\x1b[?25h\n" * sys.__stdout__.isatty())
            sys.__stdout__.flush()
        if sys.__stderr__ is not None:
            sys.__stderr__.write(f"jaxtrain: {line}\n")
            sys.__stderr__.flush()
    os._exit(FAILED)


def _give_back(lock: RunLock, is_new: bool) -> None:
    """Release the lock, and remove a folder that was created for it alone."""
    lock.release()
    with contextlib.suppress(OSError):  # a folder that is unavailable
        left = {path.name for path in lock.workdir.iterdir()}
        if is_new and left <= {records.ATTEMPTS_FOLDER, sealing.FOLDER}:
            with contextlib.suppress(FileNotFoundError):
                (lock.workdir / sealing.FOLDER).rmdir()  # no step was written: it is empty
            folder = lock.workdir / records.ATTEMPTS_FOLDER
            for file in list(folder.iterdir()):
                file.unlink()
            folder.rmdir()
            lock.workdir.rmdir()


class _End:
    """Records how an attempt ended, once, whichever thread of it finds out first."""

    def __init__(
        self, run_folder: RunFolder, lock: RunLock, peers: Peers, attempt: Attempt
    ) -> None:
        self._run_folder, self._lock = run_folder, lock
        self._peers, self._attempt = peers, attempt
        self._phases = attempt.phases
        self._once = threading.Lock()
        self.folder = run_folder.local / records.ATTEMPTS_FOLDER

    def activity(self) -> dict[str, Any]:
        phase, step, seconds, _ = self._phases.activity()
        return {"phase": phase, "step": step, "seconds": round(seconds, 3)}

    # -- failures detected by other threads ------------------------------------------------------

    def report_lost(
        self, process: int, host: str, why: str, table: dict[int, dict[str, Any]]
    ) -> None:
        """Report that another process is lost or silent."""
        doing = table.get(process, {})
        last = f"; it was last in {doing.get('phase')}, step {doing.get('step')}"
        self._abort(f"process {process} (host {host}) is lost: {why}{last if doing else ''}")

    def report_failed(self, process: int, host: str, reason: str) -> None:
        """Report that another process failed, with its reason."""
        self._abort(f"process {process} (host {host}) failed: {reason}")

    def report_stalled(self, activity: Activity, deadline: float) -> None:
        """Report that this process makes no progress."""
        message = (
            f"stalled in {activity.phase}, step {activity.step}: no progress for "
            f"{activity.seconds:.0f} s (its deadline is {deadline:.0f} s)"
        )
        with contextlib.suppress(OSError):
            if self._peers.process_id == 0 and self._lock.still_owned():
                self._attempt.goodput.record(self._attempt.step, stalled=activity)
        behind = self._behind()
        cause = self._peers.report_failure(f"{message}{behind}")
        mine = cause.process_id == self._peers.process_id
        self._abort(f"{message}{behind}" if mine else str(cause))

    def report_interrupted(self) -> None:
        """Report a second Ctrl-C: stop without saving."""
        step = self._attempt.step
        when = f"after step {step}" if step else "before the first step"
        message = f"stopped by a second Ctrl-C {when}, without saving"
        cause = self._peers.report_failure(message)
        mine = cause.process_id == self._peers.process_id
        self._abort(message if mine else str(cause), with_stacks=False)

    def _behind(self) -> str:
        """Name the processes that are behind the others."""
        rows = self._peers.table()
        steps = {process: row.get("step", 0) for process, row in rows.items()}
        least = min(steps.values(), default=0)
        late = [process for process, step in steps.items() if step == least]
        if len(rows) < 2 or len(late) == len(rows):
            return ""
        text = ", ".join(
            f"process {p} (host {rows[p].get('host')}) in {rows[p].get('phase')}" for p in late
        )
        return f"; behind the others, at step {least}: {text}"

    def _abort(self, reason: str, *, with_stacks: bool = True) -> None:
        """From another thread: write stacks and reason to disk, then end the process."""
        if not self._once.acquire(blocking=False):
            return  # the first caller ends the process, and may wait for this thread
        # With a timeout: the disk or bucket may be what hangs.
        traces = (reason, with_stacks)
        writer = threading.Thread(target=self._leave_traces, args=traces, daemon=True)
        writer.start()
        writer.join(TRACES_SECONDS)
        _leave(reason)

    def _leave_traces(self, reason: str, with_stacks: bool) -> None:
        number, process = self._lock.attempt, self._peers.process_id
        with contextlib.suppress(OSError):
            if self._lock.still_owned():
                if with_stacks:
                    dump_stacks(self.folder / f"stacks-{number}-{process}.txt")
                write_reason(self.folder, process, number, reason, self._phases.activity())
                self._write_exit("failed", reason)
                self._run_folder.push()

    # -- the end of the main thread ---------------------------------------------------------------

    def orderly(self) -> None:
        """Finish the work that waits for the other processes."""
        for finish in self._attempt.at_end:
            finish()

    def record(self, error: BaseException | None) -> str | None:
        """Write exit.json, and report a failure to the other processes.

        Returns:
          It reports the first cause in any process, if this one's error only follows from it.
        """
        if not self._once.acquire(blocking=False):
            threading.Event().wait()
        # First: a reader of exit.json may shut the machine down.
        self._run_folder.push_or_report()
        if isinstance(error, Preempted):
            self._peers.goodbye()
            self._write_exit("failed" if error.is_failure else "preempted", str(error))
        elif error is None:
            self._write_exit("done", f"trained to step {self._attempt.step}")
        else:
            reason = str(error) or type(error).__name__
            cause = self._peers.report_failure(reason)
            is_other = cause.process_id != self._peers.process_id
            # If the configuration was rejected, nothing was started, and nothing is written.
            if self._attempt.has_begun:
                # If the folder itself failed, the error says so.
                with contextlib.suppress(OSError):
                    self._write_exit("failed", str(cause) if is_other else reason)
            if is_other:
                return str(cause)
        return None

    def _write_exit(self, status: str, reason: str) -> None:
        """Written by process 0, or by the first of the others if that one is lost."""
        cause = self._peers.cause
        lost = cause.process_id if cause is not None and cause.what == "lost" else None
        writer = 1 if lost == 0 else 0
        if self._peers.process_id == writer:
            records.write_exit(
                self._run_folder.workdir,
                status=status,
                reason=reason,
                step=self._attempt.step,
                attempt=self._lock.attempt,
            )
