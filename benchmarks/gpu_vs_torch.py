"""Our train steps and kernels against PyTorch on one GPU, and close to what the GPU gives.

    python -m benchmarks.gpu_vs_torch [--rows gpt2_124m ...] [--minutes 8] [--tiny]

Every side of every row is a fresh process, one after the other, since two do not fit into a GPU's
memory; `--repeats` alternates them. PyTorch gets several settings (torch.compile, cuDNN's or flash
SDPA, autocast or cast parameters, fused AdamW), ours a few; all are shown and the best of each is
compared. Train steps start from the same weights, and the losses of ten steps are equal within the
tolerance of the compute dtype, or the row has no ratio. `--tiny` runs every row in tiny sizes on
any machine: a test of this code, not a measurement. Results go to a file of JSON lines.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.gpu_rows import CELLS, ROWS, TRAIN, Task

SIDES = ("jaxtrain", "torch")
# Losses of ten steps, relatively: rounding to 8 bits at another place of the same mathematics.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
# Numbers of single operations, of size 1, in bfloat16.
CELL_TOLERANCE = 5e-2
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemoryError")
# SDPA's words where the one way to attend that is left cannot do it.
NO_KERNEL = "No available kernel"
# What PyTorch is tried in, the likely best first.
PEERS = (
    "compile, cuDNN", "compile, flash", "compile, cuDNN, cast", "max-autotune, cuDNN, cast",
)  # fmt: skip
ALONE = ("eight_bits", "remat", "loader")


def one_side(task: Task, *, deadline: float) -> dict[str, Any]:
    """The result of a process of its own, or {"error": why there is none}."""
    left = deadline - time.monotonic()
    if left < 1:
        return {"error": "out of time"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = [sys.executable, "-m", "benchmarks.gpu_vs_torch", "--answer", str(answer)]
        words += ["--task", json.dumps(dataclasses.asdict(task))]
        try:
            done = subprocess.run(
                words, timeout=left, capture_output=True, text=True, cwd=side_by_side.ROOT,
                env={**os.environ, **environment(task)}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**_answered(answer), "error": "out of time"}
        found = _answered(answer)
    if done.returncode == 0:
        return found
    said = done.stdout + done.stderr
    error = why_it_failed(said, done.returncode)
    if error.startswith("ended"):
        sys.stderr.write(said)
    return {**found, "error": error}


def _answered(file: Path) -> dict[str, Any]:
    """What a side has written so far."""
    return json.loads(file.read_text()) if file.exists() else {}


def why_it_failed(said: str, status: int) -> str:
    """A side's end in a few words."""
    if any(words in said for words in OUT_OF_MEMORY):
        return "out of memory"
    if NO_KERNEL in said:
        return "no such kernel"
    last = said.strip().splitlines() or ["no words"]
    return f"ended with status {status}: {last[-1]}"


def environment(task: Task) -> dict[str, str]:
    """What a side's process is started with: nearly all memory, and a CPU where it is tiny."""
    if task.side == "torch":
        # Threads that wait for each other by spinning take the time of others on a shared CPU.
        return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_WAIT_POLICY": "PASSIVE"}
    return {"JAX_PLATFORMS": "cpu"} if task.tiny else {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}


def answer_task(task: Task, file: Path) -> None:
    """What a side's process does: it imports its own library alone, and writes what it has so far
    whenever there is more of it."""
    if task.side == "jaxtrain":
        from benchmarks import gpu_ours as side  # noqa: PLC0415
    else:
        from benchmarks import gpu_torch as side  # noqa: PLC0415
    for found in side.run(task):
        begun = file.with_suffix(".begun")
        begun.write_text(json.dumps(found))
        begun.replace(file)


# -- rows ------------------------------------------------------------------------------------------


