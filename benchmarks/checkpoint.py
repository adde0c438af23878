"""Our sealed checkpoints against plain Orbax and torch.save: the same float32 state, GB/s.

    python -m benchmarks.checkpoint [--megabytes 512] [--rounds 3] [--folder DIR] [--json FILE]
    python -m benchmarks.checkpoint --parts [--rounds 3]

A save ends when everything is on the disk; "blocking" is how long the caller waits before the next
step may run. Ours also digests every file, fingerprints every array, brings both to the disk
(fsync) and seals them, which the peers do not. A restore of ours compares the digests and
fingerprints. Every restored state is compared with the saved one. All files are in the operating
system's cache when they are read. `--parts` says instead where the time of ours goes: when each
part begins and ends, of the median save and the median restore.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from jaxtrain.run.checkpoint import manifest, store
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

ARRAYS = 24


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came back."""
    begin = time.perf_counter()
    found = action()
    jax.block_until_ready(found)
    return time.perf_counter() - begin, found


def ours(folder: Path, state: dict[str, jax.Array], abstract: Any, mode: str) -> dict[str, float]:
    """One save and one restore by Checkpoints."""
    settings = Checkpoint(asynchronous=mode == "async")
    with contextlib.closing(Checkpoints(folder, settings)) as checkpoints:
        begin = time.perf_counter()
        blocking, _ = timed(lambda: checkpoints.save(1, state, {}))
        checkpoints.wait()
        save = time.perf_counter() - begin
    # Opened anew: what this process has written it need not compare again, a restart has to.
    with contextlib.closing(Checkpoints(folder, settings)) as checkpoints:
        restore, found = timed(lambda: checkpoints.restore(1, abstract))
    assert_equal(found, state)
    return {"blocking": blocking, "save": save, "restore": restore}


def orbax(folder: Path, state: dict[str, jax.Array], abstract: Any, mode: str) -> dict[str, float]:
    """The same by Orbax alone."""
    kind = ocp.AsyncCheckpointer if mode == "async" else ocp.Checkpointer
    with contextlib.closing(kind(ocp.PyTreeCheckpointHandler())) as checkpointer:
        begin = time.perf_counter()
        blocking, _ = timed(
            lambda: checkpointer.save(folder / "1", args=ocp.args.PyTreeSave(state))
        )
        if mode == "async":
            checkpointer.wait_until_finished()
        save = time.perf_counter() - begin
        arguments = jax.tree.map(
            lambda x: ocp.ArrayRestoreArgs(
                sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
            ),
            abstract,
        )
        restore, found = timed(
            lambda: checkpointer.restore(
                folder / "1", args=ocp.args.PyTreeRestore(abstract, restore_args=arguments)
            )
        )
    assert_equal(found, state)
    return {"blocking": blocking, "save": save, "restore": restore}


