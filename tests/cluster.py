"""Starts the processes of a run on this machine, waits for what they print, and leaves none."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 600.0
# As a launcher hands it on; without it the processes of a run take the one in its folder.
TOKEN = "token-of-the-tests-" + "5e" * 16


@dataclasses.dataclass
class Process:
    """One process of a run.

    Attributes:
      number: its id.
      handle: to send signals with: `process.handle.kill()`.
      log_file: what it printed, standard output and error together.
      coordinator: HOST:PORT that it was given.
      until: the monotonic time at which it is killed.
    """

    number: int
    handle: subprocess.Popen
    log_file: Path
    coordinator: str
    until: float

    def log(self) -> str:
        """What it has printed so far."""
        return self.log_file.read_text(errors="replace")

    def wait_for(self, marker: str, timeout: float | None = None) -> str:
        """Waits until the log has `marker`; returns the line that it stands in.

        Raises:
          AssertionError: the process ended without it, or the time is up; the log is quoted.
        """
        until = self.until if timeout is None else min(self.until, time.monotonic() + timeout)
        while True:
            ended = self.handle.poll() is not None
            log = self.log()
            for line in log.splitlines():
                if marker in line:
                    return line
            assert not ended, f"process {self.number} ended without {marker!r}:\n{log}"
            assert time.monotonic() < until, f"process {self.number}: no {marker!r} yet:\n{log}"
            # Another program's file cannot be waited for without looking; it is not the clock that
            # decides what comes out.
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.handle.send_signal(number)

    def end(self, timeout: float | None = None) -> int:
        """Waits until it has ended; its exit status, negative for a signal."""
        left = self.until - time.monotonic()
        try:
            return self.handle.wait(max(left if timeout is None else min(left, timeout), 0.1))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.number} goes on:\n{self.log()}") from None


@contextlib.contextmanager
def start_processes(
    count: int,
    program: str | Sequence[str],
    *,
    folder: Path,
    devices_per_process: int = 1,
    environment: Mapping[str, str] | None = None,
    per_process: Mapping[int, Mapping[str, str]] | None = None,
    only: Sequence[int] | None = None,
    coordinator: str | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Iterator[list[Process]]:
    """Starts `count` processes of one run; whatever happens, none of them outlives the block.

    Args:
      count: processes.
      program: a Python program's text, or the arguments of `python -m jaxtrain`. In each of them
        `{process}`, `{count}` and `{coordinator}` stand for the process's id, their number and a
        free address on loopback; a program's text reads PROCESS, COUNT and COORDINATOR from its
        environment instead.
      folder: where `log.PROCESS.txt` are written.
      devices_per_process: simulated devices, where the program does not say itself.
      environment: variables for all.
      per_process: variables for some, by id.
      only: start only these of the `count`.
      coordinator: HOST:PORT instead of a free one.
      limit_seconds: after this long all are killed, which no test can outlast.
    """
    folder.mkdir(parents=True, exist_ok=True)
    coordinator = coordinator or f"127.0.0.1:{free_ports()}"
    processes: list[Process] = []
    until = time.monotonic() + limit_seconds
    try:
        for number in range(count) if only is None else only:
            values = {"process": number, "count": count, "coordinator": coordinator}
            if isinstance(program, str):
                command = [sys.executable, "-c", program]
            else:
                arguments = [argument.format(**values) for argument in program]
                command = [sys.executable, "-m", "jaxtrain", *arguments]
            log_file = folder / f"log.{number}.txt"
            with log_file.open("w") as log:
                handle = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    # A group of its own: what it starts is killed with it.
                    start_new_session=True,
                    env=_environment(values, devices_per_process)
                    | dict(environment or {})
                    | dict((per_process or {}).get(number, {})),
                )
            processes.append(Process(number, handle, log_file, coordinator, until))
        guard = threading.Timer(limit_seconds, _kill, [processes])
        guard.daemon = True
        guard.start()
        try:
            yield processes
        finally:
            guard.cancel()
    finally:
        _kill(processes)


def _environment(values: Mapping[str, object], devices: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "PMI_", "JAX_", "JAXTRAIN_", "XLA_", "TPU_"))
    }
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return kept | {
        "PROCESS": str(values["process"]),
        "COUNT": str(values["count"]),
        "COORDINATOR": str(values["coordinator"]),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Two cores carry several processes: LLVM's optimizer would take most of their time.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }


def _kill(processes: list[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.handle.pid, signal.SIGKILL)
    for process in processes:
        process.handle.wait()


def free_ports(count: int = 1) -> int:
    """The first of `count` neighbouring ports that are free on loopback, with one more to spare.

    Drawn below the range that the system itself deals out, by this process's number, so that
    tests side by side do not take the same.
    """
    first = 20000 + os.getpid() * 37 % 10000
    for port in range(first, first + 2000, count + 1):
        if all(_is_free(port + offset) for offset in range(count + 1)):
            return port
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def slurm_job(count: int) -> dict[str, Any]:
    """`environment` and `per_process` of `start_processes` for the tasks of a Slurm job."""
    variables = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": str(count),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "JAX_COORDINATOR_PORT": str(free_ports()),
    }
    tasks = {number: {"SLURM_PROCID": str(number)} for number in range(count)}
    return {"environment": variables, "per_process": tasks}
