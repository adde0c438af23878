"""Silent data corruption: compare replicas, and repeat steps.

A device that silently computes wrong values leaves two traces. Devices with the same shard
of an array no longer have the same bits, because every one of them updates its own copy; and the
same step repeated from the same state has another result. Large runs have observed both (Llama 3,
arXiv 2407.21783, section 3.3.4, counts 6 of 419 interruptions; Gemini, arXiv 2312.11805, section 4,
replays steps to find such devices). The first costs one pass over the state, the second a step and
a copy of the state; neither changes the program of an ordinary step.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import Layout, name_of
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import TrainState

_MAX_NAMED = 8


class CorruptionError(RuntimeError):
    """Silent data corruption: a device computed, stored or sent wrong values without an error."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Corruption:
    """Checks of the devices for silent data corruption; periods in optimizer steps, 0 is never.

    Attributes:
      replay_every: steps between two steps that are repeated and compared: costs the time of a
        step, and a second copy of the state in device memory.
      compare_replicas_every: steps between two comparisons of devices that hold the same part of
        the state: costs reading the state once. Does not cover what only one device holds.
    """

    replay_every: int = 0
    compare_replicas_every: int = 0

    def __post_init__(self) -> None:
        for name in ("replay_every", "compare_replicas_every"):
            if getattr(self, name) < 0:
                raise UserError(f"Corruption.{name}={getattr(self, name)}; use 0 or more")


def validate(settings: Corruption, layout: Layout) -> Iterator[str]:
    """Yield an error message if replicas are to be compared but no array has two copies."""
    every = settings.compare_replicas_every
    if every and layout.mesh.size == 1:
        yield (
            f"Corruption.compare_replicas_every={every} on one device: nothing is held twice; "
            "use 0, or Corruption.replay_every"
        )


def first_comparison(settings: Corruption) -> str | None:
    """Return the first setting that enables a comparison, such as `Corruption.replay_every=100`."""
    on = [f"Corruption.{name}={every}" for name, every in vars(settings).items() if every]
    return on[0] if on else None


@dataclasses.dataclass(frozen=True)
class Difference:
    """Array whose copies differ between devices.

    Attributes:
      leaf: its name in the state.
      devices: ids of the devices that differ from the majority; without a majority, of all
        devices with a copy.
      majority: whether there is a majority.
    """

    leaf: str
    devices: tuple[int, ...]
    majority: bool

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.devices))
        which = "alone against the majority" if self.majority else "one of them or more"
        return f"{self.leaf} on device{'s' * (len(self.devices) > 1)} {ids} ({which})"


def replicated_fraction(state: Any) -> float:
    """Return the fraction of a state's bytes with copies on several devices, which can be compared.

    Args:
      state: a tree of arrays, or of shapes with shardings.
    """
    sizes = [
        (_copies(x) > 1, math.prod(x.shape) * x.dtype.itemsize) for x in jax.tree.leaves(state)
    ]
    total = sum(size for _, size in sizes)
    return sum(size for more, size in sizes if more) / total if total else 0.0


def compare_replicas(state: Any, step: int) -> None:
    """Compare the bits of all devices that hold the same part of a state.

    Every process has to call it at the same step, and gets the same result.

    Args:
      state: a tree of arrays on one mesh.
      step: for the message.

    Raises:
      CorruptionError: names the arrays and the devices.
    """
    found = differing_replicas(state)
    if found:
        raise CorruptionError(
            f"step {step}: replicas that should be identical differ: "
            f"{_some([str(one) for one in found])}; resume from a checkpoint of an earlier step "
            "without these devices"
        )


def differing_replicas(state: Any) -> list[Difference]:
    """Return the differences that `compare_replicas` names, or an empty list."""
    named = [(name, x) for name, x in _name_arrays(state) if _copies(x) > 1]
    if not named:
        return []
    digests_KL = np.asarray(jax.device_get(replica_digests([x for _, x in named])))
    mesh = named[0][1].sharding.mesh
    row = {device: number for number, device in enumerate(mesh.devices.flat)}
    found = []
    for column, (name, x) in enumerate(named):
        holders = collections.defaultdict(list)
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            holders[str(index)].append(device)
        for devices in holders.values():
            of = {device.id: int(digests_KL[row[device], column]) for device in devices}
            (common, count), *others = collections.Counter(of.values()).most_common()
            if others:
                majority = 2 * count > len(devices)
                odd = sorted(id_ for id_, digest in of.items() if digest != common or not majority)
                found.append(Difference(name, tuple(odd), majority))
    return found


