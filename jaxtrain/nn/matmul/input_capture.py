"""Matmuls that expose their input activations, for calibration (AWQ).

Layers in a scan return theirs stacked, and models need no change. Letters: B
batch, T length, I contracted.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.matmul.contract import Einsum, StructuredWeight, contract


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(StructuredWeight):
    """Value of a parameter whose inputs are captured.

    Attributes:
      weight: the weight.
      probe: zeros [B * ceil(T / every), I], float32.
      every: one of this many tokens of a row is returned.
    """

    weight: jax.Array
    probe: jax.Array
    every: int = dataclasses.field(metadata={"static": True})

    def contract(
        self,
        equation: str,
        x: jax.Array,
        weight: nnx.Param,
        out: tuple[str, ...] | None,
        *,
        by: Einsum,
        draws: Draws | None,
        layer: jax.Array | int | None,
    ) -> jax.Array:
        """As in StructuredWeight, of x [B, T, ...].

        The probe's gradient is x, whatever is differentiated; x itself has none.
        """
        del draws, layer
        base: Any = weight.replace(self.weight)
        return contract(equation, _show(self.every, x, self.probe), base, out, by=by)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _show(every: int, x: jax.Array, probe: jax.Array) -> jax.Array:
    del every, probe
    return x


def _forward(every: int, x: jax.Array, probe: jax.Array) -> tuple[jax.Array, jax.Array]:
    del every, probe
    return x, x


def _backward(every: int, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    seen = x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, P())
    seen = seen[:, ::every].astype(jnp.float32)
    return jnp.zeros_like(gradient), seen.reshape(-1, math.prod(seen.shape[2:]))


_show.defvjp(_forward, _backward)
