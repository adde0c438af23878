"""Comparison of both values of `Sharding.accumulate`: fsdp traffic and memory."""

import dataclasses
from typing import Literal, get_args

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.search.search import price
from jaxtrain.analysis.planning.search.variants import apply_changes, bindings_of
from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.analysis.planning.textbook.traffic import expect_traffic
from jaxtrain.parallel.sharding import Layout
from jaxtrain.run.show.report import human_bytes
from jaxtrain.training.settings import Config

_Name = Literal["shard", "local"]


@dataclasses.dataclass(frozen=True)
class Way:
    """Estimated costs of one value of `Sharding.accumulate`, in closed form.

    Attributes:
      name: the value of `Sharding.accumulate`.
      moved: payload bytes of one device per step in fsdp collectives of weights and gradients.
      memory: memory of one device in bytes.
      fits: whether it fits on the machine.
    """

    name: _Name
    moved: int
    memory: int
    fits: bool


def ways(config: Config, target: Target, layout: Layout) -> list[Way]:
    """Return the costs of both values, the configured one first; empty if there is no choice.

    Args:
      config: the configuration.
      target: the machine.
      layout: the configuration's layout.
    """
    facts = Facts(config, layout)
    if layout.zero < 2 or facts.size("fsdp") == 1 or facts.passes == 1 or facts.replicas_alone:
        return []
    if config.offload.gradients == "host":
        return []  # accumulated there, in shards only
    found = []
    for name in sorted(get_args(_Name), key=lambda name: name != layout.accumulate):
        other = apply_changes(config, {"Sharding.accumulate": name})
        moved = sum(
            one.total_bytes
            for one in expect_traffic(other, dataclasses.replace(layout, accumulate=name))
            if "fsdp" in one.axis.split("+")
            and one.cause.startswith(("parameters:", "gradients:", "update:"))
        )
        cost = price(other, target)
        found.append(Way(name, moved, cost.memory.total, cost.fits))
    return found


def sentence(config: Config, target: Target, layout: Layout) -> str | None:
    """Return a sentence that compares both values; None if there is no choice."""
    found = ways(config, target, layout)
    if not found:
        return None
    now, other = (
        f"{human_bytes(way.moved)} of weights and gradients cross fsdp a step and a device needs "
        f"about {human_bytes(way.memory)} ({'fits' if way.fits else 'does not fit'})"
        for way in found
    )
    (pasted,) = bindings_of({"Sharding.accumulate": found[1].name})
    return f'with Sharding.accumulate={found[0].name!r} {now}; with -b "{pasted}" {other}'
