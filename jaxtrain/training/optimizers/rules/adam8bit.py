"""8-bit AdamW: moments quantized block-wise with a dynamic code.

The values are the dynamic map of bitsandbytes (arXiv 2110.02861, section 2.2): seven decades up to
1, the lower with fewer steps, so that small values keep their magnitude and large ones their
precision. A block is a box of at most 256 neighboring elements. Its sides follow from the array's
shape and axes alone, the same on every mesh, and no mesh that `validate` lets pass cuts through
one.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config.reader import configurable
from jaxtrain.nn.precision import is_matrix, is_of_matrix
from jaxtrain.parallel.axis_rules import RULES, MeshAxes
from jaxtrain.parallel.sharding import Layout, is_variable, logical_axes, parts_of, reshape
from jaxtrain.training.optimizers.matrices import each
from jaxtrain.training.optimizers.moments import ROUNDED
from jaxtrain.training.optimizers.rule import AdamRule, Kept

BLOCK = 256
_DECADES = 7
# Never a side of a block: pipelines distribute layers, and experts are separate matrices.
_STACKED = ("layers", "experts", "replica")
# A sharded dimension keeps at least this many parts: as many devices may shard it.
_TENSOR_PARTS, _FSDP_PARTS = 16, 32


class Coded(NamedTuple):
    """Array quantized to 8 bits in blocks.

    Attributes:
      codes: uint8 variable like the array.
      largest: float32 variable, the largest magnitude of each block; its axes are the array's.
    """

    codes: Any
    largest: Any


def block_of(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the sides of a quantization block, powers of 2 that divide the array's.

    The sides divide whole dimensions where no mesh splits them, a sixteenth of those that few
    devices split, and a thirty-second of those that many split. A block has 256 elements if these
    sides have them, else fewer.
    """
    remaining, sides = BLOCK, [1] * len(shape)

    def parts(axis: str) -> int:
        split = parts_of(RULES[axis].parameter)
        return 1 if not split else _FSDP_PARTS if "fsdp" in split else _TENSOR_PARTS

    own = [dim for dim, axis in enumerate(axes) if axis not in _STACKED]
    # The last first, so that a block is contiguous if possible.
    for dim in sorted(own, key=lambda dim: (parts(axes[dim]), -dim)):
        power = shape[dim] & -shape[dim]
        sides[dim] = min(max(power // parts(axes[dim]), 1), remaining)
        remaining //= sides[dim]
    return tuple(sides)


def blocks_of(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the number of blocks along each dimension of an array."""
    return tuple(size // side for size, side in zip(shape, block_of(shape, axes), strict=True))


def encode(variable: Any, *, signed: bool) -> Coded:
    """Quantize a float32 variable to 8 bits, each element to the nearest value of the map."""
    axes, x = logical_axes(variable), variable.get_value()
    boxes, dims = _boxes(x, axes)
    largest = jnp.abs(boxes).max(dims, keepdims=True)
    scaled = boxes / jnp.where(largest > 0, largest, 1.0)
    codes = reshape(_code(scaled, signed).astype(jnp.uint8), x.shape, _spec(x))
    return Coded(
        variable.replace(codes),
        variable.replace(reshape(largest, blocks_of(x.shape, axes), _spec(x))),
    )


def decode(coded: Coded, *, signed: bool) -> jax.Array:
    """Return the dequantized values, float32."""
    codes = coded.codes.get_value()
    boxes, dims = _boxes(_value(codes.astype(jnp.int32), signed), logical_axes(coded.codes))
    found = boxes * jnp.expand_dims(coded.largest.get_value(), dims)
    return reshape(found, codes.shape, _spec(codes))


def first(variable: Any, *, signed: bool) -> Coded:
    """Return quantized zeros in the form of a variable."""
    shape = variable.get_value().shape
    zero = int(dynamic_map(signed).searchsorted(0.0))
    return Coded(
        variable.replace(jnp.full_like(variable.get_value(), zero, dtype=jnp.uint8)),
        variable.replace(jnp.zeros(blocks_of(shape, logical_axes(variable)))),
    )


def validate(params: Any, layout: Layout) -> Iterator[str]:
    """Yield an error message for each kind of matrix whose blocks a layout would split.

    Args:
      params: the parameters with 8-bit moments, or their shapes.
      layout: their layout.
    """
    for variable in jax.tree.leaves(params, is_leaf=is_variable):
        axes, shape = logical_axes(variable), variable.get_value().shape
        spec, sides = layout.moment(axes), block_of(shape, axes)
        for axis, size, part, side in zip(axes, shape, spec, sides, strict=True):
            devices = layout.size(part)
            if size // devices % side:
                split = " x ".join(f"Mesh.{name}" for name in parts_of(part))
                yield (
                    f"Optimizer.name='adam8bit' with {split}={devices}: of {size} along {axis} "
                    f"each device has {size // devices}, which cuts through blocks of {side}; let "
                    f"a divisor of {size // side} share them"
                )


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """Return the 256 values of the codes in order, float32, as `decode` returns them."""
    # Without a mesh: the abstract mesh of checks cannot compute.
    nowhere = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with nowhere, jax.ensure_compile_time_eval():
        return np.asarray(_value(jnp.arange(256), signed))


def _code(scaled: jax.Array, signed: bool) -> jax.Array:
    """Return the nearest code for values of -1 to 1 (0 to 1): the inverse of `_value`.

    Comparisons with the decades' bounds find the decade, and the index in it follows from the
    magnitude: comparing with all 255 midpoints takes 250 times as long on CPUs (0.6 us per
    element).
    """
    size = jnp.abs(scaled)
    values = dynamic_map(signed)[127 if signed else 0 :]
    middles = (values[:-1] + values[1:]) / 2
    decades = range(_DECADES)
    steps = [2 ** (decade + (not signed)) for decade in decades]
    firsts = [step - (not signed) for step in steps]  # the rank of each decade's smallest value
    rank = jnp.zeros_like(size)
    for decade, step, first in zip(decades, steps, firsts, strict=True):
        code = (size * np.float32(10.0 ** (_DECADES - 1 - decade)) - 0.1) * (step / 0.9)
        code = first + jnp.clip(jnp.ceil(code) - 1, 0, step - 1)
        rank = jnp.where(size > middles[first - 1], code, rank)
    last = firsts[-1] + steps[-1]
    one = (scaled if signed else size) > middles[-1]  # -1 has no code of its own
    rank = jnp.where(one, last, rank).astype(jnp.int32)
    return 127 + jnp.where(scaled < 0, -rank, rank) if signed else rank


def _value(code: jax.Array, signed: bool) -> jax.Array:
    """Return the value of a code.

    Of the d-th decade from below, counted from 0, there are 2^d steps (2^(d+1) where none is
    negative), each the midpoint of its part of 0.1 to 1; 0 is an extra value, and 1 the last.
    """
    rank = jnp.abs(code - 127) if signed else code
    index = rank if signed else rank + 1
    # The exponent of an integer is the index of its first bit.
    bits = jax.lax.bitcast_convert_type(index.astype(jnp.float32), jnp.int32)
    power = (bits >> 23) - 127
    decade = power if signed else power - 1
    steps = jax.lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
    within = 0.1 + 0.9 * (index.astype(jnp.float32) - steps + 0.5) / steps
    scale = jnp.ones((), jnp.float32)
    for lower in range(_DECADES - 1):
        scale = jnp.where(decade == lower, np.float32(10.0 ** (lower - _DECADES + 1)), scale)
    value = jnp.where(code == 255, 1.0, scale * within)
    value = jnp.where(rank == 0, 0.0, value)
    return jnp.where(code < 127, -value, value) if signed else value


def _boxes(x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Return the shape with each dimension as its blocks and their inside, and the inside
    dimensions.
    """
    pairs = zip(blocks_of(x.shape, axes), block_of(x.shape, axes), strict=True)
    shape = [size for pair in pairs for size in pair]
    spec = [part for of in _spec(x) for part in (of, None)]
    return reshape(x, shape, spec), tuple(range(1, 2 * x.ndim, 2))


def _spec(x: jax.Array) -> tuple[MeshAxes, ...]:
    return tuple(jax.typeof(x).sharding.spec)


class CodedMoments(NamedTuple):
    """Optimizer state of 8-bit AdamW.

    Attributes:
      count: int32 scalar, updates so far.
      mu, nu: moving means of the gradients and of their squares: for a matrix `Coded`,
        else float32.
    """

    count: jax.Array
    mu: Any
    nu: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam8bit(AdamRule):
    """8-bit AdamW (arXiv 2110.02861): a matrix's moments are stored as codes of bitsandbytes'
    dynamic map, times the largest of each block of 256; norm scales' and biases' are float32. A
    step is AdamW's with the moments before rounding."""

    name: ClassVar[str] = "adam8bit"
    dtype: ClassVar[str | None] = "8 bits"
    no_mean: ClassVar[str | None] = ROUNDED

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        if not is_of_matrix(axes):
            return super().keeps(shape, axes)
        blocks = blocks_of(shape, axes)
        return (Kept(shape, axes, "uint8"), Kept(blocks, axes, "float32")) * 2

    def validate_layout(self, params: Any, layout: Layout) -> Iterator[str]:
        """Yield an error message for each kind of matrix whose blocks the layout would split."""
        variables = jax.tree.leaves(params, is_leaf=is_variable)
        return validate([v for v in variables if is_matrix(v)], layout)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        t = count.astype(jnp.float32)
        of_mu, of_nu = 1 / (1 - self.b1**t), 1 / (1 - self.b2**t)

        def mean(rate: float, *, signed: bool) -> Any:
            def one(gradient: Any, old: Any) -> Any:
                g = gradient.get_value()
                last = decode(old, signed=signed) if _codes_of(old) else old.get_value()
                value = g if signed else g * g
                return gradient.replace(rate * last + (1 - rate) * value)

            return one

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            return of_mu * m / (jnp.sqrt(of_nu * v) + self.epsilon)

        mu = each(mean(self.b1, signed=True), updates, state.mu)
        nu = each(mean(self.b2, signed=False), updates, state.nu)
        kept = CodedMoments(count, _quantize(mu, signed=True), _quantize(nu, signed=False))
        return jax.tree.map(step, mu, nu), kept


def _init(params: Any) -> CodedMoments:
    def zeros(*, signed: bool) -> Any:
        def one(param: Any) -> Any:
            if is_matrix(param):
                return first(param, signed=signed)
            return param.replace(jnp.zeros_like(param.get_value()))

        return each(one, params)

    return CodedMoments(jnp.zeros((), jnp.int32), zeros(signed=True), zeros(signed=False))


def _quantize(means: Any, *, signed: bool) -> Any:
    """Return moments with the matrices among them quantized; the others stay float32."""
    return each(lambda v: encode(v, signed=signed) if is_matrix(v) else v, means)


def _codes_of(kept: Any) -> bool:
    return isinstance(kept, Coded)
