"""Matmul with quantized weights (4 or 8 bits): codes, `quantize`, `dequantize`.

The first two are stored as by bitsandbytes, the third with the values of AutoAWQ's format:

- 'nf4' (QLoRA, arXiv 2305.14314): the nearest of 16 quantiles of a normal distribution, over blocks
  of 64 consecutive elements of the contraction, each block with the float32 of its largest
  magnitude. Two codes in a byte, the first in its upper half.
- 'int8' (LLM.int8(), arXiv 2208.07339): each output feature has one float32 scale, the largest
  magnitude over its contraction; codes are rounded multiples of a 127th of it.
- 'int4' (AWQ, arXiv 2306.00978): code c of a group of consecutive elements of the contraction
  represents (c - zero) scale. Zero is one of the 16 codes and scale a float16: 16 even steps
  from the minimum of the group and 0 to their maximum. Packed like 'nf4'.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.matmul.contract import Einsum, StructuredWeight, contract
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import reshape

Kind = Literal["nf4", "int8", "int4"]
BLOCK = 64  # elements of nf4 that share a scale
_LEAST_SCALE = 2.0**-14  # smallest normal float16
# Appendix E of arXiv 2305.14314.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(StructuredWeight):
    """The value of a quantized parameter, or of one layer of it.

    Attributes:
      codes: int8 in the weight's shape; or uint8, half as many along `dim`.
      scales: float32: 'nf4' one per 64 along `dim`; 'int8' without contracted dimensions; 'int4'
        float16, one per group along `dim`.
      zeros: 'int4' uint8, as many: the codes of 0; else None.
      codes_axes, scales_axes: their logical axes.
      kind: the format.
      dim: the dimension of the blocks, counted from the end (-1, -2, ...).
      summed: the contracted dimensions, counted likewise.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    codes_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    scales_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    kind: Kind = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})
    summed: tuple[int, ...] = dataclasses.field(metadata={"static": True})

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
        """As in StructuredWeight.

        Codes are gathered over fsdp, not floats. The backward pass dequantizes again: saved floats
        would defeat the purpose of the codes.
        """
        del draws, layer

        def multiply(x: jax.Array, value: Quantized) -> jax.Array:
            codes: Any = weight.replace(value.codes, axes=value.codes_axes)
            scales: Any = weight.replace(value.scales, axes=value.scales_axes)
            whole = dataclasses.replace(value, codes=gather(codes), scales=gather(scales))
            if value.zeros is not None:
                zeros: Any = weight.replace(value.zeros, axes=value.scales_axes)
                whole = dataclasses.replace(whole, zeros=gather(zeros))
            floats: Any = weight.replace(dequantize(whole).astype(x.dtype))
            return contract(equation, x, floats, out, by=by)

        return jax.checkpoint(multiply)(x, self)


def quantize(
    weight: jax.Array,
    axes: tuple[str, ...],
    summed: tuple[int, ...],
    kind: Kind,
    *,
    group: int = BLOCK,
) -> Quantized:
    """Return a weight, or all layers of it, quantized.

    Args:
      weight: of any floating dtype; 'nf4' and 'int4' need a multiple of `group` in the last of
        `summed`.
      axes: its logical axes.
      summed: the contracted dimensions, in their order.
      kind: the format.
      group: elements that share a scale, for 'int4'; 64 for 'nf4'.
    """
    x, dim = weight.astype(jnp.float32), summed[-1]
    from_end = tuple(i - x.ndim for i in summed)
    if kind == "int8":
        largest = jnp.abs(x).max(summed, keepdims=True)
        codes = jnp.round(x * (127 / jnp.where(largest == 0, 1, largest))).astype(jnp.int8)
        kept = tuple(i for i in range(x.ndim) if i not in summed)
        names = tuple(axes[i] for i in kept)
        scales = largest.squeeze(summed)
        return Quantized(codes, scales, None, axes, names, kind, from_end[-1], from_end)
    parts = _parts(x)
    zeros = None
    if kind == "int4":
        codes, scales, zeros = _of_groups(_split(x, dim, group, parts), dim + 1)
        zeros = zeros.squeeze(dim + 1)
    else:
        codes, scales = _of_blocks(_split(x, dim, BLOCK, parts), dim + 1)
    pairs = _split(_join(codes, dim, parts), dim, 2, parts)
    high, low = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in (0, 1))
    packed, scales = (high << 4) | low, scales.squeeze(dim + 1)
    return Quantized(packed, scales, zeros, axes, axes, kind, from_end[-1], from_end)


