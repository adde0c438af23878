"""Elastic layouts: mesh and accumulation of a run on fewer hosts, with the same global batch.

The axes inside a replica (pipe, expert, context, tensor) keep their sizes. `data` shrinks first; if
`fsdp` does not divide the remaining devices, it becomes the largest size that divides them and the
parameters. Microbatches are at most as large as on all hosts: `Train.accumulation` grows, and
zero-weight rows fill a batch that does not divide.

Run as a program, this module prints the layouts for a supervisor, which does not import JAX.
"""

import dataclasses
import json
import math
import os
import sys
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.devices import has_tpu_chips
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.training.layouts import abstract_layout, has_statistics, largest_fsdp, rows_held
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import Config, load_config

_INNER = ("pipe", "expert", "context", "tensor")  # axes that keep their sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLayout:
    """Layout of a run on some of its hosts.

    Attributes:
      hosts: the number of hosts.
      devices: their devices.
      changes: bindings that differ from the configuration's, without quotes: {"Mesh.data": 2}.
      rows: rows in a batch's arrays, with zero-weight rows.
      error: why the run cannot train on this many hosts; None if it can.
    """

    hosts: int
    devices: int
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 0
    error: str | None = None


def elastic_layouts(
    config: Config, least: int, most: int, *, devices: int | None = None, platform: str = "cpu"
) -> list[HostLayout]:
    """Return the layout of each number of hosts from `least` to `most`.

    Args:
      config: the configuration on `most` hosts.
      least: the smallest number of hosts.
      most: the largest number of hosts.
      devices: of `most` hosts; None: those that the mesh axes are written for.
      platform: 'cpu', 'gpu' or 'tpu', for the checks of a run.

    Raises:
      UserError: the configuration trains on one number of hosts alone, or the devices do not divide
        over the hosts.
    """
    devices = devices or _devices_of(config)
    if devices % most:
        raise UserError(
            f"--hosts {least}:{most}: the {devices} devices of the mesh do not divide over {most} "
            "hosts"
        )
    if reasons := list(_reasons_against(config, platform)):
        raise UserError("\n".join(f"--hosts {least}:{most}: {reason}" for reason in reasons))
    return [
        _layout_of(config, hosts, devices // most * hosts, devices, platform)
        for hosts in range(least, most + 1)
    ]


def _devices_of(config: Config) -> int:
    mesh = config.mesh
    if mesh.simulated_devices:
        return mesh.simulated_devices
    if mesh.free_axis is not None:
        raise UserError(
            f"--hosts: Mesh.{mesh.free_axis}=-1 takes the devices that there are; write its size "
            "on all hosts, from which the sizes on fewer hosts follow"
        )
    return math.prod(getattr(mesh, axis) for axis in (*_INNER, "data", "fsdp"))


def _reasons_against(config: Config, platform: str) -> list[str]:
    """Return why a configuration cannot change its number of hosts."""
    found = []
    if platform == "tpu":
        found.append("a TPU slice computes with all of its hosts or not at all")
    if config.mesh.dcn:
        found.append(f"Mesh.dcn={config.mesh.dcn} fixes the number of slices; leave it out")
    if config.exchange.method != "synchronous":
        found.append(
            f"Exchange.method={config.exchange.method!r} has a state per replica, so their number "
            "is part of the run; use Exchange.method='synchronous'"
        )
    return found


def _layout_of(
    config: Config, hosts: int, devices: int, all_devices: int, platform: str
) -> HostLayout:
    whole = config.mesh.sizes(all_devices)
    inner = math.prod(whole[axis] for axis in _INNER)
    written = " x ".join(f"Mesh.{axis}={whole[axis]}" for axis in _INNER if whole[axis] > 1)
    if devices % inner:
        has = f"{hosts} hosts have" if hosts > 1 else "1 host has"
        error = f"{has} {devices} devices, a number that {written} does not divide"
        return HostLayout(hosts=hosts, devices=devices, error=error)
    if devices == all_devices:
        changed, changes = config, dict[str, Any]()
    else:
        changed, changes = _shrink(config, whole, devices, all_devices, inner)
    try:
        check(changed, device_count=devices, platform=platform, reads_data=False)
        rows = rows_held(changed, abstract_layout(changed, devices))
    except UserError as error:
        return HostLayout(hosts=hosts, devices=devices, changes=changes, error=str(error))
    return HostLayout(hosts=hosts, devices=devices, changes=changes, rows=rows)


def _shrink(
    config: Config, whole: dict[str, int], devices: int, all_devices: int, inner: int
) -> tuple[Config, dict[str, Any]]:
    """Return the configuration on fewer devices, and its changed bindings."""
    replicas = devices // inner

    def mesh_of(fsdp: int) -> Mesh:
        sizes: dict[str, Any] = {**whole, "data": replicas // fsdp, "fsdp": fsdp}
        simulated = devices if config.mesh.simulated_devices else 0
        return dataclasses.replace(config.mesh, **sizes, simulated_devices=simulated)

    def shards(fsdp: int) -> int:
        if config.sharding.zero == 0:
            return fsdp
        return largest_fsdp(dataclasses.replace(config, mesh=mesh_of(fsdp)), devices)

    sizes = [one for one in range(1, whole["fsdp"] + 1) if replicas % one == 0]
    mesh = mesh_of(max(map(shards, sizes)))
    smaller = dataclasses.replace(config, mesh=mesh)
    train = config.train
    before = abstract_layout(config, all_devices).batch_devices()
    after = abstract_layout(smaller, devices).batch_devices()
    least = -(-train.accumulation * before // after)
    # Batch statistics are those of a microbatch: its size must not change.
    counts = range(least, 2 * least + 1)
    if has_statistics(train.model):
        counts = range(train.accumulation, train.accumulation + 1)
    parts = after * (config.pipeline.microbatches if mesh.pipe > 1 else 1)
    rows = train.global_batch_size
    count = min(counts, key=lambda one: (-rows % (parts * one), one))
    is_filled = train.fill_batch or bool(rows % (parts * count))
    train = dataclasses.replace(train, accumulation=count, fill_batch=is_filled)
    changes: dict[str, Any] = {
        "Mesh.data": mesh.data,
        "Mesh.fsdp": mesh.fsdp,
        "Train.accumulation": count,
        "Train.fill_batch": is_filled,
    }
    if mesh.simulated_devices:
        changes["Mesh.simulated_devices"] = devices
    return dataclasses.replace(smaller, train=train), changes


def main(text: str) -> int:
    """Print the layouts of a run as JSON; return the exit status, 2 after an error message.

    Args:
      text: a JSON object with config, bindings, allow_imports, least and most.
    """
    given = json.loads(text)
    try:
        config = load_config(
            given["config"], given["bindings"], allow_imports=given["allow_imports"]
        )
        is_cpu = config.mesh.simulated_devices or os.environ.get("JAX_PLATFORMS") == "cpu"
        platform = "cpu" if is_cpu else "tpu" if has_tpu_chips() else "gpu"
        found = elastic_layouts(config, given["least"], given["most"], platform=platform)
    except UserError as error:
        sys.stderr.write(f"jaxtrain: {error}\n")
        return 2
    sys.stdout.write(json.dumps([dataclasses.asdict(one) for one in found]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
