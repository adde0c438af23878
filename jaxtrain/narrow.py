"""Products of activations and weights with operands of 8 bits: asked for, computed, refused."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.float8 import float8_einsum
from jaxtrain.int8 import int8_einsum

_EINSUMS = {"float8": float8_einsum, "int8": int8_einsum}

# Words in the `jax.Device.device_kind` of what multiplies a format faster than bfloat16: NVIDIA's
# data sheets (float8 from compute capability 8.9 on; int8 from Ampere on, but for Blackwell Ultra,
# which has next to no int8); for TPUs the sources in `planning.hardware`.
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

_MATMUL: contextvars.ContextVar[str] = contextvars.ContextVar("matmul", default="compute")


@contextlib.contextmanager
def products_in(matmul: str) -> Iterator[None]:
    """What `weight_product` computes in within: a value of Precision.matmul."""
    token = _MATMUL.set(matmul)
    try:
        yield
    finally:
        _MATMUL.reset(token)


def in_8_bits() -> bool:
    """Whether the products in the code being traced have operands of 8 bits."""
    return _MATMUL.get() != "compute"


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
    if in_8_bits():
        return _EINSUMS[_MATMUL.get()](equation, x, weight, out_sharding)
    return jnp.einsum(equation, x, weight, out_sharding=out_sharding)


def refuse_matmul(matmul: str, platform: str, device_kind: str | None, model: Any) -> Iterator[str]:
    """A sentence for each reason why products cannot be computed as `matmul` says.

    Args:
      matmul: Precision.matmul.
      platform: 'cpu', 'gpu' or 'tpu'; a CPU computes the same numbers, for tests and `verify`.
      device_kind: what JAX calls the device; None where it does not matter.
      model: the model's settings.
    """
    if matmul == "compute":
        return
    setting, way_out = f"Precision.matmul={matmul!r}", "use Precision.matmul='compute'"
    if hasattr(model, "num_experts"):
        yield (
            f"{setting} for {type(model).__name__}: experts' grouped products have no {matmul} "
            f"form; {way_out}"
        )
    if hasattr(model, "empty_state"):
        yield (
            f"{setting} for {type(model).__name__}: the product at each place of a recurrent layer "
            f"has no {matmul} form; {way_out}"
        )
    if platform == "cpu" or device_kind is None:
        return
    if not _FASTER[matmul] & set(device_kind.replace("-", " ").split()):
        yield (
            f"{setting} on {device_kind!r}, which is not known to multiply {matmul} faster than "
            f"bfloat16 ({_EXAMPLES[matmul]} are); {way_out}"
        )
