"""Variants of a configuration: one or two bindings changed, each validated as a run would be."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.config.errors import UserError
from jaxtrain.models.model import reads_tokens
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.remat import POLICIES
from jaxtrain.training.layouts import resolve_kernel
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config

# gin's section -> the field of Config.
_SECTIONS = {
    "Train": "train", "Mesh": "mesh", "Sharding": "sharding", "Pipeline": "pipeline",
    "Precision": "precision", "Remat": "remat", "Attention": "attention", "Loss": "loss",
    "Optimizer": "optimizer", "Offload": "offload",
}  # fmt: skip

Changes = Mapping[str, Any]


def apply_changes(config: Config, changes: Changes) -> Config:
    """Return the configuration with some bindings set: {"Mesh.tensor": 2}."""
    sections: dict[str, dict[str, Any]] = {}
    for binding, value in changes.items():
        section, field = binding.split(".")
        sections.setdefault(_SECTIONS[section], {})[field] = value
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(getattr(config, name), **fields)
            for name, fields in sections.items()
        },
    )


def pipeline_of(config: Config, changes: Changes) -> Pipeline:
    """Return the pipeline's settings with some bindings set."""
    own = {name.split(".")[1]: value for name, value in changes.items() if name[:9] == "Pipeline."}
    return dataclasses.replace(config.pipeline, **own)


def bindings_of(changes: Changes) -> list[str]:
    """Return the arguments to paste after -b, one for each change."""
    return [f"{name}={value!r}" for name, value in changes.items()]


def essential(config: Config, changes: Changes) -> dict[str, Any]:
    """Return the changes that differ from the configuration."""
    found = {}
    for binding, value in changes.items():
        section, field = binding.split(".")
        if getattr(getattr(config, _SECTIONS[section]), field) != value:
            found[binding] = value
    return found


def rejection_reason(config: Config, target: Target) -> str | None:
    """Return why `jaxtrain train` would reject a configuration on a target, or on as many of them
    as Mesh.dcn joins; None if it is valid."""
    try:
        preflight.check(
            config,
            device_count=target.devices * slices_of(config, target),
            platform=target.chip.kind,
            kind=target.chip.device_kinds[0],
            reads_data=False,
        )
    except UserError as error:
        return str(error)
    return None


def lighter_kernel(config: Config, target: Target) -> str | None:
    """Return a kernel that does not keep scores, if the configured one does; else None."""
    named = KERNELS.get(config.attention.kernel)
    if named is None or not named.plain:
        return None
    best = resolve_kernel(apply_changes(config, {"Attention.kernel": "auto"}), target.chip.kind)
    return None if best is None or KERNELS[best.kernel].plain else best.kernel


def fixes(config: Config, target: Target, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield changes that reduce the memory of a device, before they are validated.

    Args:
      config: the configuration.
      target: the machine.
      sizes: its mesh axes, -1 resolved.
    """
    policy, train, loss = config.remat.policy, config.train, config.loss
    kernel = lighter_kernel(config, target)
    if kernel is not None:
        yield {"Attention.kernel": kernel}
    if train.model.layers is not None:
        policies = list(POLICIES)
        for heavier in policies[policies.index(policy) + 1 :]:
            yield {"Remat.policy": heavier}
    if reads_tokens(train.model):
        length = train.data.abstract_batch(1).inputs.shape[1]
        for parts in (4, 8, 16, 32):
            chunk = length // parts
            if chunk >= 128 and (loss.chunk_size is None or chunk < loss.chunk_size):
                yield {"Loss.chunk_size": chunk}
    if sizes["pipe"] == 1:
        for times in (2, 4, 8, 16):
            yield {"Train.accumulation": train.accumulation * times}
    else:
        for times in (2, 4):
            yield {"Pipeline.microbatches": config.pipeline.microbatches * times}
    yield from _meshes(config, sizes)
    if config.optimizer.moments == "float32" and config.optimizer.rule.dtype is None:
        yield {"Optimizer.moments": "bfloat16"}
    if config.precision.params == "float32":
        yield {"Precision.params": "bfloat16"}


def _meshes(config: Config, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    if config.sharding.accumulate == "local":
        yield {"Sharding.accumulate": "shard"}
    sharding, dtypes = config.sharding, config.precision
    whole = {"Sharding.masters": "whole"} if sharding.masters == "sharded" else {}
    if sizes["fsdp"] > 1:
        if sharding.zero < 2 and not whole and dtypes.compute != dtypes.params:
            yield {"Sharding.zero": 1, "Sharding.masters": "sharded"}
        for stage in range(sharding.zero + 1, 4):
            yield {"Sharding.zero": stage, **whole}
    if sizes["data"] > 1:
        all_of_it = {"Mesh.data": 1, "Mesh.fsdp": sizes["fsdp"] * sizes["data"]}
        yield {**all_of_it, "Sharding.zero": 3, **whole}
    if sizes["tensor"] > 1 and not config.sharding.sequence_parallel:
        yield {"Sharding.sequence_parallel": True}
    for axis in ("tensor", "context"):
        for times in (2, 4, 8):
            for giver in ("data", "fsdp"):
                if sizes[giver] % times == 0:
                    change: dict[str, Any] = {f"Mesh.{axis}": sizes[axis] * times}
                    change[f"Mesh.{giver}"] = sizes[giver] // times
                    if axis == "context":
                        # Ring attention requires kernels that compute block by block.
                        change["Attention.context_parallel"] = "ulysses"
                    yield change
                    break


def slices_of(config: Config, target: Target) -> int:
    """Return the number of slices over DCN; GPU targets already include all hosts."""
    if target.chip.kind != "tpu":
        return 1
    product = 1
    for count in config.mesh.dcn.values():
        product *= count
    return product
