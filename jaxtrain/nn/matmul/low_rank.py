"""Matmul with a LoRA adapter (arXiv 2106.09685).

y = x W + scale (x A) B: the weight's own gradient is never computed, and the adapter's two matmuls
cost rank (in + out) per row. R is the rank. With a magnitude m (DoRA, arXiv 2402.09353) each
element of y is multiplied by m / ||W + scale A B||, where the norm is treated as a constant
(section 4.3).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.dropout import Draws, dropout
from jaxtrain.nn.matmul.contract import Einsum, StructuredWeight, contract, meaning, sides
from jaxtrain.nn.matmul.quantized import Quantized
from jaxtrain.parallel.gathering import GradientSlice, gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(StructuredWeight):
    """Value of a parameter with an adapter.

    Attributes:
      base: the weight.
      down: A, the weight's contracted dimensions, then R.
      up: B, the weight's other dimensions, with R at the first contracted one.
      magnitude: m, the weight's other dimensions; None: no magnitude.
      down_axes: logical axes of A.
      up_axes: logical axes of B.
      magnitude_axes: logical axes of m.
      scale: factor of the adapter's output.
      dropout: of A's input.
      site: index of its dropout layer.
    """

    base: jax.Array | Quantized
    down: jax.Array | GradientSlice
    up: jax.Array | GradientSlice
    magnitude: jax.Array | GradientSlice | None
    down_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    up_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    magnitude_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})
    site: int = dataclasses.field(default=0, metadata={"static": True})

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
        """As in StructuredWeight; the adapter's matmuls are in x's dtype."""
        left, right, _ = sides(equation)
        summed = "".join(letter for letter in right if letter in left)
        kept = "".join(letter for letter in left if letter not in right)
        base: Any = weight.replace(self.base)
        if isinstance(self.base, Quantized):
            y = self.base.contract(equation, x, base, out, by=by, draws=draws, layer=layer)
        else:
            y = contract(equation, x, base, out, by=by)
        down: Any = weight.replace(self.down, axes=self.down_axes)
        read = dropout(x, self.dropout, draws, self.site, layer)
        middle = contract(f"{left},{summed}R->{kept}R", read, down, (*meaning(kept), "rank"))
        up: Any = weight.replace(self.up, axes=self.up_axes)
        added = contract(
            f"{kept}R,{up_letters(right, summed)}->{sides(equation)[2]}", middle, up, out
        )
        y = y + self.scale * added
        if self.magnitude is None:
            return y
        size: Any = weight.replace(self.magnitude, axes=self.magnitude_axes)
        whole = _merge(right, summed, gather(base), gather(down), gather(up), self.scale)
        return y * _factor(sides(equation)[2], right, summed, gather(size), whole).astype(y.dtype)


def _merge(
    right: str, summed: str, base: jax.Array, down: jax.Array, up: jax.Array, scale: float
) -> jax.Array:
    """W + scale A B, float32, without a gradient."""
    base, down, up = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in (base, down, up))
    equation = f"{summed}R,{up_letters(right, summed)}->{right}"
    return base + scale * jnp.einsum(equation, down, up)


def _factor(made: str, right: str, summed: str, size: jax.Array, whole: jax.Array) -> jax.Array:
    """m over the norm, for each output feature, with dimensions of 1 for the others.

    Args:
      made: the letters of the result.
      right: those of W.
      summed: the contracted ones of these.
      size: m.
      whole: the effective weight without magnitude.
    """
    squares = jnp.square(whole).sum(tuple(right.index(letter) for letter in summed))
    norm = jnp.sqrt(jnp.where(squares == 0, 1.0, squares))
    kept = [letter for letter in right if letter not in summed]
    assert kept == [letter for letter in made if letter in kept], "in one order"
    others = tuple(dim for dim, letter in enumerate(made) if letter not in kept)
    return jnp.expand_dims(size.astype(jnp.float32) / norm, others)


def up_letters(right: str, summed: str) -> str:
    """Return the letters of B, where W has the letters `right` and contracts `summed`."""
    return "".join(
        "R" if letter == summed[0] else letter
        for letter in right
        if letter == summed[0] or letter not in summed
    )
