"""Products of activations and weights in float8, each tensor scaled by its own largest element.

Activations and weights are e4m3, gradients e5m2 (arXiv 2209.05433): 3 and 2 bits behind the leading
one. A tensor is divided by its largest magnitude over the format's before it is rounded ("current
scaling"), and the product multiplied back; nothing is remembered from step to step.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# A smaller largest element counts as this, so that 1 / scale is a number.
_SMALLEST = 2.0**-100

# Words in the `jax.Device.device_kind` of what has float8 units: NVIDIA's data sheets of Hopper,
# Ada and Blackwell (compute capability 8.9 and up); Google's documentation of TPU7x.
_HAVE_UNITS = {
    "H20", "H100", "H200", "GH200", "B100", "B200", "B300", "GB200", "GB300", "L4", "L40", "L40S",
    "TPU7x",
}  # fmt: skip

_ACTIVE: contextvars.ContextVar[bool] = contextvars.ContextVar("float8", default=False)


@contextlib.contextmanager
def float8_products(active: bool) -> Iterator[None]:
    """Whether `weight_product` computes in float8 within."""
    token = _ACTIVE.set(active)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def in_float8() -> bool:
    """Whether products are computed in float8 in the code being traced."""
    return _ACTIVE.get()


def weight_product(
    equation: str, x: jax.Array, weight: jax.Array, out_sharding: P | None = None
) -> jax.Array:
    """einsum of an activation and a weight of one dtype, in the precision asked for.

    Args:
      equation: over (x, weight); every letter of one is in the other or in the result.
      x: the activation.
      weight: the weight.
      out_sharding: of the result, where the contraction runs over a sharded dimension.
    """
    if _ACTIVE.get():
        return _float8_einsum(equation, x, weight, out_sharding)
    return jnp.einsum(equation, x, weight, out_sharding=out_sharding)


def refuse_float8(matmul: str, platform: str, device_kind: str | None, model: Any) -> Iterator[str]:
    """A sentence for each reason why products cannot be computed as `matmul` says.

    Args:
      matmul: Precision.matmul.
      platform: 'cpu', 'gpu' or 'tpu'; a CPU emulates float8 exactly, for tests and `verify`.
      device_kind: what JAX calls the device; None where it does not matter.
      model: the model's settings.
    """
    if matmul != "float8":
        return
    if hasattr(model, "num_experts"):
        yield (
            f"Precision.matmul='float8' for {type(model).__name__}: experts' grouped products have "
            "no float8 form; use Precision.matmul='compute'"
        )
    if hasattr(model, "empty_state"):
        yield (
            f"Precision.matmul='float8' for {type(model).__name__}: the product at each place of a "
            "recurrent layer has no float8 form; use Precision.matmul='compute'"
        )
    if platform == "cpu" or device_kind is None:
        return
    if not _HAVE_UNITS & set(device_kind.replace("-", " ").split()):
        yield (
            f"Precision.matmul='float8' on {device_kind!r}, which has no float8 units that "
            "jaxtrain knows of (H100, H200, B200, L40 and TPU7x have); use "
            "Precision.matmul='compute'"
        )


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x / scale in a float8 dtype, and the scale: its largest magnitude over the format's.

    The maximum runs over the whole array, however it is split. What is not finite becomes NaN.
    """
    largest = float(jnp.finfo(dtype).max)
    scale = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), _SMALLEST) / largest
    # The quotient may round to just above the largest, which e4m3 has no infinity for.
    scaled = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest)
    return scaled.astype(dtype), scale


def _float8_einsum(
    equation: str, x: jax.Array, weight: jax.Array, out_sharding: P | None
) -> jax.Array:
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    dtype, of_x, of_weight = x.dtype, _spec(x), _spec(weight)

    def product(equation: str, a: tuple, b: tuple, spec: P | None) -> jax.Array:
        (a, a_scale), (b, b_scale) = a, b
        # Sums in float32 within the product; between devices in the dtype of the activations.
        y = _contract(equation, a, b, dtype, spec)
        return (y.astype(jnp.float32) * (a_scale * b_scale)).astype(dtype)

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        return forward(x, weight)[0]

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        x8, scale = quantize(x, E4M3)
        y = product(equation, (x8, scale), quantize(weight, E4M3), out_sharding)
        # The weight itself is kept, and rounded again: it is gathered again where others are. The
        # activation is kept as bits: `jax.checkpoint` rounds what is kept with reduce_precision,
        # which has an infinity where e4m3 has the numbers from 256 to 448.
        return y, (jax.lax.bitcast_convert_type(x8, jnp.uint8), scale, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits, scale, weight = kept
        x8 = jax.lax.bitcast_convert_type(bits, E4M3), scale
        g8 = quantize(gradient, E5M2)
        of_activation = product(f"{result},{right}->{left}", g8, quantize(weight, E4M3), of_x)
        return of_activation, product(f"{left},{result}->{right}", x8, g8, of_weight)

    run.defvjp(forward, backward)
    return run(x, weight)


def _spec(x: jax.Array) -> P | None:
    sharding = jax.typeof(x).sharding
    return None if sharding.mesh.empty else sharding.spec


def _contract(
    equation: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype, spec: P | None
) -> jax.Array:
    """einsum without batch dimensions of two float8 formats, which `jnp.einsum` would promote."""
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    summed = [letter for letter in left if letter in right]
    assert not set(summed) & set(result), "a batch dimension"
    of_a, of_b = ([side.index(letter) for letter in summed] for side in (left, right))
    free = "".join(letter for letter in left + right if letter not in summed)
    order = [free.index(letter) for letter in result]
    if spec is not None:
        spec = P(*(spec[result.index(letter)] for letter in free))
    y = jax.lax.dot_general(
        a, b, ((of_a, of_b), ((), ())), preferred_element_type=dtype, out_sharding=spec
    )
    return jnp.transpose(y, order)
