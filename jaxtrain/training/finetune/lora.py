"""LoRA and DoRA adapters (arXiv 2106.09685, 2402.09353) next to frozen weights.

With magnitudes it is DoRA (arXiv 2402.09353): a weight acts as m V / ||V|| with V = W + scale A B,
with the norm over the weights of each output feature, and m is trained too.
"""

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.dropout import Draws, dropout
from jaxtrain.nn.matmul.contract import Einsum, StructuredWeight, contract, meaning, sides
from jaxtrain.nn.matmul.quantized import Quantized
from jaxtrain.parallel.gathering import GradientSlice, gather
from jaxtrain.parallel.sharding import by_name, logical_axes
from jaxtrain.training.finetune.quantized_base import QuantizedBase, can_adapt, sides_of
from jaxtrain.training.finetune.tuning import Weights

# -- matmul with an adapter ------------------------------------------------------------------------
# y = x W + scale (x A) B: the weight's own gradient is never computed, and the adapter's two
# matmuls cost rank (in + out) per row. R is the rank. With a magnitude m (DoRA, arXiv 2402.09353)
# each element of y is multiplied by m / ||W + scale A B||, where the norm is treated as a constant
# (section 4.3).


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


# -- adapters of a model ---------------------------------------------------------------------------

DOWN, UP = "lora_a", "lora_b"  # A and B, under the name of their weight
MAGNITUDE = "lora_magnitude"  # m, under the same name


