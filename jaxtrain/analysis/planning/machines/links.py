"""Time of a collective on a machine's links: inside a slice or a host, and between them (DCN)."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.formulas import wire_bytes

# What several adapters of a host carry together: libraries send the parts of a ring or tree through
# all of them (NCCL; measured 200-340 GB/s over hosts of eight adapters, NVIDIA/nccl issue 1218).
# A permute has one peer, and one adapter.
_BY_ALL_ADAPTERS = ("all-reduce", "all-gather", "reduce-scatter")
# Every device has a part for each other.
_TO_ALL = ("all-to-all", "ragged-all-to-all")


def names_of(axis: str) -> list[str]:
    """The mesh axes of a collective's axis, which joins several by "+"."""
    return axis.removeprefix("part of ").split("+")


def seconds(
    kind: str,
    axis: str,
    payload: int,
    sizes: Mapping[str, int],
    target: Target,
    dcn: Mapping[str, int],
) -> tuple[float, float]:
    """Seconds of one collective inside slices or through hosts' links, and between slices.

    Args:
      kind: one of `collectives.KINDS`.
      axis: one mesh axis, or several joined by "+".
      payload: bytes that one device puts in.
      sizes: all mesh axes, outermost first.
      target: the machine.
      dcn: slices along an axis, as in `Mesh.dcn`.
    """
    names = names_of(axis)
    devices = math.prod(sizes[name] for name in names)
    if devices == 1:
        return 0.0, 0.0
    if target.chip.kind != "tpu":
        if kind in _TO_ALL:
            return _gpu_to_all(payload, names, devices, sizes, target), 0.0
        rate = gpu_bandwidth(kind, names, sizes, target)
        return wire_bytes(kind, payload, devices) / rate, 0.0
    slices = math.prod(dcn.get(name, 1) for name in names)
    torus = torus_bandwidth(names, sizes, target, dcn)
    if slices == 1 and kind in _TO_ALL:
        return payload * _torus_hops(names, sizes, target, devices) / torus, 0.0
    if slices == 1:
        return wire_bytes(kind, payload, devices) / torus, 0.0
    assert target.chip.dcn_bandwidth is not None, "a TPU has a network"
    # In two legs: inside the slices, and between them of the shard that each chip then holds.
    inner = devices // slices
    shard = payload if kind == "all-gather" else payload // inner
    inside = wire_bytes(kind, payload, inner) / torus if inner > 1 else 0.0
    return inside, wire_bytes(kind, shard, slices) / target.chip.dcn_bandwidth


def _gpu_to_all(
    payload: int, names: Collection[str], devices: int, sizes: Mapping[str, int], target: Target
) -> float:
    """Every GPU sends a part to each other: to those of its host over NVLink, and at the same time
    to those of other hosts through its own adapter."""
    chip = target.chip
    assert chip.link_bandwidth is not None, "a GPU has links"
    together = devices_inside(names, sizes, target.shape[-1])
    inside = payload * (together - 1) / devices / chip.link_bandwidth
    if devices == together:
        return inside
    assert chip.dcn_bandwidth is not None, "a GPU host has adapters"
    rate = min(chip.link_bandwidth, chip.dcn_bandwidth)
    return max(inside, payload * (devices - together) / devices / rate)


def _torus_hops(
    names: Collection[str], sizes: Mapping[str, int], target: Target, devices: int
) -> float:
    """Links that a byte of an all-to-all crosses on average: r / 4 round each ring of r chips, with
    both ways open (jax-ml.github.io/scaling-book/sharding, "AllToAll")."""
    found = directions(sizes, target)
    rings = max(1, round(sum(found.get(name, 0) for name in names)))
    return rings * devices ** (1 / rings) / 4


def torus_bandwidth(
    names: Collection[str], sizes: Mapping[str, int], target: Target, dcn: Mapping[str, int]
) -> float:
    """Bytes/s that a TPU chip sends along mesh axes inside its slice, both ways round each ring of
    the torus that they have (`directions`); an axis that lies between slices alone uses none."""
    chip = target.chip
    assert chip.link_bandwidth is not None, "a TPU has links"
    inside = {name: size // dcn.get(name, 1) for name, size in sizes.items()}
    found = directions(inside, target)
    return 2 * chip.link_bandwidth * min(sum(found.get(name, 0) for name in names), chip.links)


def directions(sizes: Mapping[str, int], target: Target) -> dict[str, float]:
    """The directions of a slice's torus that each mesh axis has; axes of one device have none.

    As `jax.experimental.mesh_utils` lays a mesh over a torus: the innermost axis chooses first, and
    takes the most whole directions whose sizes multiply to its own. Where none do, it takes those
    that divide it and shares one more evenly with the others that need a part of it. A chip's
    several devices are one direction more, which has no links.

    Args:
      sizes: all mesh axes inside the slice, outermost first.
      target: the slice.
    """
    rings_left = [(size, 1) for size in target.shape if size > 1]
    rings_left += [(target.chip.devices, 0)] if target.chip.devices > 1 else []
    needs = {name: size for name, size in reversed(list(sizes.items())) if size > 1}
    found = dict.fromkeys(needs, 0.0)

    def take(name: str, some: Sequence[tuple[int, int]]) -> None:
        for one in some:
            rings_left.remove(one)
            needs[name] //= one[0]
            found[name] += one[1]

    for name, size in needs.items():
        ways = (
            itertools.combinations(rings_left, count) for count in range(len(rings_left), 0, -1)
        )
        whole = (some for some in itertools.chain(*ways) if math.prod(d for d, _ in some) == size)
        take(name, next(whole, ()))
    for name in needs:
        for one in sorted(rings_left, reverse=True):
            if needs[name] % one[0] == 0:
                take(name, [one])
    parted = [name for name, size in needs.items() if size > 1]
    for name in parted:
        found[name] += sum(links for _, links in rings_left) / len(parted)
    return {name: count or 1 for name, count in found.items()}


def gpu_bandwidth(
    kind: str, names: Collection[str], sizes: Mapping[str, int], target: Target
) -> float:
    """Bytes/s that a GPU sends along mesh axes: its NVLinks inside a host; between hosts as many
    adapters as the axes have GPUs in a host, and never more than NVLink brings to them."""
    chip, per_host = target.chip, target.shape[-1]
    assert chip.link_bandwidth is not None, "a GPU has links"
    together = devices_inside(names, sizes, per_host)
    if math.prod(sizes[name] for name in names) <= together:
        return chip.link_bandwidth
    assert chip.dcn_bandwidth is not None, "a GPU host has adapters"
    adapters = together if kind in _BY_ALL_ADAPTERS else 1
    return min(chip.link_bandwidth, adapters * chip.dcn_bandwidth)


def devices_inside(names: Collection[str], sizes: Mapping[str, int], per_host: int) -> int:
    """Devices of a group along these axes that stand in one host, in the hosts' order."""
    stride, inside = 1, 1
    for name, size in reversed(list(sizes.items())):
        if name in names and stride < per_host:
            inside *= min(size, per_host // stride)
        stride *= size
    return inside
