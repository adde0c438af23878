"""Roofline bounds of an operation: arithmetic, memory bandwidth, or links of a collective."""

import math

from jaxtrain.analysis.planning.textbook.formulas import wire_bytes

# -- arithmetic against memory (Williams et al. 2009, doi 10.1145/1498765.1498785) -----------------


def arithmetic_intensity(flops: float, moved_bytes: float) -> float:
    """Return FLOPs per byte of memory traffic."""
    return flops / moved_bytes


def ridge_point(peak_flops: float, bandwidth: float) -> float:
    """Return the FLOPs per byte above which an operation is compute-bound; below, memory-bound.

    Args:
      peak_flops: FLOP/s.
      bandwidth: memory bandwidth in bytes/s.
    """
    return peak_flops / bandwidth


def attainable_flops(intensity: float, *, peak_flops: float, bandwidth: float) -> float:
    """Return the roofline: the FLOP/s that a device can reach at this intensity."""
    return min(peak_flops, intensity * bandwidth)


def matmul_intensity(m: int, k: int, n: int, *, element_bytes: float) -> float:
    """Return the intensity of [m, k] x [k, n], every element read or written once:
    2 m k n / (e (m k + k n + m n)).

    With m far below k and n that is 2 m / e: with few tokens per device, reading the weights
    dominates.
    """
    moved = element_bytes * (m * k + k * n + m * n)
    return arithmetic_intensity(2 * m * k * n, moved)


# -- collectives: latency alpha a message, bandwidth beta ------------------------------------------


def ring_seconds(
    kind: str, payload: int, devices: int, *, latency: float, bandwidth: float
) -> float:
    """Return the seconds of a ring collective, with all neighbors sending concurrently.

    k - 1 messages one after the other, for an all-reduce 2 (k - 1): a reduce-scatter and an
    all-gather (arXiv 1810.11112, section 2; Thakur et al. 2005, "Optimization of Collective
    Communication Operations in MPICH", doi 10.1177/1094342005051521). An all-to-all sends a part
    to each of the others in turn.

    Args:
      kind: XLA's name: 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all',
        'collective-permute'.
      payload: payload bytes of one device, as in `formulas.wire_bytes`: for an all-gather its
        shard.
      devices: k.
      latency: seconds before the first byte of a message arrives.
      bandwidth: bytes/s that one device sends.
    """
    if devices == 1:
        return 0.0
    messages = {"all-reduce": 2 * (devices - 1), "collective-permute": 1}.get(kind, devices - 1)
    return messages * latency + wire_bytes(kind, payload, devices) / bandwidth


def doubling_seconds(
    kind: str, payload: int, devices: int, *, latency: float, bandwidth: float
) -> float:
    """Return the seconds of a collective by recursive doubling and halving, with fewer messages.

    The number of devices is a power of two. log2 k messages, for an all-reduce 2 log2 k
    (Rabenseifner's), and no more bytes than the ring; an all-to-all (Bruck's) sends half of its
    payload in each (Thakur et al. 2005). Arguments as in `ring_seconds`; distances between the
    devices are ignored.
    """
    rounds = _rounds(devices)
    assert devices == 2**rounds, "halves are paired"
    if kind == "all-to-all":
        return rounds * (latency + payload / 2 / bandwidth)
    messages = {"all-reduce": 2 * rounds, "all-gather": rounds, "reduce-scatter": rounds}[kind]
    return messages * latency + wire_bytes(kind, payload, devices) / bandwidth


def tree_all_reduce_seconds(
    payload: int, devices: int, *, latency: float, bandwidth: float
) -> float:
    """Return the seconds of a binomial tree: reduce to its root and broadcast, 2 ceil(log2 k)
    messages of the whole payload.

    It is the algorithm for small payloads, which are latency-bound (Thakur et al. 2005).
    """
    return 2 * _rounds(devices) * (latency + payload / bandwidth)


def _rounds(devices: int) -> int:
    return math.ceil(math.log2(devices))
