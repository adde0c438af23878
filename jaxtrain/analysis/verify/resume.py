"""Verification of resume, and of gradient exchanges that start like the synchronous one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxtrain.analysis.verify.measures import EQUAL, Finding, bits, relative, same_bits
from jaxtrain.analysis.verify.runs import Bench, MeshRun
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import batches
from jaxtrain.run.checkpoint import metadata, saved
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.state import TrainState

STEPS_BEFORE, STEPS_AFTER = 2, 2


def check_resume(bench: Bench) -> Finding:
    """Compare a run that is saved, restored and resumed with an uninterrupted one."""
    mesh = bench.meshes[0]
    config = mesh.config
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), config.checkpoint)
        state, _ = _run(bench, mesh, mesh.fresh(), 0, STEPS_BEFORE)
        extra = metadata.describe(config, mesh.training, bench.data.digest, STEPS_BEFORE)
        checkpoints.save(STEPS_BEFORE, state, extra)
        checkpoints.wait()
        straight, expected = _run(bench, mesh, state, STEPS_BEFORE, STEPS_AFTER)
        straight = mesh.name_arrays(straight)
        position = checkpoints.extra(STEPS_BEFORE)["data"]["next_batch"]
        state = saved.restore(checkpoints, STEPS_BEFORE, mesh.training)
        state, found = _run(bench, mesh, state, position, STEPS_AFTER)
        checkpoints.close()
    state = mesh.name_arrays(state)
    different = [name for name in straight if not same_bits(state[name], straight[name])]
    for number, (one, other) in enumerate(zip(found, expected, strict=True), STEPS_BEFORE + 1):
        different += [
            f"{name} of step {number}" for name in other if not same_bits(one[name], other[name])
        ]
    return bits(different, len(straight) + sum(map(len, expected)), "arrays and metrics")


def check_exchange(bench: Bench) -> Finding:
    """Compare the mean first loss of the replicas, weighted by targets, with the full batch."""
    mesh = bench.meshes[0]
    found = jax.block_until_ready(mesh.train_step(mesh.fresh(), mesh.shard_batch(bench.batch)))
    metrics = {name: np.asarray(value) for name, value in found[1].items()}
    weights = metrics.get("weight", np.ones(()))
    loss = float((metrics["loss"] * weights).sum() / weights.sum())
    error = relative(loss, bench.one_device_step.loss)
    return Finding(error, EQUAL, f"loss {error:.1e}; the update differs, as the method intends")


def _run(
    bench: Bench, mesh: MeshRun, state: TrainState, first: int, count: int
) -> tuple[TrainState, list[dict[str, np.ndarray]]]:
    """Run `count` steps on the batches from index `first`; return the state and the metrics."""
    train, metrics = mesh.config.train, []
    stream: Iterator[Batch] = batches(
        bench.data.train,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        start=first,
        threads=0,
    )
    for _ in range(count):
        state, found = jax.block_until_ready(mesh.train_step(state, mesh.shard_batch(next(stream))))
        metrics.append({name: np.asarray(value) for name, value in found.items()})
    return state, metrics