def train_row(name: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Every setting of both sides; {"sides": {name: result}, "losses_apart": ..., "says": ...}."""
    row = TRAIN[name]
    compute = options.compute
    found: dict[str, Any] = {"says": row.says, "unit": row.unit, "anchor": row.anchor}
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.npz")
        first, *others = row.ours
        plan = [("jaxtrain", first), *(("torch", setting) for setting in options.peers)]
        plan += [("jaxtrain", s) for s in others if options.ours is None or s in options.ours]
        for _ in range(options.repeats):
            for side, setting in plan:
                task = Task(name, side, setting, options.tiny, compute, options.seconds, weights)
                result = one_side(task, deadline=deadline)
                merge(sides, f"{side} {setting}".strip(), result)
                if (side, setting) == ("jaxtrain", "") and "error" in result:
                    return {**found, "sides": sides}  # there are no weights to compare with
    count = row.narrow_losses if compute == "bfloat16" else None
    done = {side: result["losses"][:count] for side, result in sides.items() if "losses" in result}
    units = (row.made_tiny() if options.tiny else row).units
    for result in sides.values():
        if "seconds" in result:
            result["per_second"] = units / float(np.median(result["seconds"]))
    try:
        found["losses_apart"] = side_by_side.assert_equal_mathematics(done, TOLERANCE[compute])
    except SystemExit as error:
        found["error"] = str(error)
    return {**found, "sides": sides}


def merge(sides: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Adds a repeat: its seconds are more rounds."""
    if name in sides and "seconds" in sides[name] and "seconds" in result:
        result["seconds"] = sides[name]["seconds"] + result["seconds"]
    sides[name] = result


def cells_row(name: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Single operations: {"sides": {side: {"cells": [...]}}}."""
    sides: dict[str, Any] = {}
    asked = SIDES[:1] if name in ALONE else SIDES
    for number, side in enumerate(asked):
        task = Task(name, side, None, options.tiny, "bfloat16", options.seconds, "")
        # The time that is left is shared: a row that is cut short has something of both sides.
        now = time.monotonic()
        share = (deadline - now) / (len(asked) - number)
        sides[side] = one_side(task, deadline=now + share)
    found: dict[str, Any] = {"says": name, "sides": sides}
    wrong = disagreeing(sides)
    if wrong:
        found["error"] = "; ".join(wrong)
    return found


def disagreeing(sides: dict[str, Any]) -> list[str]:
    """The cells whose numbers differ from the first of their case."""
    first: dict[str, Any] = {}
    wrong = []
    for side, result in sides.items():
        for cell in result.get("cells", []):
            if not cell["check"]:
                continue
            expected = np.array(first.setdefault(cell["case"], cell["check"]))
            apart = np.abs(np.array(cell["check"]) - expected)
            if not (apart <= CELL_TOLERANCE * np.maximum(np.abs(expected), 1)).all():
                wrong.append(f"{cell['case']}: {side} {cell['setting']} is {apart.max():.1e} off")
    return wrong


# -- what is printed -------------------------------------------------------------------------------


def ratio(result: dict[str, Any]) -> float | None:
    """The best of PyTorch over the best of ours in time; above 1 ours is faster."""
    best: dict[str, float] = {}
    for name, side in result["sides"].items():
        if "seconds" in side:
            whose, took = name.split(" ")[0], float(np.median(side["seconds"]))
            best[whose] = min(best.get(whose, took), took)
    if "error" in result or len(best) < 2:
        return None
    return best["torch"] / best["jaxtrain"]


def train_table(results: Sequence[dict[str, Any]]) -> Table:
    """Train steps as they go into RESULTS.md."""
    out = Table("row", "side", "ms a step (p10-p90)", "a second", "MFU", "peak GiB", "first step s",
                "ratio", title="Train steps (ratio: best of torch / best of ours)")  # fmt: skip
    for result in results:
        says, overall = result["says"], ratio(result)
        for name, side in result["sides"].items():
            if "error" in side:
                out.add_row(says, name, side["error"])
                continue
            ms = side_by_side.spread([1e3 * x for x in side["seconds"]])
            peak, mfu = side["peak_bytes"], side.get("mfu")
            out.add_row(
                says,
                name,
                f"{ms['median']:.1f} ({ms['p10']:.1f}-{ms['p90']:.1f})",
                f"{side['per_second']:,.0f} {result['unit']}",
                f"{mfu:.1%}" if mfu is not None else "",
                f"{peak / 2**30:.1f}" if peak is not None else "",
                f"{side['first_step_seconds']:.1f}",
            )
        verdict = result.get("error") or result["anchor"]
        out.add_row(says, "", verdict, "", "", "", "", f"{overall:.2f}" if overall else "")
    return out


def cells_table(results: Sequence[dict[str, Any]]) -> Table:
    """Single operations, best of PyTorch over each of ours."""
    out = Table("row", "case", "side", "ms", "rate", "peak MiB", "ratio", title="Operations")
    for result in results:
        theirs: dict[str, float] = {}
        for cell in result["sides"].get("torch", {}).get("cells", []):
            if cell["seconds"]:
                took = float(np.median(cell["seconds"]))
                theirs[cell["case"]] = min(theirs.get(cell["case"], took), took)
        for side, answer in result["sides"].items():
            if "error" in answer:
                out.add_row(result["says"], "", side, answer["error"])
            for cell in answer.get("cells", []):
                name = f"{side} {cell['setting']}".strip()
                if cell["error"]:
                    out.add_row(result["says"], cell["case"], name, cell["error"])
                    continue
                took = float(np.median(cell["seconds"]))
                peer = theirs.get(cell["case"]) if side == "jaxtrain" else None
                out.add_row(
                    result["says"],
                    cell["case"],
                    name,
                    f"{1e3 * took:.3f}",
                    f"{cell['work'] / took:,.3g} {cell['unit']}" if cell["work"] else "",
                    f"{cell['bytes'] / 2**20:,.0f}" if cell["bytes"] is not None else "",
                    f"{peer / took:.2f}" if peer else "",
                )
        if "error" in result:
            out.add_row(result["says"], "", "NOT EQUAL", result["error"])
    return out


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """What makes the command fail: unequal mathematics and crashes; memory and time do not."""
    forgiven = ("out of memory", "out of time", "no such kernel")
    found = [f"{r['says']}: {r['error']}" for r in results if "error" in r]
    for result in results:
        for name, side in result["sides"].items():
            if side.get("error", "out of time") not in forgiven:
                found.append(f"{result['says']}, {name}: {side['error']}")
    return found


def main() -> int:
    """Reads the command line; the hidden options are for the processes of the sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--minutes", type=float, default=30.0, help="then all is stopped")
    parser.add_argument("--seconds", type=float, default=15.0, help="of timing a side")
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes of every side")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), help="settings of PyTorch")
    parser.add_argument(
        "--ours", nargs="*", help="settings of ours beside the first (default: all of a row)"
    )
    parser.add_argument("--compute", choices=TOLERANCE, default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="every row in tiny sizes on a CPU")
    parser.add_argument("--json", type=Path, default=Path("gpu_vs_torch.jsonl"))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        answer_task(Task(**json.loads(options.task)), options.answer)
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    written = side_by_side.circumstances(["jax", "jaxlib", "flax", "torch", "numpy"])
    results = []
    with options.json.open("w") as file:
        file.write(json.dumps(written) + "\n")
        for name in options.rows:
            run = train_row if name in TRAIN else cells_row
            results.append({"row": name, **run(name, options, deadline)})
            # After every row: a run that is stopped keeps what it has.
            file.write(json.dumps(results[-1]) + "\n")
            file.flush()
    console = Console(width=160)
    for names, table in ((TRAIN, train_table), (CELLS, cells_table)):
        own = [result for result in results if result["row"] in names]
        if own:
            console.print(table(own))
    console.print(written)
    if options.tiny:
        console.print("Tiny sizes: these figures say nothing about speed.")
    for words in failures(results):
        console.print(words, markup=False, style="bold")
    return 1 if failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
