"""A real run on one GPU: trained with its loader, evaluations and checkpoints, killed, gone on.

    python -m benchmarks.gpu_run [--minutes 10] [--tiny]

`jaxtrain train gpt2_124m` on text of the installed Python, by bytes, for half of the time; then
SIGKILL, and the same command for the other half, ended by SIGTERM. What counts is read from the
run's folder: steps before and after, loss, tokens a second, and where the time went.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PREEMPTED = 75
_BINDINGS = (
    "SOURCE = 'embedded'", "TOKENIZER = 'byte'", "TextData.heldout_fraction = 0.05",
    "GPT.context_length = 1024", "TextData.sequence_length = 1024",
    "Train.global_batch_size = 64", "Train.accumulation = 1", "Train.steps = 1000000",
    "Train.log_every = 10", "Train.eval_every = 500", "Train.eval_batches = 4",
    "Train.save_every = 250", "Schedule.warmup_steps = 100", "Remat.policy = 'elementwise'",
    "Mesh.data = 1", "Loss.chunk_size = 256",
)  # fmt: skip
_TINY = (
    "GPT.num_layers = 1", "GPT.embed_dim = 32", "GPT.num_heads = 2", "GPT.vocab_size = 256",
    "GPT.context_length = 64", "TextData.sequence_length = 64", "Train.global_batch_size = 4",
    "Train.save_every = 5", "Train.eval_every = 10", "Train.log_every = 1", "Loss.chunk_size = 32",
    "Train.eval_batches = 1",
)  # fmt: skip


def measure(*, tiny: bool, seconds: float) -> dict[str, Any]:
    """What the run's folder says after both halves; {"error": ...} where a half failed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        # Killed before its first checkpoint, a run restarts: that would show nothing.
        killed, said = _start(
            run, tiny=tiny, seconds=seconds / 2, ends_with=signal.SIGKILL,
            far_enough=lambda: _saved(run) and _last_step(run) > 0,
        )  # fmt: skip
        if killed != -signal.SIGKILL:
            return {"error": f"the first half ended with status {killed}: {said}"}
        before, reached = _lines(run), _last_step(run)
        status, said = _start(
            run, tiny=tiny, seconds=seconds / 2, ends_with=signal.SIGTERM,
            far_enough=lambda: _last_step(run) > reached,
        )  # fmt: skip
        if status != PREEMPTED:
            return {"error": f"the second half ended with status {status}: {said}"}
        return summary(before, _lines(run))


def summary(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """Both halves by the lines of metrics.jsonl.

    Args:
      before: the lines when the run was killed.
      after: those at its end, the steps that were done again once.
    """
    train = [line for line in after if "loss" in line]
    evaluations = [line for line in after if "eval_loss" in line]
    accounts = [line for line in after if "goodput" in line]
    steps = [line["step"] for line in train]
    return {
        "steps_before_the_kill": max((line["step"] for line in before), default=0),
        "steps": steps[-1],
        "each_step_once": steps == sorted(set(steps)),
        "first_loss": train[0]["loss"],
        "last_loss": train[-1]["loss"],
        "eval_loss": evaluations[-1]["eval_loss"] if evaluations else None,
        "tokens_per_second": float(np.median([line["tokens_per_second"] for line in train])),
        "mfu": train[-1].get("mfu"),
        "goodput": accounts[-1]["goodput"] if accounts else None,
        "goodput_seconds": accounts[-1].get("goodput_seconds") if accounts else None,
    }


def _start(
    run: Path, *, tiny: bool, seconds: float, ends_with: int, far_enough: Callable[[], bool]
) -> tuple[int, str]:
    """Trains until the time is over and it is far enough, or five times the time is over, then
    sends a signal: status, and the last words."""
    words = [sys.executable, "-m", "jaxtrain", "train", "gpt2_124m", "--workdir", str(run)]
    for binding in (*_BINDINGS, *(_TINY if tiny else ())):
        words += ["-b", binding]
    environment = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if tiny else {})}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        began = time.monotonic()
        while process.poll() is None and time.monotonic() < began + 5 * seconds:
            time.sleep(0.2)
            if time.monotonic() > began + seconds and far_enough():
                break
        process.send_signal(ends_with)
        status = process.wait(timeout=120)
        said.seek(0)
        return status, said.read()[-500:]


def _saved(run: Path) -> bool:
    folder = run / "checkpoints"
    return folder.is_dir() and any(one.name.isdigit() for one in folder.iterdir())


def _lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; a kill may have cut the last one."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _last_step(run: Path) -> int:
    """Of the training lines; 0 without one."""
    return max((line["step"] for line in _lines(run) if "loss" in line), default=0)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    options = parser.parse_args()
    found = measure(tiny=options.tiny, seconds=60 * options.minutes)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
