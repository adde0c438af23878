"""LoRA (arXiv 2106.09685): adapters of low rank beside frozen weights, which alone are trained.

With magnitudes it is DoRA (arXiv 2402.09353): a weight acts as m V / ||V|| with V = W + scale A B,
the norm being that of what makes one number of the result, and m is trained too.
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

from jaxtrain.nn.parameters import role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.nn.products.low_rank import LowRank
from jaxtrain.nn.products.quantised import BLOCK, Kind, Quantised, dequantised, quantise
from jaxtrain.parallel.sharding import Layout, logical_axes
from jaxtrain.training.finetune.tuning import Tuning, Weights, named

DOWN, UP = "lora_a", "lora_b"  # A and B, under the name of their weight
MAGNITUDE = "lora_magnitude"  # m, likewise
CODES, SCALES = "codes", "scales"  # of a weight in few bits, likewise
# A weight of these dimensions besides embed is multiplied with in a transformer's layers.
_SIDES = {"mlp", "heads", "kv_heads", "head_dim", "qkv"}


@dataclasses.dataclass(frozen=True)
class LoRA(Tuning):
    """Trains adapters, and no parameter of the model.

    Attributes:
      targets: names of the weights that have one.
      rank: R.
      scale: of what an adapter adds.
      few_bits: names of the weights that are held in few bits.
      kind: how.
      magnitudes: whether each target has one (DoRA).
      dropout: of what adapters read in training.
    """

    targets: frozenset[str] = frozenset()
    rank: int = 0
    scale: float = 1.0
    few_bits: frozenset[str] = frozenset()
    kind: Kind = "nf4"
    magnitudes: bool = False
    dropout: float = 0.0

    @property
    def draws(self) -> bool:
        """Where it drops anything."""
        return self.dropout > 0

    def draw(self, shapes: nnx.State, key: jax.Array) -> nnx.State:
        """A uniform within 1 / sqrt(in), as `torch.nn.Linear` draws its weights, B zero: at first
        the model is what it was.

        Args:
          shapes: of the model's parameters, its layers in their order.
          key: of what is drawn; every weight's adapter draws its own.
        """
        found: dict[Any, Any] = {}
        for name, variable in named(shapes).items():
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
                empty = jnp.zeros(one.magnitude)  # `begin` has the weights that it is the norm of
                found[*path, MAGNITUDE] = nnx.Param(empty, axes=one.magnitude_axes, role=None)
        return nnx.from_flat_state(found)

    def begin(self, params: nnx.State, adapters: nnx.State) -> Weights:
        """Adapters are trained, parameters are not; of those in few bits the codes are kept.

        Magnitudes are the norms of their weights: the model begins as it was.
        """
        if self.magnitudes:
            adapters = self._with_norms(params, adapters)
        if not self.few_bits:
            return adapters, params
        found: dict[Any, Any] = {}
        for path, variable in nnx.to_flat_state(params):
            if "/".join(map(str, path)) not in self.few_bits:
                found[path] = variable
                continue
            axes = logical_axes(variable)
            made = quantise(variable.get_value(), axes, sides_of(axes)[0], self.kind)
            for last, value, names in (
                (CODES, made.codes, made.codes_axes),
                (SCALES, made.scales, made.scales_axes),
            ):
                found[*path, last] = nnx.Param(value, axes=names, role="few_bits")
        return adapters, nnx.from_flat_state(found)

    def _with_norms(self, params: nnx.State, adapters: nnx.State) -> nnx.State:
        weights, found = named(params), dict[Any, Any]()
        for path, variable in nnx.to_flat_state(adapters):
            if path[-1] == MAGNITUDE:
                weight = weights["/".join(map(str, path[:-1]))]
                inside, _ = sides_of(logical_axes(weight))
                norm = norm_of(weight.get_value().astype(jnp.float32), inside)
                variable = variable.replace(norm.astype(variable.get_value().dtype))
            found[path] = variable
        return nnx.from_flat_state(found)

    def _as_declared(self, frozen: nnx.State) -> dict[Any, Any]:
        """The frozen parameters by path, those in few bits as `Quantised`."""
        found: dict[Any, Any] = {}
        flat = dict(nnx.to_flat_state(frozen))
        for path, variable in flat.items():
            if path[-1] == SCALES:
                continue
            if path[-1] != CODES:
                found[path] = variable
                continue
            codes, scales = variable, flat[*path[:-1], SCALES]
            axes = logical_axes(codes)
            summed = tuple(i - len(axes) for i in sides_of(axes)[0])
            value = Quantised(
                codes.get_value(), scales.get_value(), axes, logical_axes(scales), self.kind,
                summed[-1], summed,
            )  # fmt: skip
            found[path[:-1]] = codes.replace(value, role=None)
        return found

    def join(self, weights: Weights) -> nnx.State:
        """The model's parameters, those with an adapter as `LowRank`."""
        adapters, params = weights
        pairs = named(adapters)
        found = self._as_declared(params)
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

    def merged(self, weights: Weights) -> nnx.State:
        """W + scale A B, computed in float32; of a weight in few bits, which is the floats that the
        codes stand for, in the dtype of the adapters."""
        adapters, params = weights
        pairs = named(adapters)
        dtype = jax.tree.leaves(adapters)[0].dtype
        found = self._as_declared(params)
        for path, variable in found.items():
            name, value = "/".join(map(str, path)), variable.get_value()
            if isinstance(value, Quantised):
                value = dequantised(value).astype(dtype)
            if name in self.targets:
                down, up = (pairs[f"{name}/{one}"].get_value() for one in (DOWN, UP))
                whole = self._merged(variable, value, down, up)
                if self.magnitudes:
                    size = pairs[f"{name}/{MAGNITUDE}"].get_value()
                    whole = _of_magnitude(whole, size, sides_of(logical_axes(variable))[0])
                value = whole.astype(value.dtype)
            found[path] = variable.replace(value)
        return nnx.from_flat_state(found)

    def _merged(self, variable: Any, base: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
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
    """The shapes and axes of A and B of a stacked weight, and how many numbers A sums over."""

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

        def taken(values: tuple[Any, ...], of_rank: Any) -> Parts:
            down = tuple(values[i] for i in (0, *inside)) + (of_rank,)
            up = tuple(
                of_rank if i == inside[0] else values[i]
                for i in range(len(values))
                if i == inside[0] or i in (0, *outside)
            )
            return down, up, tuple(values[i] for i in (0, *outside))

        sizes, names = taken(shape, rank), taken(axes, "rank")
        return cls(*sizes, *names, math.prod(shape[i] for i in inside))


def sides_of(axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a layer's weight that a product sums over, and the others: what reads the
    residual stream sums over embed, what writes to it over all else."""
    embed = axes.index("embed")
    others = tuple(i for i in range(1, len(axes)) if i != embed)
    return (others, (embed,)) if embed == len(axes) - 1 else ((embed,), others)


def number_of(name: str) -> int:
    """By which the draws of a weight's adapter are told from others'."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def norm_of(weight: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    """The norm over the dimensions that a product sums over; 1 for what is all zero."""
    squares = jnp.square(weight).sum(inside)
    return jnp.where(squares == 0, 1.0, jnp.sqrt(jnp.where(squares == 0, 1.0, squares)))


def _of_magnitude(weight: jax.Array, size: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    factor = size.astype(jnp.float32) / norm_of(weight, inside)
    return weight * jnp.expand_dims(factor, inside)


def can_adapt(variable: Any) -> bool:
    """Whether a parameter is a weight of a transformer's layers that every token meets."""
    axes = logical_axes(variable)
    is_weight = axes[:1] == ("layers",) and "embed" in axes and is_matrix(variable)
    return is_weight and role_of(variable) is None and set(axes[1:]) <= {"embed", *_SIDES}


def refuse_blocks(shapes: nnx.State, layout: Layout | None) -> Iterator[str]:
    """A sentence for each weight whose blocks of nf4 would be cut, by its sizes or by the mesh."""
    for name, variable in named(shapes).items():
        if not can_adapt(variable):
            continue
        axes, shape = logical_axes(variable), variable.get_value().shape
        dim = sides_of(axes)[0][-1]
        parts = 1 if layout is None else layout.size(layout.parameter(axes)[dim])
        if shape[dim] % (BLOCK * parts):
            over = f" over {parts} devices" if parts > 1 else ""
            yield (
                f"Finetune.few_bits='nf4': {name} has {shape[dim]} along {axes[dim]}, which does "
                f"not divide into blocks of {BLOCK}{over}; use Finetune.few_bits='int8'"
                + (" or fewer devices along that axis" if parts > 1 else "")
            )


def targets_of(wanted: tuple[str, ...], shapes: nnx.State) -> Iterator[tuple[str, list[str]]]:
    """What each of `Finetune.lora_targets` names: 'attention', 'mlp', or a pattern."""
    able = {name: logical_axes(v) for name, v in named(shapes).items() if can_adapt(v)}
    for one in wanted:
        if one == "attention":
            yield one, [n for n, axes in able.items() if {"heads", "kv_heads"} & set(axes)]
        elif one == "mlp":
            yield one, [n for n, axes in able.items() if "mlp" in axes]
        else:
            yield one, [n for n in able if fnmatch.fnmatchcase(n, one)]
