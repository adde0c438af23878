"""Slurm jobs that are requeued: stops without progress, and the time limit next to the notice.

The notice is the signal that `sbatch --signal=TERM@180` sends ahead of the time limit. If the limit
is shorter than the notice, Slurm sends it as soon as the job starts, and a job that is requeued for
exit status 75 would be started and stopped indefinitely.
"""

import contextlib
import dataclasses
import datetime
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Self

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.files import write_atomically
from jaxtrain.run.attempts import records


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """The Slurm job that this process is a task of.

    Attributes:
      job: its id.
      task: the number of this task.
      start: when this launch of it started, in seconds since 1970; None: unknown.
      end: when its time limit ends, in seconds since 1970; None: unknown or unlimited.
    """

    job: str
    task: int = 0
    start: float | None = None
    end: float | None = None

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the job of an environment; None outside Slurm.

        Args:
          environment: SLURM_JOB_ID and SLURM_PROCID in it; SLURM_JOB_START_TIME and
            SLURM_JOB_END_TIME since Slurm 23.02.
        """
        job = environment.get("SLURM_JOB_ID")
        if not job:
            return None
        names = ("SLURM_PROCID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
        numbers = [environment.get(name, "") for name in names]
        task, start, end = (int(number) if number.isdecimal() else None for number in numbers)
        return cls(job, task or 0, start, end)

    def count_stop(self, workdir: AnyPath, step: int | None) -> int:
        """Record a stop by a signal, and return how many in a row came at this checkpoint.

        Each task counts its own in attempts/stops-TASK.json: all tasks have to reach the same
        conclusion, since srun returns the highest of their exit statuses, and a stop may come
        before there is an attempt.

        Args:
          workdir: the run's folder.
          step: the newest checkpoint; None: there is none.
        """
        file = workdir / records.ATTEMPTS_FOLDER / f"stops-{self.task}.json"
        known = records.read(file) or {}
        before = known.get("stops") if known.get("step") == step else None
        stops = 1 + (before if isinstance(before, int) else 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps({"step": step, "stops": stops}) + "\n").encode())
        return stops

    def describe_limit(
        self, seconds_ago: float, wall_clock: Callable[[], float] = time.time
    ) -> str | None:
        """Return a clause with time limit and notice; None if the limit is unknown.

        Args:
          seconds_ago: since the signal came.
          wall_clock: seconds since 1970, as Slurm's times are.
        """
        start, end = self.start, self.end
        if start is None or end is None:
            start, end = _ask_times(self.job)
        if start is None or end is None:
            return None
        stopped_at = wall_clock() - seconds_ago
        return (
            f"the time limit of Slurm job {self.job} is {end - start:.0f} s, and the signal to "
            f"save came {max(0, end - stopped_at):.0f} s ahead of its end, "
            f"{max(0, stopped_at - start):.0f} s after the job's start"
        )


def _ask_times(job: str) -> tuple[float | None, float | None]:
    """Return start and end of a job from `squeue`, in seconds since 1970; None if unknown."""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%S %e"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        start, end = (datetime.datetime.fromisoformat(word) for word in shown.stdout.split())
        return time.mktime(start.timetuple()), time.mktime(end.timetuple())
    return None, None
