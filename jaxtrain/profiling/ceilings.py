"""What one device can do at most: its chip's published figures, or a CPU's measured ones."""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.planning.hardware import chip_of

_PRODUCT = 1024  # rows and columns of the matrices that are multiplied
_COPIED = 2**24  # elements that are read and written: more than caches hold
_TRIES = 10


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The two sides of a roofline (Williams et al. 2009, doi 10.1145/1498765.1498785).

    Attributes:
      flops: FLOP/s of matrix products in the compute dtype; None where it is not known.
      bandwidth: bytes/s of memory; None where it is not known.
      source: where both come from, for people.
    """

    flops: float | None
    bandwidth: float | None
    source: str

    def least_seconds(self, flops: int | None, moved_bytes: int) -> float | None:
        """What an operation takes at least; None where a figure is not known."""
        if flops is None or self.flops is None or self.bandwidth is None:
            return None
        return max(flops / self.flops, moved_bytes / self.bandwidth)

    def bound(self, flops: int | None, moved_bytes: int) -> str | None:
        """Which of the two bounds it: "arithmetic" or "memory"."""
        if flops is None or self.flops is None or self.bandwidth is None:
            return None
        takes_longer = flops / self.flops > moved_bytes / self.bandwidth
        return "arithmetic" if takes_longer else "memory"


def ceilings(device: jax.Device, dtype: str, devices: int) -> Ceilings:
    """Of one device of a run.

    Args:
      device: a local one.
      dtype: the compute dtype.
      devices: of this process: CPU devices share one machine.
    """
    chip = chip_of(device.device_kind)
    if chip is None:
        return Ceilings(None, None, f"no figures are known of {device.device_kind}")
    if chip.kind == "cpu":
        return _measured(device, dtype, devices)
    peak = chip.float32_flops if dtype == "float32" else chip.bf16_flops
    return Ceilings(peak, chip.hbm_bandwidth, f"published figures of {chip.name}")


def _measured(device: jax.Device, dtype: str, devices: int) -> Ceilings:
    """The best of a few products and copies on this machine, as busy as it is."""
    ones = jnp.ones((_PRODUCT, _PRODUCT), dtype, device=device)
    product = jax.jit(lambda x: x @ x).lower(ones).compile()
    flops = 2 * _PRODUCT**3 / _least(lambda _: product(ones), ones)
    many = jnp.ones(_COPIED, np.float32, device=device)
    moved_bytes = 2 * many.nbytes
    # In place: a new array's pages would be made while they are written.
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(many).compile()
    bandwidth = moved_bytes / _least(add, many)
    each = f", each of {devices} devices a part" if devices > 1 else ""
    return Ceilings(
        flops / devices, bandwidth / devices, f"measured here, {dtype} products and x + 1{each}"
    )


def _least(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    least = math.inf
    for _ in range(_TRIES):
        start = time.perf_counter()
        x = run(x).block_until_ready()
        least = min(least, time.perf_counter() - start)
    return least