@dataclasses.dataclass(frozen=True)
class LoRA(QuantizedBase):
    """Trained LoRA adapters; all parameters of the model are frozen.

    Attributes:
      targets: names of the weights with adapters.
      rank: R.
      scale: factor of an adapter's output.
      magnitudes: whether each target has a magnitude (DoRA).
      dropout: of adapters' inputs in training.
    """

    targets: frozenset[str] = frozenset()
    rank: int = 0
    scale: float = 1.0
    magnitudes: bool = False
    dropout: float = 0.0

    @property
    def draws(self) -> bool:
        """Whether adapters use dropout."""
        return self.dropout > 0

    def draw(self, shapes: nnx.State, key: jax.Array) -> nnx.State:
        """Draw A uniformly within 1 / sqrt(in), as `torch.nn.Linear` does, and set B to zero.

        The model's outputs are unchanged at first.

        Args:
          shapes: of the model's parameters, its layers in their order.
          key: the random key; each weight's adapter uses its own.
        """
        found: dict[Any, Any] = {}
        for name, variable in by_name(shapes).items():
            if name not in self.targets:
                continue
            one = _Adapter.of(variable, self.rank)
            own = jax.random.fold_in(key, number_of(name))
            limit = 1 / math.sqrt(one.fan_in)
            down = jax.random.uniform(own, one.down, jnp.float32, -limit, limit)
            path = tuple(name.split("/"))
            found[*path, DOWN] = nnx.Param(down, axes=one.down_axes, role=None)
            found[*path, UP] = nnx.Param(jnp.zeros(one.up), axes=one.up_axes, role=None)
            if self.magnitudes:
                empty = jnp.zeros(one.magnitude)  # initialized in `begin` from the weights' norm
                found[*path, MAGNITUDE] = nnx.Param(empty, axes=one.magnitude_axes, role=None)
        return nnx.from_flat_state(found)

    def begin(self, params: nnx.State, adapters: nnx.State) -> Weights:
        """Split the weights into trained adapters and frozen parameters, the codes of quantized
        ones.

        Magnitudes are initialized to the norms of their weights: the model is unchanged.
        """
        if self.magnitudes:
            adapters = self._with_norms(params, adapters)
        return super().begin(params, adapters)

    def _with_norms(self, params: nnx.State, adapters: nnx.State) -> nnx.State:
        weights, found = by_name(params), dict[Any, Any]()
        for path, variable in nnx.to_flat_state(adapters):
            if path[-1] == MAGNITUDE:
                weight = weights["/".join(map(str, path[:-1]))]
                inside, _ = sides_of(logical_axes(weight))
                norm = norm_of(weight.get_value().astype(jnp.float32), inside)
                variable = variable.replace(norm.astype(variable.get_value().dtype))
            found[path] = variable
        return nnx.from_flat_state(found)

    def join(self, weights: Weights) -> nnx.State:
        """Return the model's parameters, those with an adapter as `LowRank`."""
        adapters, params = weights
        pairs = by_name(adapters)
        found = self.as_declared(params)
        for path, variable in found.items():
            name = "/".join(map(str, path))
            if name in self.targets:
                down, up = pairs[f"{name}/{DOWN}"], pairs[f"{name}/{UP}"]
                size = pairs[f"{name}/{MAGNITUDE}"] if self.magnitudes else None
                value = LowRank(
                    variable.get_value(), down.get_value(), up.get_value(),
                    None if size is None else size.get_value(),
                    logical_axes(down), logical_axes(up),
                    () if size is None else logical_axes(size), self.scale, self.dropout,
                    number_of(name),
                )  # fmt: skip
                found[path] = variable.replace(value)
        return nnx.from_flat_state(found)

    def merge(self, weights: Weights) -> nnx.State:
        """Merge the adapters: W + scale A B in float32, with quantized W dequantized."""
        adapters, _ = weights
        pairs = by_name(adapters)
        found: dict[Any, Any] = dict(nnx.to_flat_state(super().merge(weights)))
        for path, variable in found.items():
            name, value = "/".join(map(str, path)), variable.get_value()
            if name in self.targets:
                down, up = (pairs[f"{name}/{one}"].get_value() for one in (DOWN, UP))
                whole = self._merge(variable, value, down, up)
                if self.magnitudes:
                    size = pairs[f"{name}/{MAGNITUDE}"].get_value()
                    whole = _of_magnitude(whole, size, sides_of(logical_axes(variable))[0])
                value = whole.astype(value.dtype)
            found[path] = variable.replace(value)
        return nnx.from_flat_state(found)

    def _merge(self, variable: Any, base: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
        base = base.astype(jnp.float32)
        letters = "abcdef"[: base.ndim]
        inside, outside = sides_of(logical_axes(variable))
        of_down = "".join(letters[i] for i in (0, *inside)) + "R"
        of_up = "".join("R" if i == inside[0] else letters[i] for i in range(base.ndim)
                        if i == inside[0] or i in (0, *outside))  # fmt: skip
        added = jnp.einsum(
            f"{of_down},{of_up}->{letters}",
            down.astype(jnp.float32),
            up.astype(jnp.float32),
            precision="highest",
        )
        return base + self.scale * added


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """Shapes and axes of A and B for a stacked weight, and the number of inputs of A."""

    down: tuple[int, ...]
    up: tuple[int, ...]
    magnitude: tuple[int, ...]
    down_axes: tuple[str, ...]
    up_axes: tuple[str, ...]
    magnitude_axes: tuple[str, ...]
    fan_in: int

    @classmethod
    def of(cls, variable: Any, rank: int) -> "_Adapter":
        shape, axes = variable.get_value().shape, logical_axes(variable)
        inside, outside = sides_of(axes)

        Parts = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]

        def split_values(values: tuple[Any, ...], of_rank: Any) -> Parts:
            down = tuple(values[i] for i in (0, *inside)) + (of_rank,)
            up = tuple(
                of_rank if i == inside[0] else values[i]
                for i in range(len(values))
                if i == inside[0] or i in (0, *outside)
            )
            return down, up, tuple(values[i] for i in (0, *outside))

        sizes, names = split_values(shape, rank), split_values(axes, "rank")
        return cls(*sizes, *names, math.prod(shape[i] for i in inside))


def number_of(name: str) -> int:
    """Return the dropout site of a weight's adapter."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def norm_of(weight: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    """Return the norm over the contracted dimensions, 1 where all elements are zero."""
    squares = jnp.square(weight).sum(inside)
    return jnp.where(squares == 0, 1.0, jnp.sqrt(jnp.where(squares == 0, 1.0, squares)))


def _of_magnitude(weight: jax.Array, size: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    factor = size.astype(jnp.float32) / norm_of(weight, inside)
    return weight * jnp.expand_dims(factor, inside)


def targets_of(wanted: tuple[str, ...], shapes: nnx.State) -> Iterator[tuple[str, list[str]]]:
    """Yield each entry of `Finetune.lora_targets` ('attention', 'mlp' or a pattern) with the names
    that match it.
    """
    able = {name: logical_axes(v) for name, v in by_name(shapes).items() if can_adapt(v)}
    for one in wanted:
        if one == "attention":
            yield one, [n for n, axes in able.items() if {"heads", "kv_heads"} & set(axes)]
        elif one == "mlp":
            yield one, [n for n, axes in able.items() if "mlp" in axes]
        else:
            yield one, [n for n in able if fnmatch.fnmatchcase(n, one)]
