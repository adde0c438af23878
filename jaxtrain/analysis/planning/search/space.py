"""Search space of layouts: meshes, ZeRO stages, remat policies, schedules, microbatches."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.search.variants import apply_changes
from jaxtrain.data.batch import kind_of
from jaxtrain.nn.attention.kernels import KERNELS
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.training.kernel import resolve_config
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight.compatibility import check_compatibility
from jaxtrain.training.preflight.named import activation_names
from jaxtrain.training.preflight.run_context import RunContext
from jaxtrain.training.settings import Config

# What is tried of each axis: wider ones lose everywhere on today's chips, or need a model that has
# the heads and layers for it, in which case they are wider than a host's or torus's fast links.
MOST = {"pipe": 32, "context": 16, "tensor": 16, "expert": 64}
# Sequences below this are not split over context.
LONG = 4096
# Stages on a rank that published runs have; more send more for a bubble that is small already.
CHUNKS = tuple(range(2, 13))
# From the fastest step to the smallest.
POLICIES = ("none", "elementwise", "dots", "full")
# What 'full' may have besides, by name: attention's kernel is the most expensive to run again and
# gives little, queries, keys and values are what MaxText's recipes add.
KEPT = (("attention",), ("query", "key", "value", "attention"))
# On the host: as few bytes as there are for a layer, what those recipes send there, and everything
# whose products would run again.
ON_HOST = (
    ("residual",),
    ("residual", "query", "key", "value", "attention"),
    ("residual", "query", "key", "value", "attention", "mlp_gate", "mlp_up"),
)


def meshes_and_schedules(config: Config, target: Target, devices: int) -> Iterator[dict[str, Any]]:
    """Bindings of every mesh for these devices, and of the schedules of its pipeline."""
    whole = apply_changes(config, {"Attention.context_parallel": "ulysses"})
    in_ring = KERNELS[resolve_config(whole, target.chip.kind).attention.kernel].plain
    # A schedule that the configuration names is rejected where there are no stages.
    alone = {
        f"Pipeline.{name}": getattr(Pipeline(), name)
        for name in ("schedule", "virtual_stages", "backward", "microbatches")
        if getattr(config.pipeline, name) != getattr(Pipeline(), name)
    }
    for sizes in _meshes(config, devices):
        mesh: dict[str, Any] = {f"Mesh.{axis}": size for axis, size in sizes.items()}
        # Of layouts with microbatches 'local' is tried once they are priced (`accumulate_locally`).
        mesh["Sharding.accumulate"] = "shard"
        if (sizes["tensor"] > 1 and _in_sequence(config)) or config.sharding.sequence_parallel:
            mesh["Sharding.sequence_parallel"] = sizes["tensor"] > 1
        if sizes["context"] > 1 and not in_ring:
            mesh["Attention.context_parallel"] = "ulysses"
        # One way around a torus of more has half of the links that a gather has.
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
    """The layout, its products along `tensor` around rings (the same bytes, beside the products)
    where these are fast and go together with the rest."""
    setting = "Sharding.collective_matmul"
    rings, gathers = {**layout, setting: True}, {**layout, setting: False}
    if fast and _conflicts(config, rings, devices) <= _conflicts(config, gathers, devices):
        return rings
    return gathers if config.sharding.collective_matmul else layout


def _conflicts(config: Config, layout: Mapping[str, Any], devices: int) -> set[str]:
    return set(check_compatibility(RunContext(apply_changes(config, layout), devices)))


def _schedules(config: Config, ranks: int) -> Iterator[tuple[str, int]]:
    """Schedules and stages on a rank; stages of as many layers each, where there is a choice."""
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
    """Bindings of ZeRO stages and remat policies on a mesh, and of what its stages keep."""
    stages = (0,)
    if mesh["Mesh.fsdp"] > 1:
        # Beside replicas only stage 3 is worth a name of its own (HSDP).
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
    """Whether the stages of a pipeline can keep their residuals with this remat policy."""
    mesh = dict.fromkeys((f"Mesh.{axis}" for axis in MESH_AXES), 1)
    pipeline = {**mesh, "Mesh.pipe": 2, "Pipeline.backward": "recompute", **dict(remat)}
    residuals = {**pipeline, "Pipeline.backward": "residuals"}
    return _conflicts(config, residuals, 2) <= _conflicts(config, pipeline, 2)


def _masters(config: Config) -> str:
    """Of stage 1: whole weights in another dtype than the masters' replace these."""
    return "whole" if config.precision.compute == config.precision.params else "sharded"


def accumulate_locally(config: Config, layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """The layout with weights gathered and gradients reduced once per step; None where that is none
    of its own: stages 0 and 1 have whole gradients anyway, and stage 2 would be stage 1.

    Stage 3 is then stage 1 (`accumulate='local'` takes the step of sharded masters), which is tried
    by itself where nothing is replicated.
    """
    if layout["Sharding.zero"] < 3 or layout["Mesh.data"] == 1:
        return None
    return {**layout, "Sharding.zero": 1, "Sharding.masters": _masters(config)}


def _remats(config: Config, target: Target) -> Iterator[dict[str, Any]]:
    """Bindings of remat policies, and of activations that are kept by their names unless the
    configuration says which."""
    if config.train.model.layers is None:
        yield {"Remat.policy": config.remat.policy}
        return
    chosen = any(config.remat.named.values())
    for policy in POLICIES:
        if policy == "none" and chosen:
            # It keeps what they name.
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
    """Every way to give the devices to the axes that this model and data can use."""
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
    """Whether the model reads tokens one after the other."""
    return config.train.model.inputs in ("tokens", "pairs")


def counts(config: Config, layout: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Bindings of microbatches, the fewest first: in a pipeline its own, elsewhere accumulation.

    Where the batch does not divide over the devices, rows fill it, of each size of a microbatch
    with as few as there can be.
    """
    split = layout["Mesh.data"] * layout["Mesh.fsdp"] * layout["Mesh.expert"]
    rows, left = divmod(config.train.global_batch_size, split)
    ranks = layout["Mesh.pipe"]
    if rows == 0:
        # The check says why in its own words.
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
    # A bubble of at most a third, where there are rows enough for that; whole rounds if there are.
    long = [count for count in possible if count >= 2 * ranks]
    enough = [count for count in long if count % ranks == 0]
    if not enough and layout.get("Pipeline.schedule") != "interleaved":
        enough = long
    for count in enough or [min(possible, key=lambda count: abs(count - 2 * ranks))]:
        yield {"Train.accumulation": 1, "Pipeline.microbatches": count, **fills}


def _divisors(rows: int) -> set[int]:
    return {count for count in range(1, rows + 1) if rows % count == 0}
