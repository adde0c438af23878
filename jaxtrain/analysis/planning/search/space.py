"""Search space of layouts: meshes, ZeRO stages, remat policies, schedules, microbatches."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.search.variants import apply_changes
from jaxtrain.data.batch import kind_of
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.training.layouts import resolve_config
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight.compatibility import check_compatibility
from jaxtrain.training.preflight.preflight import activation_names
from jaxtrain.training.preflight.run_context import RunContext
from jaxtrain.training.settings import Config

# Largest size tried for each axis: wider ones lose everywhere on today's chips, or need a model
# with enough heads and layers, and are then wider than the fast links of a host or torus.
MOST = {"pipe": 32, "context": 16, "tensor": 16, "expert": 64}
# Shorter sequences are not sharded over context.
LONG = 4096
# Virtual stages per rank in published runs; more add traffic to reduce a bubble already small.
CHUNKS = tuple(range(2, 13))
# From the fastest step to the least memory.
POLICIES = ("none", "elementwise", "dots", "full")
# Activations that 'full' may save in addition, by name: attention is the most expensive kernel to
# recompute and its output is small; MaxText's recipes add queries, keys and values.
KEPT = (("attention",), ("query", "key", "value", "attention"))
# Activations offloaded to the host: the fewest bytes per layer, those of MaxText's recipes, and all
# whose matmuls would otherwise run again.
ON_HOST = (
    ("residual",),
    ("residual", "query", "key", "value", "attention"),
    ("residual", "query", "key", "value", "attention", "mlp_gate", "mlp_up"),
)


def meshes_and_schedules(config: Config, target: Target, devices: int) -> Iterator[dict[str, Any]]:
    """Yield the bindings of every mesh for these devices, and of its pipeline schedules."""
    whole = apply_changes(config, {"Attention.context_parallel": "ulysses"})
    in_ring = KERNELS[resolve_config(whole, target.chip.kind).attention.kernel].plain
    # A configured schedule is rejected if there are no stages.
    alone = {
        f"Pipeline.{name}": getattr(Pipeline(), name)
        for name in ("schedule", "virtual_stages", "backward", "microbatches")
        if getattr(config.pipeline, name) != getattr(Pipeline(), name)
    }
    for sizes in _meshes(config, devices):
        mesh: dict[str, Any] = {f"Mesh.{axis}": size for axis, size in sizes.items()}
        # With microbatches, 'local' is tried after pricing (`accumulate_locally`).
        mesh["Sharding.accumulate"] = "shard"
        if (sizes["tensor"] > 1 and _in_sequence(config)) or config.sharding.sequence_parallel:
            mesh["Sharding.sequence_parallel"] = sizes["tensor"] > 1
        if sizes["context"] > 1 and not in_ring:
            mesh["Attention.context_parallel"] = "ulysses"
        # On a larger torus, one direction of a ring has half of the links of a gather.
        fast_rings = sizes["tensor"] > 1 and (target.chip.kind != "tpu" or sizes["tensor"] == 2)
        if sizes["pipe"] == 1:
            yield _with_rings(config, {**mesh, **alone}, devices, fast=fast_rings)
            continue
        for name, chunks in _schedules(config, sizes["pipe"]):
            taken = {"Pipeline.schedule": name, "Pipeline.virtual_stages": chunks}
            yield _with_rings(config, {**mesh, **taken}, devices, fast=fast_rings)


def _with_rings(
    config: Config, layout: dict[str, Any], devices: int, *, fast: bool
) -> dict[str, Any]:
    """Return the layout with collective matmuls along `tensor` (the same bytes, overlapped with the
    matmuls), if rings are fast and supported with the other settings."""
    setting = "Sharding.collective_matmul"
    rings, gathers = {**layout, setting: True}, {**layout, setting: False}
    if fast and _conflicts(config, rings, devices) <= _conflicts(config, gathers, devices):
        return rings
    return gathers if config.sharding.collective_matmul else layout


def _conflicts(config: Config, layout: Mapping[str, Any], devices: int) -> set[str]:
    return set(check_compatibility(RunContext(apply_changes(config, layout), devices)))


def _schedules(config: Config, ranks: int) -> Iterator[tuple[str, int]]:
    """Yield schedules and stages per rank, with equal numbers of layers per stage if possible."""
    yield "1f1b", 1
    yield "zero_bubble", 1
    layers = config.train.model.layers or 0
    if layers >= 2 * ranks:
        yield "dualpipe_v", 2
    fitting = [chunks for chunks in CHUNKS if layers >= ranks * chunks]
    even = [chunks for chunks in fitting if layers % (ranks * chunks) == 0]
    for chunks in even or fitting[:1]:
        yield "interleaved", chunks


def stages_and_policies(
    config: Config, target: Target, mesh: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the bindings of ZeRO stages and remat policies on a mesh, and of pipeline backward."""
    stages = (0,)
    if mesh["Mesh.fsdp"] > 1:
        # With replicas, only stage 3 is tried (HSDP).
        stages = (3, 2, 1) if mesh["Mesh.data"] == 1 else (3,)
    for stage, remat in itertools.product(stages, _remats(config, target)):
        masters = _masters(config) if stage == 1 else "whole"
        chosen: dict[str, Any] = {"Sharding.zero": stage, "Sharding.masters": masters, **remat}
        if mesh["Mesh.pipe"] == 1:
            yield chosen
            continue
        yield {**chosen, "Pipeline.backward": "recompute"}
        if _goes_with_residuals(config, tuple(remat.items())):
            yield {**chosen, "Pipeline.backward": "residuals"}


