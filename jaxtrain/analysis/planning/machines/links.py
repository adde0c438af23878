"""Time of a collective over a machine's links: within a slice or host, and between them (DCN)."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.formulas import wire_bytes

# Collectives that use all adapters of a host: libraries send parts of a ring or tree through all of
# them (NCCL; measured 200-340 GB/s over hosts with eight adapters, NVIDIA/nccl issue 1218). A
# permute has one peer and uses one adapter.
_BY_ALL_ADAPTERS = ("all-reduce", "all-gather", "reduce-scatter")
# Every device sends a part to every other.
_TO_ALL = ("all-to-all", "ragged-all-to-all")


def names_of(axis: str) -> list[str]:
    """Return the mesh axes of a collective's axis, which may be several joined with "+"."""
    return axis.removeprefix("part of ").split("+")


def seconds(
    kind: str,
    axis: str,
    payload: int,
    sizes: Mapping[str, int],
    target: Target,
    dcn: Mapping[str, int],
) -> tuple[float, float]:
    """Return the seconds of a collective within slices or over hosts' links, and between slices.

    Args:
      kind: one of `collectives.KINDS`.
      axis: one mesh axis, or several joined with "+".
      payload: payload bytes of one device.
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
    # In two phases: within the slices, and between them for the resulting shard of each chip.
    inner = devices // slices
    shard = payload if kind == "all-gather" else payload // inner
    inside = wire_bytes(kind, payload, inner) / torus if inner > 1 else 0.0
    return inside, wire_bytes(kind, shard, slices) / target.chip.dcn_bandwidth


def _gpu_to_all(
    payload: int, names: Collection[str], devices: int, sizes: Mapping[str, int], target: Target
) -> float:
    """Return the seconds of an all-to-all on GPUs: over NVLink within a host, and concurrently
    through each GPU's own adapter to other hosts."""
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
    """Return the average links that a byte of an all-to-all crosses: r / 4 around each ring of r
    chips, with both directions used (jax-ml.github.io/scaling-book/sharding, "AllToAll")."""
    found = directions(sizes, target)
    rings = max(1, round(sum(found.get(name, 0) for name in names)))
    return rings * devices ** (1 / rings) / 4


def torus_bandwidth(
    names: Collection[str], sizes: Mapping[str, int], target: Target, dcn: Mapping[str, int]
) -> float:
    """Return the bytes/s that a TPU chip sends along mesh axes within its slice, in both directions
    of each ring of the torus that they use (`directions`); axes between slices use none."""
    chip = target.chip
    assert chip.link_bandwidth is not None, "a TPU has links"
    inside = {name: size // dcn.get(name, 1) for name, size in sizes.items()}
    found = directions(inside, target)
    return 2 * chip.link_bandwidth * min(sum(found.get(name, 0) for name in names), chip.links)


def directions(sizes: Mapping[str, int], target: Target) -> dict[str, float]:
    """Return the torus dimensions of a slice that each mesh axis uses; axes of size 1 use none.

    Like `jax.experimental.mesh_utils`, it assigns the innermost axis first, which takes the most
    whole dimensions whose sizes multiply to its own. If there are none, it takes those that divide
    it and splits one more evenly with the other axes that need a part of it. Several devices per
    chip count as one more dimension, without links.

    Args:
      sizes: all mesh axes within the slice, outermost first.
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
    """Return the bytes/s that a GPU sends along mesh axes: NVLink within a host; between hosts as
    many adapters as the axes have GPUs per host, limited by the bandwidth of NVLink to them."""
    chip, per_host = target.chip, target.shape[-1]
    assert chip.link_bandwidth is not None, "a GPU has links"
    together = devices_inside(names, sizes, per_host)
    if math.prod(sizes[name] for name in names) <= together:
        return chip.link_bandwidth
    assert chip.dcn_bandwidth is not None, "a GPU host has adapters"
    adapters = together if kind in _BY_ALL_ADAPTERS else 1
    return min(chip.link_bandwidth, adapters * chip.dcn_bandwidth)


def devices_inside(names: Collection[str], sizes: Mapping[str, int], per_host: int) -> int:
    """Return how many devices of a group along these axes share a host, in the hosts' order."""
    stride, inside = 1, 1
    for name, size in reversed(list(sizes.items())):
        if name in names and stride < per_host:
            inside *= min(size, per_host // stride)
        stride *= size
    return inside
