"""Seconds until the first step is done against depth: scanned, unrolled, and with programs kept.

    python -m benchmarks.compile [--rounds 3] [--layers 12 24 48] [--ways scanned] [--json FILE]

Every figure is a process of its own, from its start to the end of its first step, on one device. A
round measures every depth once each way, so that a ratio within a round compares neighbours in
time. "off" keeps no programs; "first" starts with an empty folder of them; "again" starts a second
time with what "first" left there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side

WIDTH, LENGTH, ROWS = 128, 128, 4
WAYS = {"scanned": 1, "unrolled": 0}  # Scan.layers_per_iteration
MODES = ("off", "first", "again")
COMPILED = "/jax/core/compile/backend_compile_duration"


def measure(layers: int, block: int, started: float) -> dict[str, Any]:
    """One start, in this process.

    Args:
      layers: depth of the model.
      block: `Scan.layers_per_iteration`: 1 scans, 0 unrolls.
      started: when the process was asked for, on the monotonic clock.
    """
    import jax  # noqa: PLC0415 - loading it is a part of what is measured

    from jaxtrain.data.loader import batches  # noqa: PLC0415
    from jaxtrain.parallel.compilation import keep_compiled_programs  # noqa: PLC0415
    from jaxtrain.run.trainer import Trainer  # noqa: PLC0415
    from jaxtrain.training.settings import load_config  # noqa: PLC0415

    compiling, counts = [0.0], {"cache_hits": 0, "cache_misses": 0}

    def add(name: str, seconds: float, **_: Any) -> None:
        compiling[0] += seconds if name == COMPILED else 0.0

    def count(name: str, **_: Any) -> None:
        short = name.split("/")[-1]
        if short in counts:
            counts[short] += 1

    jax.monitoring.register_event_duration_secs_listener(add)
    jax.monitoring.register_event_listener(count)
    keep_compiled_programs()
    bindings = [
        "Mesh.fsdp = 1", "Mesh.tensor = 1", "Precision.compute = 'float32'", "Train.steps = 10",
        "Schedule.warmup_steps = 0",
        f"GPT.num_layers = {layers}", f"GPT.embed_dim = {WIDTH}", "GPT.num_heads = 4",
        f"GPT.context_length = {LENGTH}", f"TextData.sequence_length = {LENGTH}",
        "TextData.source = 'synthetic'", f"Train.global_batch_size = {ROWS}",
        f"Scan.layers_per_iteration = {block}",
    ]  # fmt: skip
    trainer = Trainer(load_config("gpt_quickstart", bindings))
    ready = time.perf_counter()
    batch = next(batches(trainer.dataset.train, global_batch_size=ROWS, seed=0, threads=0))
    loss = float(trainer.step(batch)["loss"])
    now = time.perf_counter()
    return {
        "start_seconds": time.monotonic() - started,
        "first_step_seconds": now - ready,
        "compile_seconds": compiling[0],
        "loss": loss,
        **counts,
    }


def start(layers: int, block: int, cache: str | None) -> dict[str, Any]:
    """One start in a process of its own."""
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if cache is None:
        variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    else:
        variables["JAXTRAIN_CACHE"] = cache
    words = ["--measure", str(layers), str(block), str(time.monotonic())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile", *words],
        cwd=side_by_side.ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def one_round(depths: list[int], ways: list[str]) -> dict[str, dict[str, Any]]:
    """Every depth, scanned and unrolled, in every mode; equal losses within a depth are asserted.

    Raises:
      SystemExit: keeping the programs changed a loss, or the second start compiled something.
    """
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        for layers in depths:
            block = WAYS[way]
            with tempfile.TemporaryDirectory() as cache:
                for mode in MODES:
                    name = f"{way} {layers} {mode}"
                    found[name] = start(layers, block, None if mode == "off" else cache)
            three = [found[f"{way} {layers} {mode}"] for mode in MODES]
            if len({one["loss"] for one in three}) != 1 or three[2]["cache_misses"]:
                raise SystemExit(f"the kept programs of {way} {layers} are not the same: {three}")
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    console = Console(width=120)
    if arguments.measure:
        layers, block, started = arguments.measure
        print(json.dumps(measure(int(layers), int(block), float(started))))  # noqa: T201
        return
    rounds = [one_round(arguments.layers, arguments.ways) for _ in range(arguments.rounds)]
    table = Table("start", "to first step, s", "first step, s", "compiling, s", "against off")
    rows, least, most = {}, arguments.layers[0], arguments.layers[-1]
    for name in rounds[0]:
        keys = ("start_seconds", "first_step_seconds", "compile_seconds")
        values = {key: float(np.median([one[name][key] for one in rounds])) for key in keys}
        plain = name.rsplit(" ", 1)[0] + " off"
        values["against_off"] = ratio(rounds, name, plain, "start_seconds")
        rows[name] = values
        table.add_row(name, *(f"{value:.2f}" for value in values.values()))
    console.print(table)
    depth = {}
    for way in arguments.ways:
        deep, shallow = f"{way} {most} off", f"{way} {least} off"
        depth[way] = {
            key: ratio(rounds, deep, shallow, key) for key in ("start_seconds", "compile_seconds")
        }
        console.print(
            f"{most} layers against {least}, {way}: {depth[way]['start_seconds']:.2f}x until the "
            f"first step is done, {depth[way]['compile_seconds']:.2f}x compiling"
        )
    about = side_by_side.circumstances(["jax", "jaxlib", "flax"])
    found = {**about, "rounds": len(rounds), "rows": rows, "deep_against_shallow": depth}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    console.print_json(json.dumps(about))


def ratio(rounds: list[dict[str, Any]], name: str, other: str, key: str) -> float:
    """The median over the rounds of one start's figure over another's in the same round."""
    return float(np.median([one[name][key] / one[other][key] for one in rounds]))


if __name__ == "__main__":
    main()