class Parts:
    """When the parts of a save or a restore begin and end: what they call, watched from outside."""

    WATCHED = (
        ("Orbax, until the caller may go on", ocp.AsyncCheckpointer, "save"),
        ("fingerprints, waited for", store, "numbers"),
        ("Orbax, writing", ocp.AsyncCheckpointer, "wait_until_finished"),
        ("digests", manifest, "digest"),
        ("fsync", manifest, "_sync"),
        ("Orbax, reading", ocp.Checkpointer, "restore"),
        ("fingerprints", store, "fingerprints"),
    )  # fmt: skip

    def __init__(self) -> None:
        self.began, self.found = 0.0, {}
        for label, owner, name in self.WATCHED:
            setattr(owner, name, self._watched(label, getattr(owner, name)))

    def of(self, action: Callable[[], Any]) -> dict[str, tuple[float, float]]:
        """Begin and end of every part that takes part, in seconds from the start."""
        self.found = {}
        self.began = time.perf_counter()
        jax.block_until_ready(action())
        return {**self.found, "all": (0.0, time.perf_counter() - self.began)}

    def _watched(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter() - self.began
            try:
                return function(*arguments, **named)
            finally:
                end = time.perf_counter() - self.began
                first, last = self.found.get(label, (begin, end))
                self.found[label] = min(first, begin), max(last, end)

        return run


def where_time_goes(state: dict[str, jax.Array], abstract: Any, rounds: int, folder: Any) -> Table:
    """The parts of the median of the rounds, after one that compiles."""
    parts, runs = Parts(), {"save": [], "restore": []}
    for _ in range(rounds + 1):
        root = Path(tempfile.mkdtemp(dir=folder))
        with contextlib.closing(Checkpoints(root, Checkpoint(asynchronous=False))) as checkpoints:
            runs["save"].append(parts.of(lambda c=checkpoints: c.save(1, state, {})))
        with contextlib.closing(Checkpoints(root, Checkpoint())) as checkpoints:
            runs["restore"].append(parts.of(lambda c=checkpoints: c.restore(1, abstract)))
        shutil.rmtree(root)
        os.sync()
    table = Table("", "part", "begins, s", "ends, s")
    for kind, found in runs.items():
        middle = sorted(found[1:], key=lambda one: one["all"][1])[rounds // 2]
        for label, (begin, end) in middle.items():
            table.add_row(kind, label, f"{begin:.2f}", f"{end:.2f}")
    return table


def torchs(folder: Path, state: dict[str, jax.Array], abstract: Any, mode: str) -> dict[str, float]:
    """The same by torch.save and torch.load."""
    del abstract, mode
    folder.mkdir(parents=True)
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in state.items()}
    save, _ = timed(lambda: torch.save(tensors, folder / "1.pt"))
    restore, found = timed(lambda: torch.load(folder / "1.pt"))
    assert all(torch.equal(found[name], x) for name, x in tensors.items()), "another state"
    return {"blocking": save, "save": save, "restore": restore}


def assert_equal(found: dict[str, jax.Array], state: dict[str, jax.Array]) -> None:
    """Bit for bit."""
    for name, x in state.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(x))


SIDES = {
    "jaxtrain, sync": (ours, "sync"),
    "jaxtrain, async": (ours, "async"),
    "Orbax, sync": (orbax, "sync"),
    "Orbax, async": (orbax, "async"),
    "torch": (torchs, "sync"),
}
PEERS = {"jaxtrain, sync": "Orbax, sync", "jaxtrain, async": "Orbax, async"}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    elements = arguments.megabytes * 250_000 // ARRAYS // 1024
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = {f"w{i:02}": jax.random.normal(key, (elements, 1024)) for i, key in enumerate(keys)}
    size = sum(x.nbytes for x in state.values())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    if arguments.parts:
        table = where_time_goes(state, abstract, arguments.rounds, arguments.folder)
        Console(width=120).print(f"{size / 1e9:.2f} GB in {ARRAYS} arrays", table)
        return
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    names = list(SIDES)
    for number in range(-1, arguments.rounds):  # the first round compiles, and is not counted
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            side, mode = SIDES[name]
            found = side(folder / "run", state, abstract, mode)
            shutil.rmtree(folder)
            os.sync()  # nobody waits for another's bytes
            if number >= 0:
                seconds[name].append(found)
    table = Table("", "save, GB/s", "blocking, s", "restore, GB/s", "save / Orbax's", "restore")
    rows: dict[str, Any] = {}
    for name, found in seconds.items():
        middle = {key: float(np.median([one[key] for one in found])) for key in found[0]}
        rows[name] = {
            "save_gb_per_second": size / middle["save"] / 1e9,
            "blocking_seconds": middle["blocking"],
            "restore_gb_per_second": size / middle["restore"] / 1e9,
        }
        cells = [f"{value:.2f}" for value in rows[name].values()]
        for key in ("save", "restore") if name in PEERS else ():
            peer = seconds[PEERS[name]]
            ratios = [a[key] / b[key] for a, b in zip(peer, found, strict=True)]
            rows[name][f"{key}_times_orbax"] = side_by_side.spread(ratios)
            cells.append(f"{np.median(ratios):.2f}x")
        table.add_row(name, *cells)
    Console(width=120).print(f"{size / 1e9:.2f} GB in {ARRAYS} arrays", table)
    about = side_by_side.circumstances(["jax", "orbax-checkpoint", "torch"])
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({**about, "bytes": size, "rows": rows}, indent=1)
        )
    Console(width=120).print_json(json.dumps(about))


if __name__ == "__main__":
    main()
