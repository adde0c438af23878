"""Rooflines by hand, and collectives against algorithms that really pass messages."""

import math

import numpy as np
import pytest

from jaxtrain.analysis.planning.textbook import rooflines

ALPHA, BETA = 3e-6, 50e9


def test_a_roofline_bends_at_the_ridge():
    """H200: 989e12 FLOP/s of bfloat16 over 4.8e12 bytes/s (NVIDIA's data sheet)."""
    ridge = rooflines.ridge_point(989e12, 4.8e12)
    assert ridge == pytest.approx(206.04, abs=0.01)
    reach = {
        scale: rooflines.attainable_flops(scale * ridge, peak_flops=989e12, bandwidth=4.8e12)
        for scale in (0.5, 1, 2)
    }
    assert reach[0.5] == pytest.approx(989e12 / 2)
    assert reach[1] == pytest.approx(reach[2]) == pytest.approx(989e12)


def test_the_intensity_of_a_product():
    # 2 n^3 FLOPs over three matrices of 2 n^2 bytes.
    assert rooflines.matmul_intensity(96, 96, 96, element_bytes=2) == 96 / 3
    assert rooflines.arithmetic_intensity(10, 4) == 2.5
    # One token reads every weight for one multiply-add.
    one = rooflines.matmul_intensity(1, 8192, 8192, element_bytes=2)
    assert one == pytest.approx(1, rel=1e-3)


# -- collectives: devices as rows, messages counted as they are sent -------------------------------