def replica_digests(state: Any) -> jax.Array:
    """Return a digest of each device's own shard of each array, never of another device's copy.

    One change of any single element changes the number (see `_digest`).

    Args:
      state: a tree of arrays on one mesh.

    Returns:
      uint32 [devices, leaves], on every device: devices in the mesh's order, leaves in the tree's.
    """
    leaves = jax.tree.leaves(state)
    mesh = leaves[0].sharding.mesh
    return _digests(leaves, mesh, tuple(x.sharding.spec for x in leaves))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _digests(leaves: list[jax.Array], mesh: jax.sharding.Mesh, specs: tuple[P, ...]) -> jax.Array:
    def of_one(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_digest(x) for x in shards])[None]

    # Manual over all axes: the compiler must not substitute one copy for another.
    of_all = jax.shard_map(
        of_one, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=False
    )
    return jax.sharding.reshard(of_all(*leaves), NamedSharding(mesh, P()))


def _digest(x: jax.Array) -> jax.Array:
    """Return the sum, modulo 2**32, of the elements' bits times an odd number derived from each
    position.

    An odd factor has an inverse modulo 2**32: any change of a single element is detected.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(-1)
    # 2654435769 = 2**32 / golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
    factors = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435769) | jnp.uint32(1)
    return jnp.sum(bits * factors, dtype=jnp.uint32)


def replay_step(
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Sums]],
    state: TrainState,
    batch: Batch,
    step: int,
) -> tuple[TrainState, Sums]:
    """Run a step twice, from the state and from a copy of it, and compare all bits.

    The copy and the first result are in device memory together: twice the state. Both times the
    run's own compiled step is called: nothing else is compiled, and both states are donated.
    The step has to be a function of its arguments: on GPUs some operations add in any order, and
    results differ without an error, unless XLA_FLAGS has --xla_gpu_deterministic_ops.

    Args:
      train_step: the compiled step, which donates the state.
      state: the state before the step.
      batch: the step's batch.
      step: for the message: the step taken.

    Returns:
      What `train_step(state, batch)` returns.

    Raises:
      CorruptionError: the results differ; names the arrays and the devices.
    """
    copy = jax.device_put(state, jax.tree.map(lambda x: x.sharding, state), may_alias=False)
    after, metrics = train_step(state, batch)
    # In sequence: two steps in flight would need the memory of both.
    first_KL = np.asarray(jax.device_get(replica_digests(after)))
    again, _ = train_step(copy, batch)
    second_KL = np.asarray(jax.device_get(replica_digests(again)))
    if (first_KL != second_KL).any():
        devices = list(jax.tree.leaves(after)[0].sharding.mesh.devices.flat)
        raise CorruptionError(
            f"step {step} run twice from the same state and batch gave two results: "
            f"{_some(_unequal(_name_arrays(after), devices, first_KL != second_KL))}; a device "
            "computes incorrectly at times: resume from the last checkpoint on other devices"
        )
    return after, metrics


def _unequal(named: list[tuple[str, Any]], devices: list[Any], differs_KL: np.ndarray) -> list[str]:
    found = []
    for column, (name, _) in enumerate(named):
        ids = sorted(devices[row].id for row in np.flatnonzero(differs_KL[:, column]))
        if ids:
            found.append(f"{name} on device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}")
    return found


def _some(clauses: list[str]) -> str:
    rest = len(clauses) - _MAX_NAMED
    return "; ".join(clauses[:_MAX_NAMED]) + (f"; and {rest} more arrays" if rest > 0 else "")


def _copies(x: Any) -> int:
    """Return the number of devices that hold a copy of each element."""
    shards = math.prod(x.shape) / max(math.prod(x.sharding.shard_shape(x.shape)), 1)
    return round(x.sharding.num_devices / max(shards, 1))


def _name_arrays(state: Any) -> list[tuple[str, Any]]:
    """Return each array of the state with its name, as checkpoints name them."""
    return [(name_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
