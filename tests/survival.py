"""Whole runs of several processes, struck by faults: how they are started and what they leave."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import Process, start_processes

TINY = """
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 16
Train.global_batch_size = 8
Train.log_every = 1
Train.eval_every = 4
Train.eval_batches = 3
Train.save_every = 2
GPT.vocab_size = 256
GPT.num_layers = 1
GPT.embed_dim = 16
GPT.num_heads = 2
GPT.context_length = 16
TextData.source = {text!r}
TextData.sequence_length = 16
Mesh.data = 2
Mesh.fsdp = 2
Precision.compute = 'float32'
Optimizer.learning_rate = 0.01
Timeouts.minimum_seconds = 8
"""
DEVICES = 4


class Runs:
    """Runs of one tiny configuration, whose programs are compiled once.

    Attributes:
      folder: holds a workdir for each run, by its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = folder / "text"
        text.mkdir()
        for number in range(20):
            (text / f"{number:02}.txt").write_text(f"document {number} " * 40)
        self.config = folder / "tiny.gin"
        self.config.write_text(TINY.format(text=str(text)))
        self._starts = 0

    @contextlib.contextmanager
    def start(
        self,
        name: str,
        *bindings: str,
        count: int = 2,
        faults: str = "",
        supervised: bool = False,
        limit_seconds: float = 240.0,
    ) -> Iterator[list[Process]]:
        """Starts the processes of a run in its workdir.

        Args:
          name: of the run; the same name goes on.
          bindings: over the configuration's.
          count: processes.
          faults: as in faulty.py, each once in this workdir.
          supervised: under `supervise`, one for each process.
          limit_seconds: after this long all are killed.
        """
        marks = self.folder / f"marks-{name}"
        marks.mkdir(exist_ok=True)
        words = ["train", str(self.config), "--workdir", str(self.folder / name)]
        words += ["--simulate-devices", str(DEVICES)]
        for binding in bindings:
            words += ["-b", binding]
        program = (
            "import os, sys, faulty\n"
            f"words = {words!r}\n"
            "if os.environ['COUNT'] != '1':\n"
            "    words += ['--coordinator', os.environ['COORDINATOR'], '--num-processes',\n"
            "              os.environ['COUNT'], '--process-id', os.environ['PROCESS']]\n"
            f"sys.exit(faulty.main(words, supervised={supervised}))\n"
        )
        variables = {
            "FAULTS": faults,
            "MARKS": str(marks),
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._starts += 1
        with start_processes(
            count,
            program,
            folder=self.folder / f"logs-{name}-{self._starts}",
            devices_per_process=DEVICES // count,
            environment=variables,
            limit_seconds=limit_seconds,
        ) as processes:
            yield processes


def train_to_the_end(runs: Runs, name: str, *bindings: str, **how) -> None:
    """Starts a run's processes and expects all to come to the end."""
    with runs.start(name, *bindings, **how) as processes:
        ends = [process.end() for process in processes]
        assert ends == [0] * len(ends), "\n".join(process.log()[-5000:] for process in processes)


def unharmed_run(runs: Runs, *bindings: str) -> tuple[Any, Any]:
    """The final state and metrics of a run on two processes that nothing happens to."""
    train_to_the_end(runs, "unharmed", *bindings)
    return state_of(runs.folder / "unharmed"), metrics_of(runs.folder / "unharmed")


def end_of(workdir: Path) -> dict:
    """exit.json."""
    return json.loads((workdir / "exit.json").read_text())


def state_of(workdir: Path) -> tuple[int, dict[str, int]]:
    """The newest checkpoint's step, and each of its arrays' fingerprints."""
    steps = [int(path.parent.name) for path in workdir.glob("checkpoints/*/manifest.json")]
    manifest = json.loads((workdir / f"checkpoints/{max(steps)}/manifest.json").read_text())
    leaves = manifest["manifest"]["leaves"]
    return max(steps), {name: leaf["fingerprint"] for name, leaf in leaves.items()}


def metrics_of(workdir: Path) -> dict[tuple[int, str], float]:
    """Losses and evaluations by step, each once; nothing that a clock decides."""
    kept = {}
    for text in (workdir / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name in ("loss", "eval_loss"):
            if name in line:
                assert (line["step"], name) not in kept, "a step stands twice"
                kept[line["step"], name] = line[name]
    return kept


def trainer_of(process: Process) -> int | None:
    """The process number of the training program under a supervisor; None between two."""
    children = Path(f"/proc/{process.handle.pid}/task/{process.handle.pid}/children")
    with contextlib.suppress(OSError):
        for pid in children.read_text().split():
            return int(pid)
    return None


def strike(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