class Links:
    """Counts the rounds, and the bytes that the busiest device sends in each."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def round(self, sent_bytes: list[int]) -> None:
        self.seconds += ALPHA + max(sent_bytes) / BETA


def ring_reduce_scatter(values, links):
    """[k, k, n] parts of each device; device i ends with the sum of part (i + 1) mod k."""
    k = len(values)
    for step in range(k - 1):
        moving = [values[i, (i - step) % k].copy() for i in range(k)]
        for i in range(k):
            values[(i + 1) % k, (i - step) % k] += moving[i]
        links.round([part.nbytes for part in moving])


def ring_all_gather(values, links):
    """Device i begins with part (i + 1) mod k; every device ends with all."""
    k = len(values)
    for step in range(k - 1):
        moving = [values[i, (i + 1 - step) % k].copy() for i in range(k)]
        for i in range(k):
            values[(i + 1) % k, (i + 1 - step) % k] = moving[i]
        links.round([part.nbytes for part in moving])


def halving_reduce_scatter(values, links):
    """Recursive halving: what is kept halves with the distance to the partner."""
    k = len(values)
    kept = {i: list(range(k)) for i in range(k)}
    distance = k // 2
    while distance:
        before = values.copy()
        sent = []
        for i in range(k):
            mine = [part for part in kept[i] if (part & distance) == (i & distance)]
            sent.append(before[i, mine].nbytes)
            values[i, mine] += before[i ^ distance, mine]
            kept[i] = mine
        links.round(sent)
        distance //= 2


def doubling_all_gather(values, links):
    k = len(values)
    have = {i: [i] for i in range(k)}
    distance = 1
    while distance < k:
        before, parts = values.copy(), {i: list(have[i]) for i in range(k)}
        for i in range(k):
            other = parts[i ^ distance]
            values[i, other] = before[i ^ distance, other]
            have[i] += other
        links.round([before[i, parts[i]].nbytes for i in range(k)])
        distance *= 2


def drawn(k):
    return np.random.default_rng(0).integers(0, 9, (k, k, 16)).astype(np.float64)


ALGORITHMS = {
    "ring": (ring_reduce_scatter, ring_all_gather, rooflines.ring_seconds, (2, 3, 8)),
    "doubling": (
        halving_reduce_scatter, doubling_all_gather, rooflines.doubling_seconds, (2, 4, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_reduce_takes_as_long_as_its_messages(name):
    reduce_scatter, all_gather, seconds, counts = ALGORITHMS[name]
    for k in counts:
        values, halves, links = drawn(k), Links(), Links()
        total, payload = values.sum(0), values[0].nbytes
        reduce_scatter(values, halves)
        links.seconds = halves.seconds
        all_gather(values, links)
        assert (values == total).all()
        cost = {"devices": k, "latency": ALPHA, "bandwidth": BETA}
        assert seconds("all-reduce", payload, **cost) == pytest.approx(links.seconds)
        assert seconds("reduce-scatter", payload, **cost) == pytest.approx(halves.seconds)
        gather = seconds("all-gather", payload // k, **cost)
        assert gather == pytest.approx(links.seconds - halves.seconds)


def test_an_all_to_all_in_turn_and_in_halves():
    k = 8
    values = drawn(k)
    cost = {"devices": k, "latency": ALPHA, "bandwidth": BETA}
    links, got = Links(), values.copy()
    for shift in range(1, k):
        for i in range(k):
            got[(i + shift) % k, i] = values[i, (i + shift) % k]
        links.round([values[0, 0].nbytes] * k)
    assert (got == values.swapaxes(0, 1)).all()
    payload = values[0].nbytes
    assert rooflines.ring_seconds("all-to-all", payload, **cost) == pytest.approx(links.seconds)

    # Bruck: the part for rank i + d travels by the bits of d.
    links, moving = (
        Links(),
        np.array([[values[i, (i + d) % k] for d in range(k)] for i in range(k)]),
    )
    for bit in (1, 2, 4):
        parts = [d for d in range(k) if d & bit]
        before = moving.copy()
        for i in range(k):
            moving[(i + bit) % k, parts] = before[i, parts]
        links.round([before[0, parts].nbytes] * k)
    arrived = np.array([[moving[i, (i - source) % k] for source in range(k)] for i in range(k)])
    assert (arrived == values.swapaxes(0, 1)).all()
    seconds = rooflines.doubling_seconds("all-to-all", payload, **cost)
    assert seconds == pytest.approx(links.seconds)


@pytest.mark.parametrize("k", [2, 6, 8])
def test_a_tree_sums_everything_to_its_root_and_back(k):
    values, links = drawn(k).reshape(k, -1), Links()
    total, payload = values.sum(0), values[0].nbytes
    distances = [2**i for i in range(math.ceil(math.log2(k)))]
    for distance in distances:
        for i in range(0, k - distance, 2 * distance):
            values[i] += values[i + distance]
        links.round([payload])
    for distance in reversed(distances):
        for i in range(0, k - distance, 2 * distance):
            values[i + distance] = values[i]
        links.round([payload])
    assert (values == total).all()
    seconds = rooflines.tree_all_reduce_seconds(payload, k, latency=ALPHA, bandwidth=BETA)
    assert seconds == pytest.approx(links.seconds)


def test_small_payloads_want_trees_and_large_ones_rings():
    cost = {"latency": ALPHA, "bandwidth": BETA}

    def ring(payload):
        return rooflines.ring_seconds("all-reduce", payload, 64, **cost)

    def tree(payload):
        return rooflines.tree_all_reduce_seconds(payload, 64, **cost)

    assert tree(1024) < ring(1024)
    assert ring(1 << 30) < tree(1 << 30)
    assert ring(1 << 30) == pytest.approx(2 * (1 << 30) / BETA, rel=0.05)


def test_one_device_and_one_permute():
    cost = {"latency": ALPHA, "bandwidth": BETA}
    assert rooflines.ring_seconds("all-reduce", 1 << 20, 1, **cost) == 0
    one = rooflines.ring_seconds("collective-permute", 5000, 8, **cost)
    assert one == pytest.approx(ALPHA + 5000 / BETA)
    with pytest.raises(AssertionError, match="paired"):
        rooflines.doubling_seconds("all-reduce", 1 << 20, 6, **cost)
