"""Products with a weight that has a low-rank adapter beside it (LoRA, arXiv 2106.09685).

y = x W + scale (x A) B: the weight's own gradient is never made, and the adapter's two products
cost rank (in + out) a row. R is the rank.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxtrain.nn.products.contract import contract, meaning
from jaxtrain.nn.products.dot import Einsum, sides
from jaxtrain.nn.products.quantised import Quantised, product
from jaxtrain.parallel.gathering import GradientSlice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """The value of a parameter that has an adapter.

    Attributes:
      base: the weight.
      down: A, the weight's dimensions that are summed over, then R.
      up: B, the weight's other dimensions, R where the first summed one stood.
      down_axes: what A's dimensions mean.
      up_axes: what B's do.
      scale: of what the adapter adds.
    """

    base: jax.Array | Quantised
    down: jax.Array | GradientSlice
    up: jax.Array | GradientSlice
    down_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    up_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})


def adapted(
    equation: str,
    x: jax.Array,
    weight: nnx.Param,
    out: tuple[str, ...] | None,
    *,
    by: Einsum,
) -> jax.Array:
    """The product of x with a weight that has an adapter; arguments as of `contract`.

    Args:
      equation, x, out: as of `contract`.
      weight: its value is a `LowRank`.
      by: what multiplies with the weight; the adapter's products are in x's dtype.
    """
    value: LowRank = weight.get_value()
    left, right, _ = sides(equation)
    summed = "".join(letter for letter in right if letter in left)
    kept = "".join(letter for letter in left if letter not in right)
    base: Any = weight.replace(value.base)
    of_base = product if isinstance(value.base, Quantised) else contract
    y = of_base(equation, x, base, out, by=by)
    down: Any = weight.replace(value.down, axes=value.down_axes)
    middle = contract(f"{left},{summed}R->{kept}R", x, down, (*meaning(kept), "rank"))
    up: Any = weight.replace(value.up, axes=value.up_axes)
    added = contract(f"{kept}R,{up_letters(right, summed)}->{sides(equation)[2]}", middle, up, out)
    return y + value.scale * added


def up_letters(right: str, summed: str) -> str:
    """The letters of B, where W has the letters `right` and `summed` of them are summed over."""
    return "".join(
        "R" if letter == summed[0] else letter
        for letter in right
        if letter == summed[0] or letter not in summed
    )