def _of_blocks(blocks: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Return the codes of nf4, and the scale of each block along `dim`."""
    largest = jnp.abs(blocks).max(dim, keepdims=True)
    scaled = blocks / jnp.where(largest == 0, 1, largest)
    # A number's code is how many of the midpoints between neighboring levels it exceeds.
    code = jnp.zeros_like(scaled, jnp.uint8)
    for middle in (NF4[1:] + NF4[:-1]) / 2:
        code += (scaled > float(middle)).astype(jnp.uint8)
    return code, largest


def _of_groups(groups: jax.Array, dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the codes of int4, and scale and zero of each group along `dim`."""
    least = jnp.minimum(groups.min(dim, keepdims=True), 0)
    largest = jnp.maximum(groups.max(dim, keepdims=True), 0)
    # Rounded first: codes are chosen with the scale that is stored.
    kept = jnp.maximum((largest - least) / 15, _LEAST_SCALE).astype(jnp.float16)
    scale = kept.astype(jnp.float32)
    zero = jnp.clip(jnp.round(-least / scale), 0, 15)
    code = jnp.clip(jnp.round(groups / scale) + zero, 0, 15)
    return code.astype(jnp.uint8), kept, zero.astype(jnp.uint8)


def dequantize(value: Quantized) -> jax.Array:
    """Return the dequantized values, float32."""
    codes, scales = value.codes, value.scales
    if value.kind == "int8":
        scales = jnp.expand_dims(scales, tuple(codes.ndim + i for i in value.summed))
        return codes.astype(jnp.float32) * (scales / 127)
    dim, parts = codes.ndim + value.dim, _parts(codes)
    numbers = unpack(value)
    blocks = _split(numbers, dim, numbers.shape[dim] // scales.shape[dim], parts)
    scales = jnp.expand_dims(scales, dim + 1).astype(jnp.float32)
    if value.zeros is None:
        return _join(_dequantize(blocks) * scales, dim, parts)
    steps = blocks.astype(jnp.float32) - jnp.expand_dims(value.zeros, dim + 1).astype(jnp.float32)
    return _join(steps * scales, dim, parts)


def unpack(value: Quantized) -> jax.Array:
    """Unpack 4-bit codes to uint8 in the weight's shape."""
    codes, dim = value.codes, value.codes.ndim + value.dim
    return _join(jnp.stack([codes >> 4, codes & 15], dim + 1), dim, _parts(codes))


def arrays(value: Quantized) -> dict[str, tuple[jax.Array, tuple[str, ...]]]:
    """Arrays of a quantized weight by name, and their logical axes."""
    found = {
        "codes": (value.codes, value.codes_axes),
        "scales": (value.scales, value.scales_axes),
    }
    if value.zeros is not None:
        found["zeros"] = value.zeros, value.scales_axes
    return found


def of_arrays(
    found: Mapping[str, tuple[jax.Array, tuple[str, ...]]], summed: tuple[int, ...], kind: Kind
) -> Quantized:
    """Return the inverse of `arrays`; `summed` and `kind` as of `quantize`, `summed` from the
    end."""
    (codes, axes), (scales, scales_axes) = found["codes"], found["scales"]
    zeros = found["zeros"][0] if kind == "int4" else None
    return Quantized(codes, scales, zeros, axes, scales_axes, kind, summed[-1], summed)


def _dequantize(codes: jax.Array) -> jax.Array:
    """Return each code's value: a lookup in 16 as comparisons, which fuse."""
    found = jnp.full_like(codes, NF4[0], jnp.float32)
    for code in range(1, 16):
        found = jnp.where(codes == code, float(NF4[code]), found)
    return found


def _parts(x: jax.Array) -> list[Any]:
    """Mesh axes of each dimension."""
    if jax.sharding.get_abstract_mesh().empty:
        return [None] * x.ndim
    return list(jax.typeof(x).sharding.spec)


def _split(x: jax.Array, dim: int, size: int, parts: list[Any]) -> jax.Array:
    """[.., n, ..] -> [.., n / size, size, ..]; the first keeps the sharding of `dim`."""
    shape = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    return reshape(x, shape, [*parts[: dim + 1], None, *parts[dim + 1 :]])


def _join(x: jax.Array, dim: int, parts: list[Any]) -> jax.Array:
    """Return the inverse of `_split`."""
    return reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]), parts)
