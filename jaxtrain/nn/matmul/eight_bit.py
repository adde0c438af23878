"""Float8 and int8 matmuls, and the models, platforms and chips that support them.

Float8: activations and weights are e4m3, gradients e5m2 (arXiv 2209.05433): 3 and 2 bits after the
leading one. A tensor is divided by its largest magnitude over the format's before rounding
("current scaling"), and the result is multiplied back.

Int8: the forward matmul and the activation's gradient have int8 operands and int32 sums. The
weight's gradient stays in the dtype of the activations: its sum runs over all tokens, and rounding
harms it more the longer it is (SwitchBack, arXiv 2304.13013). Scaling is per row. A row is selected
by one index of the dimensions that are not contracted: a token of an activation or of a gradient,
a channel of a weight. It is divided by its largest magnitude over 127 and rounded to the nearest,
ties to even.

There is no state between steps.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.nn.matmul.contract import contraction, sides, spec_of
from jaxtrain.nn.remat import PRODUCT
from jaxtrain.parallel.sharding import current_layout, on_each_device, parts_of, without

# Formats that grouped matmuls of experts support; the others are rejected.
_OF_EXPERTS = ("compute", "float8")

# Words in the `jax.Device.device_kind` of chips that multiply a format faster than bfloat16:
# NVIDIA's data sheets (float8 from compute capability 8.9 on; int8 from Ampere on, except
# Blackwell Ultra, which has almost no int8); for TPUs the sources in `parallel.chips`.
_FASTER = {
    "float8": {
        "H20", "H100", "H200", "GH200", "B100", "B200", "B300", "GB200", "GB300", "L4", "L40",
        "L40S", "TPU7x",
    },
    "int8": {
        "A10", "A30", "A40", "A100", "H20", "H100", "H200", "GH200", "B100", "B200", "GB200", "L4",
        "L40", "L40S", "v5", "v5e", "v5p", "v6", "v6e",
    },
}  # fmt: skip
_EXAMPLES = {
    "float8": "H100, H200, B200, L40 and TPU7x",
    "int8": "TPU v5e, v5p and v6e, A100, H100, H200, B200 and L40",
}


def validate(
    matmul: str,
    *,
    platform: str | None,
    device_kind: str | None,
    model: str,
    experts: bool,
    recurrent: bool,
) -> Iterator[str]:
    """Yield each reason why matmuls cannot be computed in the format `matmul`.

    Args:
      matmul: Precision.matmul.
      platform: 'cpu', 'gpu' or 'tpu', None if unknown; a CPU computes the same values,
        for tests and `verify`.
      device_kind: JAX's name of the device; None if it does not matter.
      model: the model's name, for the message.
      experts: whether it has experts.
      recurrent: whether its layers carry a state along the sequence.
    """
    if matmul == "compute":
        return
    setting, way_out = f"Precision.matmul={matmul!r}", "use Precision.matmul='compute'"
    if experts and matmul not in _OF_EXPERTS:
        yield (f"{setting} for {model}: experts' grouped matmuls have no {matmul} form; {way_out}")
    if recurrent:
        yield (
            f"{setting} for {model}: the matmul at each time step of a recurrent layer has no "
            f"{matmul} form; {way_out}"
        )
    if platform == "cpu" or device_kind is None:
        return
    if not _FASTER[matmul] & set(device_kind.replace("-", " ").split()):
        yield (
            f"{setting} on {device_kind!r}, which is not known to multiply {matmul} faster than "
            f"bfloat16 ({_EXAMPLES[matmul]} are); {way_out}"
        )


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Lower bound of the largest element, so that 1 / scale is finite.
_SMALLEST = 2.0**-100


def over_batch() -> tuple[str, ...]:
    """Return the manual mesh axes that split a tensor with one scale."""
    layout = current_layout()
    return () if layout is None else tuple(sorted(layout.one_batch))


def quantize_float8(
    x: jax.Array, dtype: jnp.dtype, over: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """x / scale in a float8 dtype, and the scale: its largest magnitude over the format's.

    The maximum is over the whole array, however it is split. Nonfinite elements become NaN.

    Args:
      x: the array, or the local part of it.
      dtype: of the result.
      over: from `over_batch`.
    """
    largest, found = float(jnp.finfo(dtype).max), jnp.max(jnp.abs(x)).astype(jnp.float32)
    if over:
        found = jax.lax.pmax(found, over)
    scale = jnp.maximum(found, _SMALLEST) / largest
    # The quotient may round to just above the maximum, and e4m3 has no infinity.
    scaled = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest)
    return scaled.astype(dtype), scale


def bits_of(x8: jax.Array) -> jax.Array:
    """Return the bits of an e4m3 activation, to be saved.

    `jax.checkpoint` rounds saved values with reduce_precision, which has an infinity where e4m3 has
    the values from 256 to 448.
    """
    return jax.lax.bitcast_convert_type(x8, jnp.uint8)


def of_bits(bits: jax.Array) -> jax.Array:
    """Return the e4m3 activation of these bits."""
    return jax.lax.bitcast_convert_type(bits, E4M3)


def float8_einsum(
    equation: str, x: jax.Array, weight: jax.Array, out_sharding: P | None
) -> jax.Array:
    """Einsum with float8 operands, also in both gradients; an `Einsum`."""
    left, right, result = sides(equation)
    dtype, of_x, of_weight = x.dtype, spec_of(x), spec_of(weight)
    over = over_batch()

    def product(equation: str, a: tuple, b: tuple, spec: P | None) -> jax.Array:
        (a, a_scale), (b, b_scale) = a, b
        # Accumulates in float32; sums between devices are in the dtype of the activations.
        y = contraction(equation, a, b, dtype, spec)
        return (y.astype(jnp.float32) * (a_scale * b_scale)).astype(dtype)

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        return forward(x, weight)[0]

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        x8, scale = quantize_float8(x, E4M3, over)
        y = product(equation, (x8, scale), quantize_float8(weight, E4M3), out_sharding)
        # The weight itself is saved, and rounded again: it is gathered again like others.
        return y, (bits_of(x8), scale, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits, scale, weight = kept
        x8, g8 = (of_bits(bits), scale), quantize_float8(gradient, E5M2, over)
        of_activation = product(
            f"{result},{right}->{left}", g8, quantize_float8(weight, E4M3), of_x
        )
        return of_activation, product(f"{left},{result}->{right}", x8, g8, of_weight)

    run.defvjp(forward, backward)
    return run(x, weight)


LARGEST = 127  # -128 has no positive counterpart
# Number of terms whose sum always fits into int32.
_MOST_TERMS = (2**31 - 1) // LARGEST**2


def quantize_int8(x: jax.Array, summed: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """x / scale in int8, and the scales: the largest magnitude of each row over 127.

    The maximum is over the whole row, however it is split. The scale of a row with nonfinite
    elements is not finite.

    Args:
      x: the array.
      summed: the contracted dimensions. The float32 scales have the others.
    """
    largest = jnp.max(jnp.abs(x), axis=tuple(summed), keepdims=True).astype(jnp.float32)
    scale = jnp.maximum(largest, _SMALLEST) / LARGEST
    rounded = jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)
    return rounded, jnp.squeeze(scale, tuple(summed))


def int8_einsum(
    equation: str, x: jax.Array, weight: jax.Array, out_sharding: P | None
) -> jax.Array:
    """Einsum with int8 operands, also in the gradient of x; an `Einsum`.

    Raises:
      UserError: int32 cannot hold the sums.
    """
    left, right, result = sides(equation)
    of_x, of_weight = spec_of(x), spec_of(weight)

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        return forward(x, weight)[0]

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        # Named, since the int32 sums before it are larger. Both operands are rounded again in the
        # backward pass, where their rows differ.
        y = _product(equation, *_meet(equation, x, weight, out_sharding), out_sharding)
        return checkpoint_name(y, PRODUCT), (x, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, weight = kept
        by_x = f"{result},{right}->{left}"
        # Both matmuls need the gradient sharded like this, so it is gathered once.
        gradient, weight, axes = _meet(by_x, gradient, weight, of_x)
        of_activation = _product(by_x, gradient, weight, axes, of_x)
        by_weight = f"{left},{result}->{right}"
        return of_activation, jnp.einsum(by_weight, x, gradient, out_sharding=of_weight)

    run.defvjp(forward, backward)
    return run(x, weight)


def _meet(
    equation: str, a: jax.Array, b: jax.Array, spec: P | None
) -> tuple[jax.Array, jax.Array, tuple[str, ...]]:
    """Reshard operands for a matmul with this output spec; return also the mesh axes of partial
    sums.

    Contracted dimensions are split alike, or gathered; the others are sharded like the result.
    """
    if spec is None:
        return a, b, ()
    left, right, result = sides(equation)
    of_a, of_b = (
        dict(zip(side, jax.typeof(x).sharding.spec, strict=True))
        for side, x in ((left, a), (right, b))
    )
    summed = [letter for letter in left if letter in right]
    parts = {letter: of_a[letter] for letter in summed if of_a[letter] == of_b[letter]}
    axes = tuple(name for part in parts.values() for name in parts_of(part))
    parts |= {letter: without(part, axes) for letter, part in zip(result, spec, strict=True)}
    a, b = (
        jax.sharding.reshard(x, P(*(parts.get(letter) for letter in side)))
        for side, x in ((left, a), (right, b))
    )
    return a, b, axes


def _product(
    equation: str, a: jax.Array, b: jax.Array, axes: tuple[str, ...], spec: P | None
) -> jax.Array:
    """einsum(equation, a, b) of operands in int8, in a's dtype, after `_rendezvous`."""
    left, right, result = sides(equation)
    summed = [letter for letter in left if letter in right]
    of_a, of_b = ([side.index(letter) for letter in summed] for side in (left, right))
    terms, dtype = math.prod(a.shape[i] for i in of_a), a.dtype
    if terms > _MOST_TERMS:
        raise UserError(
            f"Precision.matmul='int8': int32 holds the sum of {_MOST_TERMS:,} products, and "
            f"{equation!r} adds up {terms:,}; use Precision.matmul='compute'"
        )
    (a, a_scale), (b, b_scale) = quantize_int8(a, of_a), quantize_int8(b, of_b)
    a_scale, b_scale = _along(left, a_scale, result), _along(right, b_scale, result)

    def multiply(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
        sums = contraction(equation, a, b, jnp.int32)
        return (sums.astype(jnp.float32) * a_scale * b_scale).astype(dtype)

    operands = (a, b, a_scale, b_scale)
    if spec is None or not axes:
        return multiply(*operands)

    def partial_sums(*shards: jax.Array) -> jax.Array:
        # Cast before the reduction: int32 would be twice bfloat16's bytes between devices.
        return _sum_into(spec, axes, multiply(*shards))

    return on_each_device(partial_sums, tuple(spec_of(x) for x in operands), spec)(*operands)


def _along(letters: str, scale: jax.Array, result: str) -> jax.Array:
    """Return the scales of an operand with these letters, in as many dimensions as the result
    has."""
    letters = "".join(letter for letter in letters if letter in result)
    order = sorted(range(len(letters)), key=lambda i: result.index(letters[i]))
    absent = [i for i, letter in enumerate(result) if letter not in letters]
    return jnp.expand_dims(jnp.transpose(scale, order), absent)


def _sum_into(spec: P, axes: Sequence[str], x: jax.Array) -> jax.Array:
    """Reduce-scatter over mesh axes along the dimensions that the spec splits over them.

    These axes must be the innermost of a dimension.
    """
    whole = list(axes)
    for dim, part in enumerate(spec):
        scattered = tuple(name for name in parts_of(part) if name in axes)
        if not scattered:
            continue
        assert parts_of(part)[-len(scattered) :] == scattered, (spec, axes)
        x = jax.lax.psum_scatter(x, scattered, scatter_dimension=dim, tiled=True)
        whole = [name for name in whole if name not in scattered]
    return jax.lax.psum(x, tuple(whole)) if whole else x
