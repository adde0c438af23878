"""Convolutions and pooling over images, their gradients in the forms that compilers do well.

Letters: B batch, H height, W width, C channels in, D channels out, S size of the kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import current_layout

_ORDER = ("NHWC", "HWIO", "NHWC")
# Of the patches of one tile: what a core's second-level cache holds beside the gradient.
_TILE_BYTES = 5 * 2**19
Kept = tuple[jax.Array, jax.Array]


def convolution(x_BHWC: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """x convolved with a kernel [S, S, C, D], S // 2 pixels of zeros on every side.

    PyTorch's padding: JAX's "SAME" pads a strided convolution on one side only.
    """
    if stride == 1 and _images_of_a_tile(x_BHWC, kernel):
        return _with_tiles(x_BHWC, kernel)
    return _convolved(x_BHWC, kernel, stride)


def _convolved(x_BHWC: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    padding = [(kernel.shape[0] // 2,) * 2] * 2
    return lax.conv_general_dilated(
        x_BHWC, kernel, (stride, stride), padding, dimension_numbers=_ORDER
    )


def _images_of_a_tile(x_BHWC: jax.Array, kernel: jax.Array) -> int:
    """How many images a tile of `_kernel_gradient` has; 0 where JAX's own gradient is better.

    XLA's for CPUs is a convolution over the batch, for which it turns both activations so that
    images come last: a quarter of a small ResNet's step.
    """
    layout = current_layout()
    alone = layout is None or layout.mesh.size == 1
    if not alone or platform_of(jax.sharding.get_abstract_mesh()) != "cpu":
        return 0
    if x_BHWC.dtype != jnp.float32 or kernel.shape[0] == 1 or kernel.shape[0] % 2 == 0:
        return 0
    images, *sizes = x_BHWC.shape
    patches = 4 * kernel.shape[0] ** 2 * sizes[0] * sizes[1] * sizes[2]
    fitting = [n for n in range(1, images + 1) if images % n == 0 and n * patches <= _TILE_BYTES]
    return max(fitting, default=0)


@jax.custom_vjp
def _with_tiles(x_BHWC: jax.Array, kernel: jax.Array) -> jax.Array:
    """As `_convolved`; its kernel's gradient is summed over tiles of images."""
    return _convolved(x_BHWC, kernel)


def _backward(kept: Kept, gradient_BHWD: jax.Array) -> Kept:
    x_BHWC, kernel = kept
    of_x = jax.vjp(lambda x: _convolved(x, kernel), x_BHWC)[1](gradient_BHWD)[0]
    return of_x, _kernel_gradient(x_BHWC, gradient_BHWD, kernel)


def _kernel_gradient(x_BHWC: jax.Array, gradient_BHWD: jax.Array, kernel: jax.Array) -> jax.Array:
    """Patches of a tile times its gradient, one product a tile: nothing is turned."""
    S, _, C, D = kernel.shape
    B, H, W, _ = x_BHWC.shape
    tiles = B // _images_of_a_tile(x_BHWC, kernel)
    border = (S // 2, S // 2)

    def add(total_DP: jax.Array, tile: Kept) -> tuple[jax.Array, None]:
        x, gradient = tile
        padded = jnp.pad(x, ((0, 0), border, border, (0, 0)))
        shifted = [padded[:, i : i + H, j : j + W] for i in range(S) for j in range(S)]
        patches_RP = jnp.concatenate(shifted, -1).reshape(-1, S * S * C)
        return total_DP + gradient.reshape(-1, D).T @ patches_RP, None

    def split(a: jax.Array) -> jax.Array:
        return a.reshape(tiles, B // tiles, *a.shape[1:])

    zero = jnp.zeros((D, S * S * C), kernel.dtype)
    total_DP, _ = lax.scan(add, zero, (split(x_BHWC), split(gradient_BHWD)))
    return total_DP.T.reshape(kernel.shape)


_with_tiles.defvjp(lambda x, kernel: (_convolved(x, kernel), (x, kernel)), _backward)


# -- pooling --------------------------------------------------------------------------------------


def max_pool(x_BHWC: jax.Array) -> jax.Array:
    """The largest of 3x3 pixels at stride 2, padded by one pixel on every side.

    Its gradient goes to the first pixel that is the largest, as PyTorch's does.
    """
    if platform_of(jax.sharding.get_abstract_mesh()) == "tpu":  # has an instruction for both ways
        return _pooled(x_BHWC)
    return _pooled_by_index(x_BHWC)


def _pooled(x_BHWC: jax.Array) -> jax.Array:
    border = ((0, 0), (1, 1), (1, 1), (0, 0))
    return lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), border)


@jax.custom_vjp
def _pooled_by_index(x_BHWC: jax.Array) -> jax.Array:
    """As `_pooled`; JAX's gradient scatters into the image, on GPUs by atomic additions."""
    return _pooled(x_BHWC)


def _pooled_forward(x_BHWC: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The result, and for each of its pixels which of the nine it was; an empty x for its shape."""
    padded = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    H, W = x_BHWC.shape[1:3]
    nine = [padded[:, i : i + H : 2, j : j + W : 2] for i in range(3) for j in range(3)]
    largest, index = nine[0], jnp.zeros(nine[0].shape, jnp.uint8)
    for k, pixel in enumerate(nine[1:], 1):
        index = jnp.where(pixel > largest, jnp.uint8(k), index)
        largest = jnp.maximum(largest, pixel)
    return largest, (index, x_BHWC[:, :, :, :0])


def _pooled_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    """The nine places, each spread over the image: one pass over it."""
    index, like = kept
    H, W = like.shape[1:3]

    def spread(k: int) -> jax.Array:
        def edges(offset: int, size: int, pooled: int) -> tuple[int, int, int]:
            before = offset - 1
            return before, size - before - (2 * pooled - 1), 1

        here = jnp.where(index == k, gradient.astype(jnp.float32), 0.0)
        rows, columns = edges(k // 3, H, index.shape[1]), edges(k % 3, W, index.shape[2])
        return lax.pad(here, jnp.float32(0), ((0, 0, 0), rows, columns, (0, 0, 0)))

    return (sum((spread(k) for k in range(1, 9)), spread(0)).astype(gradient.dtype),)


_pooled_by_index.defvjp(_pooled_forward, _pooled_backward)
