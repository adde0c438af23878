"""Peak FLOP/s and memory bandwidth of one device: published, or measured on a CPU."""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel.chips import chip_of

_PRODUCT = 1024  # rows and columns of the square matrices in the measured matmul
# Elements that a copy reads and writes: sizes that fit into the caches of one core, sizes that fit
# into the caches of the machine, and one that fits into none.
_COPIED = (2**13, 2**16, 2**20, 2**24)
_TRIES = 10


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Roofline limits of a device (Williams et al. 2009, doi 10.1145/1498765.1498785).

    Attributes:
      flops: peak FLOP/s of matmuls in the compute dtype; None if unknown.
      bandwidth: memory bandwidth in bytes/s; None if unknown.
      source: the source of both figures, for messages.
      cached: (size, bytes/s) of operations whose bytes fit into caches, by increasing size and
        decreasing rate; empty if only the memory bandwidth is known.
    """

    flops: float | None
    bandwidth: float | None
    source: str
    cached: tuple[tuple[int, float], ...] = ()

    def rate(self, moved_bytes: float) -> float | None:
        """Return the peak bytes/s of an operation that moves `moved_bytes` in one run."""
        held = [rate for size, rate in self.cached if size <= moved_bytes] or [
            rate for _, rate in self.cached[:1]
        ]
        return held[-1] if held else self.bandwidth

    def least_seconds(self, flops: int | None, moved_bytes: int, runs: float = 1) -> float | None:
        """Return the roofline time of `runs` runs in seconds; None if a figure is unknown.

        Args:
          flops: FLOPs of all runs together.
          moved_bytes: bytes moved by all runs together.
          runs: the number of runs. The bytes of one run decide which cache they fit into.
        """
        rate = self.rate(moved_bytes / runs) if runs else self.bandwidth
        if flops is None or self.flops is None or rate is None:
            return None
        return max(flops / self.flops, moved_bytes / rate)

    def bound(self, flops: int | None, moved_bytes: int, runs: float = 1) -> str | None:
        """Return the bottleneck, "arithmetic" or "memory"; arguments as in `least_seconds`."""
        rate = self.rate(moved_bytes / runs) if runs else self.bandwidth
        if flops is None or self.flops is None or rate is None:
            return None
        return "arithmetic" if flops / self.flops > moved_bytes / rate else "memory"


def ceilings(device: jax.Device, dtype: str) -> Ceilings:
    """Return the peak rates of one device of a run.

    Args:
      device: a local device; a simulated device is measured alone, on the whole machine.
      dtype: the compute dtype.
    """
    chip = chip_of(device.device_kind)
    if chip is None:
        return Ceilings(None, None, f"the figures of {device.device_kind} are not known")
    if chip.kind == "cpu":
        return _measure(device, dtype)
    peak = chip.float32_flops if dtype == "float32" else chip.bf16_flops
    return Ceilings(peak, chip.hbm_bandwidth, f"published figures of {chip.name}")


def _measure(device: jax.Device, dtype: str) -> Ceilings:
    """Measure the best rates of matmuls and copies on this machine under its current load."""
    ones = jnp.ones((_PRODUCT, _PRODUCT), dtype, device=device)
    product = jax.jit(lambda x: x @ x).lower(ones).compile()
    flops = 2 * _PRODUCT**3 / _least(lambda _: product(ones), ones)
    rates = [(8 * count, _copy_rate(device, count)) for count in _COPIED]
    # A small array is never slower than a large one.
    cached = [(size, max(rate for _, rate in rates[i:])) for i, (size, _) in enumerate(rates)]
    source = f"measured here by {dtype} matmuls and x + 1; higher where data fit into caches"
    return Ceilings(flops, rates[-1][1], source, tuple(cached))


def _copy_rate(device: jax.Device, count: int) -> float:
    """Measure bytes/s of x + 1 on `count` float32 in place, repeated to hide the dispatch."""
    times = max(_COPIED[-1] // count // 8, 1)
    many = jnp.ones(count, np.float32, device=device)

    def add(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x + 1, x)

    # In place: writing to a new array would include the time to allocate its pages.
    run = jax.jit(add, donate_argnums=0).lower(many).compile()
    return times * 2 * many.nbytes / _least(run, many)


def _least(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    least = math.inf
    for _ in range(_TRIES):
        start = time.perf_counter()
        x = run(x).block_until_ready()
        least = min(least, time.perf_counter() - start)
    return least