@functools.lru_cache(maxsize=64)
def _goes_with_residuals(config: Config, remat: tuple[tuple[str, Any], ...]) -> bool:
    """Return whether the stages of a pipeline can keep their residuals with this remat policy."""
    mesh = dict.fromkeys((f"Mesh.{axis}" for axis in MESH_AXES), 1)
    pipeline = {**mesh, "Mesh.pipe": 2, "Pipeline.backward": "recompute", **dict(remat)}
    residuals = {**pipeline, "Pipeline.backward": "residuals"}
    return _conflicts(config, residuals, 2) <= _conflicts(config, pipeline, 2)


def _masters(config: Config) -> str:
    """Return the stage 1 masters: sharded if the compute dtype differs from the master dtype."""
    return "whole" if config.precision.compute == config.precision.params else "sharded"


def accumulate_locally(config: Config, layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the layout with weights gathered and gradients reduced once per step.

    None if it is not a layout of its own: stages 0 and 1 have whole gradients anyway, and stage 2
    would be stage 1. Stage 3 becomes stage 1 (`accumulate='local'` has the step of sharded
    masters), which is a candidate by itself if nothing is replicated.
    """
    if layout["Sharding.zero"] < 3 or layout["Mesh.data"] == 1:
        return None
    return {**layout, "Sharding.zero": 1, "Sharding.masters": _masters(config)}


def _remats(config: Config, target: Target) -> Iterator[dict[str, Any]]:
    """Yield the bindings of remat policies, and of activations saved by name unless the
    configuration names some."""
    if config.train.model.layers is None:
        yield {"Remat.policy": config.remat.policy}
        return
    chosen = any(config.remat.named.values())
    for policy in POLICIES:
        if policy == "none" and chosen:
            # 'none' keeps everything, including the named activations.
            yield {"Remat.policy": policy, "Remat.save": (), "Remat.offload": ()}
        else:
            yield {"Remat.policy": policy}
    if chosen:
        return
    given = activation_names(config)
    for names in KEPT:
        if given.issuperset(names):
            yield {"Remat.policy": "full", "Remat.save": names}
    if target.chip.host_bandwidth is None:
        return
    for names in ON_HOST:
        if given.issuperset(names):
            yield {"Remat.policy": "full", "Remat.offload": names}


def _meshes(config: Config, devices: int) -> Iterator[dict[str, int]]:
    """Yield every assignment of the devices to the axes that this model and data can use."""
    model = config.train.model
    batch = config.train.data.abstract_batch(1)
    length = batch.inputs.shape[1] if kind_of(batch) == "tokens" else 1
    most = dict.fromkeys(MESH_AXES, devices)
    most |= {axis: min(limit, devices) for axis, limit in MOST.items()}
    if model.layers is None:
        most["pipe"] = 1
    if model.attention is None or not _in_sequence(config):
        most["context"] = 1
        if model.layers is not None:
            most["tensor"] = 1
    if length < LONG:
        most["context"] = 1
    if model.experts is None:
        most["expert"] = 1

    def ways(axes: tuple[str, ...], remaining: int) -> Iterator[dict[str, int]]:
        axis, *rest = axes
        if not rest:
            if remaining <= most[axis]:
                yield {axis: remaining}
            return
        for size in range(1, min(remaining, most[axis]) + 1):
            if remaining % size == 0:
                for others in ways(tuple(rest), remaining // size):
                    yield {axis: size, **others}

    yield from ways(MESH_AXES, devices)


def _in_sequence(config: Config) -> bool:
    """Return whether the model's inputs are token sequences."""
    return config.train.model.inputs in ("tokens", "pairs")


def counts(config: Config, layout: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the bindings of microbatches, fewest first: pipeline microbatches or accumulation.

    If the batch does not divide over the devices, padding rows fill it, for each size of a
    microbatch with the fewest microbatches.
    """
    split = layout["Mesh.data"] * layout["Mesh.fsdp"] * layout["Mesh.expert"]
    rows, left = divmod(config.train.global_batch_size, split)
    ranks = layout["Mesh.pipe"]
    if rows == 0:
        # The check reports the reason.
        yield {"Train.accumulation": 1}
        return
    fills: dict[str, Any] = {"Train.fill_batch": True} if left else {}
    rows += bool(left)
    sizes = range(1, rows + 1)
    possible = sorted({-(-rows // size) for size in sizes} if left else _divisors(rows))
    if ranks == 1:
        for count in possible:
            yield {"Train.accumulation": count, **fills}
        return
    # A bubble of at most a third, if there are enough rows; multiples of the ranks if possible.
    long = [count for count in possible if count >= 2 * ranks]
    enough = [count for count in long if count % ranks == 0]
    if not enough and layout.get("Pipeline.schedule") != "interleaved":
        enough = long
    for count in enough or [min(possible, key=lambda count: abs(count - 2 * ranks))]:
        yield {"Train.accumulation": 1, "Pipeline.microbatches": count, **fills}


def _divisors(rows: int) -> set[int]:
    return {count for count in range(1, rows + 1) if rows % count == 0}
