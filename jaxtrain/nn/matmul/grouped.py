"""Grouped matmul of tokens with their experts' weights, also in float8.

Letters: N rows sorted by expert, E experts, S slots of each, K contracted, M
output.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers

from jaxtrain.nn.matmul import grouped_kernel, grouped_tiles
from jaxtrain.nn.matmul.eight_bit import E4M3, E5M2, bits_of, of_bits, over_batch, quantize_float8
from jaxtrain.parallel.devices import OLD_GPU

Kernel = Literal["xla", "triton", "tiles"]
# Modules of the kernels, except XLA's own.
_MODULES = {"triton": grouped_kernel, "tiles": grouped_tiles}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    """Grouped matmul with experts' weights.

    Attributes:
      float8: operands are float8 in the matmul and both its gradients (see `float8`): all experts'
        rows share one scale, and so do all experts' weights.
      kernel: 'triton' is `grouped_kernel`, on NVIDIA GPUs from Ampere on; 'tiles' is
        `grouped_tiles`, on one CPU device; 'xla' is XLA's own, which on TPUs multiplies each row
        once and elsewhere by every expert.
    """

    float8: bool = False
    kernel: Kernel = "xla"

    def __call__(
        self, x: jax.Array, weight_EKM: jax.Array, sizes_E: jax.Array | None = None
    ) -> jax.Array:
        """Multiply rows [N, K], `sizes_E` per expert, to [N, M]; without sizes [E, S, K] to [E, S,
        M]."""
        if self.float8:
            return self._in_float8(x, weight_EKM, sizes_E)
        if self.kernel == "xla" or sizes_E is None:
            return self._of_rows(x, weight_EKM, sizes_E, 1, x.dtype)
        return _by_kernel(self, x, weight_EKM, sizes_E)

    def _in_float8(self, x: jax.Array, weight: jax.Array, sizes: jax.Array | None) -> jax.Array:
        dtype, over = x.dtype, over_batch()

        def rescale(y: jax.Array, *scales: jax.Array) -> jax.Array:
            return (y.astype(jnp.float32) * scales[0] * scales[1]).astype(dtype)

        @jax.custom_vjp
        def run(x: jax.Array, weight: jax.Array, sizes: jax.Array | None) -> jax.Array:
            return forward(x, weight, sizes)[0]

        def forward(
            x: jax.Array, weight: jax.Array, sizes: jax.Array | None
        ) -> tuple[jax.Array, tuple]:
            x8, of_x = quantize_float8(x, E4M3, over)
            w8, of_weight = quantize_float8(weight, E4M3, over)
            y = rescale(self._of_rows(x8, w8, sizes, 1, dtype), of_x, of_weight)
            return y, (bits_of(x8), of_x, weight, sizes)

        def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
            bits, of_x, weight, sizes = kept
            g8, of_gradient = quantize_float8(gradient, E5M2, over)
            w8, of_weight = quantize_float8(weight, E4M3, over)
            dx = rescale(self._of_rows(g8, w8, sizes, 2, dtype), of_gradient, of_weight)
            dw = self._of_weights(of_bits(bits), g8, sizes, dtype)
            return dx, rescale(dw, of_x, of_gradient), None

        run.defvjp(forward, backward)
        return run(x, weight, sizes)

    def _of_rows(
        self,
        x: jax.Array,
        weight: jax.Array,
        sizes: jax.Array | None,
        summed: int,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """Rows times their experts' weights, contracted over this dimension of the weights."""
        if sizes is None:
            batched = (((2,), (summed,)), ((0,), (0,)))
            return jax.lax.dot_general(x, weight, batched, preferred_element_type=dtype)
        if self.kernel != "xla":
            module = _MODULES[self.kernel]
            return module.of_rows(x, weight, sizes, dtype, turned=summed == 2)
        numbers = RaggedDotDimensionNumbers((((1,), (summed,)), ((), ())), [0], [0])
        return jax.lax.ragged_dot_general(x, weight, sizes, numbers, preferred_element_type=dtype)

    def _of_weights(
        self, x: jax.Array, gradient: jax.Array, sizes: jax.Array | None, dtype: jnp.dtype
    ) -> jax.Array:
        """Return the weights' gradients [E, K, M]: sums over each expert's own rows."""
        if sizes is None:
            batched = (((1,), (1,)), ((0,), (0,)))
            return jax.lax.dot_general(x, gradient, batched, preferred_element_type=dtype)
        if self.kernel != "xla":
            return _MODULES[self.kernel].of_weights(x, gradient, sizes, dtype)
        numbers = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return jax.lax.ragged_dot_general(x, gradient, sizes, numbers, preferred_element_type=dtype)


def kernel_on(platform: str, devices: int) -> Kernel:
    """Return the kernel for N devices of a platform: 'cpu', 'gpu', `devices.OLD_GPU` or 'tpu'."""
    if platform == "gpu":
        return "triton"
    return "tiles" if platform == "cpu" and devices == 1 else "xla"


def notes(platform: str, *, experts: int, model: str) -> Iterator[str]:
    """Yield a warning if dropless experts are slower on this platform than elsewhere.

    Args:
      platform: as in `kernel_on`.
      experts: of a layer.
      model: the model's name.
    """
    if platform == OLD_GPU:
        yield (
            f"{model}.capacity_factor=None on a GPU other than NVIDIA's since Ampere: without a "
            f"kernel each of the {experts} experts multiplies all rows; with a capacity, such "
            "as 1.25, it multiplies only its own"
        )


# A kernel has no derivative of its own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(by: Grouped, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return by._of_rows(x, weight, sizes, 1, x.dtype)


def _forward(
    by: Grouped, x: jax.Array, weight: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple]:
    return _by_kernel(by, x, weight, sizes), (x, weight, sizes)


def _backward(by: Grouped, kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weight, sizes = kept
    dx = by._of_rows(gradient, weight, sizes, 2, x.dtype)
    return dx, by._of_weights(x, gradient, sizes, weight.dtype), None


_by_kernel.defvjp(_forward, _backward)
