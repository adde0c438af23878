"""Convolutions and pooling over images, with gradients in forms that compilers handle well.

A signal is convolved like an image, along its one dimension.
Letters: B batch, H height, W width, C channels in, D channels out, S size of the kernel.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import current_layout

# By the number of dimensions: signals, images.
_ORDER = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC")}
# Of the patches of one tile: what fits in a core's L2 cache together with the gradient.
_TILE_BYTES = 5 * 2**19
Kept = tuple[jax.Array, jax.Array]


def convolution(
    x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: int | None = None
) -> jax.Array:
    """Convolve x with a kernel [S, S, C, D]; D is sharded like the kernel's.

    Args:
      x_BHWC: images, not split along C; or signals [B, W, C].
      kernel: the kernel; for signals [S, C, D].
      stride: the stride, in pixels.
      padding: pixels of zeros on every side, as in PyTorch (JAX's "SAME" pads a strided
        convolution on one side only); None is S // 2.
    """
    if padding is None:
        padding = kernel.shape[0] // 2
    if _is_small(x_BHWC, kernel):
        return _multiply_patches(x_BHWC, kernel, stride, padding)
    if (
        _columns_folded(x_BHWC, kernel, stride) > 1
        or _images_of_a_tile(x_BHWC, kernel, stride, padding)
        or _is_larger_than_images(kernel, x_BHWC, stride, padding)
    ):
        return _convolve_on_cpu(x_BHWC, kernel, stride, padding)
    return _convolve(x_BHWC, kernel, stride, padding)


def _convolve(
    x_BHWC: jax.Array, kernel: jax.Array, stride: int = 1, padding: int | None = None
) -> jax.Array:
    border = kernel.shape[0] // 2 if padding is None else padding
    of_x, of_kernel = jax.typeof(x_BHWC).sharding, jax.typeof(kernel).sharding
    out, along = None, x_BHWC.ndim - 2
    if not of_kernel.mesh.empty and of_kernel.spec[-1] is not None:
        out = P(of_x.spec[0], *[None] * along, of_kernel.spec[-1])
    return lax.conv_general_dilated(
        x_BHWC, kernel, (stride,) * along, [(border, border)] * along,
        dimension_numbers=_ORDER[x_BHWC.ndim], out_sharding=out,
    )  # fmt: skip


def _is_one_cpu() -> bool:
    """Whether the program is for one CPU device, where the forms below are faster in XLA."""
    layout = current_layout()
    alone = layout is None or layout.mesh.size == 1
    return alone and platform_of(jax.sharding.get_abstract_mesh()) == "cpu"


def _is_small(x_BHWC: jax.Array, kernel: jax.Array) -> bool:
    """Whether images are hardly larger than the kernel, where XLA's CPU convolution is slow.

    Of 32 images of 2 x 2 x 512 and a kernel of 3 x 3 x 512 x 512 it takes 1,070 ms forward and
    backward, as patches 19 ms; at 4 x 4 88 and 71 ms, at 8 x 8 it is as fast or faster
    (benchmarks/history/cpu.md).
    """
    if x_BHWC.ndim != 4 or x_BHWC.dtype != jnp.float32 or kernel.shape[0] == 1:
        return False
    return max(x_BHWC.shape[1:3]) <= kernel.shape[0] + 1 and _is_one_cpu()


def _multiply_patches(x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """As `_convolve`, by one matmul of the patches under the kernel (im2col).

    Its gradients, as JAX derives them, are two matmuls.
    """
    S, _, C, D = kernel.shape
    patches_BHWP = _patches(x_BHWC, S, stride, padding)
    product = patches_BHWP.reshape(-1, S * S * C) @ kernel.reshape(-1, D)
    return product.reshape(*patches_BHWP.shape[:3], D)


def _patches(x_BHWC: jax.Array, S: int, stride: int, padding: int) -> jax.Array:
    """The pixels under a kernel at each of its positions, one after the other: [B, H, W, S S C]."""
    H, W = (pool_output_size(side, S, stride, padding) for side in x_BHWC.shape[1:3])
    border = (padding, padding)
    padded = jnp.pad(x_BHWC, ((0, 0), border, border, (0, 0)))
    high, wide = stride * (H - 1) + 1, stride * (W - 1) + 1
    shifted = [
        padded[:, i : i + high : stride, j : j + wide : stride]
        for i, j in itertools.product(range(S), range(S))
    ]
    return jnp.concatenate(shifted, -1)


def _columns_folded(x_BHWC: jax.Array, kernel: jax.Array, stride: int) -> int:
    """Columns of an image that are convolved as one pixel; 1 where XLA's convolution is faster.

    XLA's for CPUs is slow where pixels have few channels. Of 128 images of 32 x 32 x 3 and a kernel
    of 5 x 5 x 3 x 6 it takes 17 ms, as rows of 8 pixels with 12 channels 3 ms; from 16 channels
    to 16 folding gains nothing (benchmarks/history/cpu.md).
    """
    if x_BHWC.ndim != 4 or x_BHWC.dtype != jnp.float32 or kernel.shape[0] == 1 or stride > 1:
        return 1
    channels = kernel.shape[2] * kernel.shape[3]
    columns = 4 if channels <= 64 else 2
    return columns if channels <= 192 and _is_one_cpu() else 1


def _fold_columns(x_BHWC: jax.Array, kernel: jax.Array, padding: int, columns: int) -> jax.Array:
    """As `_convolve` with stride 1, on pixels that have the channels of several columns.

    The kernel for them has the original once for each of the columns, among zeros.
    """
    S, _, C, D = kernel.shape
    B, H, W, _ = x_BHWC.shape
    width = -(-(columns - 1 + S) // columns)
    placed = [
        jnp.pad(kernel, ((0, 0), (i, width * columns - S - i), (0, 0), (0, 0)))
        for i in range(columns)
    ]
    groups_out = -(-pool_output_size(W, S, 1, padding) // columns)
    groups = groups_out + width - 1
    edges = (padding, groups * columns - W - padding)
    x_BHGC = jnp.pad(x_BHWC, ((0, 0), (0, 0), edges, (0, 0)))
    y_BHGD = lax.conv_general_dilated(
        x_BHGC.reshape(B, H, groups, columns * C),
        jnp.stack(placed, 3).reshape(S, width, columns * C, columns * D),
        (1, 1), [(padding, padding), (0, 0)], dimension_numbers=_ORDER[4],
    )  # fmt: skip
    y_BHWD = y_BHGD.reshape(B, y_BHGD.shape[1], groups_out * columns, D)
    return y_BHWD[:, :, : pool_output_size(W, S, 1, padding)]


def _images_of_a_tile(x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: int) -> int:
    """Images per tile of `_sum_over_tiles`; 0 where JAX's own gradient is faster.

    XLA's for CPUs is a convolution over the batch, for which it transposes both activations so that
    images come last. With few channels that is a quarter of a small ResNet's step, and with a
    stride another sixth; with more than 32 the patches of a tile take longer to write
    (benchmarks/history/cpu.md).
    """
    if x_BHWC.ndim == 3 or x_BHWC.dtype != jnp.float32 or not _is_one_cpu():
        return 0
    S = kernel.shape[0]
    if S % 2 == 0 or padding != S // 2 or S == stride == 1:
        return 0
    images, H, W, C = x_BHWC.shape
    if C > 32 and S > 1:
        return 0
    patches = 4 * S**2 * C * -(-H // stride) * -(-W // stride)
    fitting = [n for n in range(1, images + 1) if images % n == 0 and n * patches <= _TILE_BYTES]
    return max(fitting, default=0)


def _is_larger_than_images(kernel: jax.Array, x_BHWC: jax.Array, stride: int, padding: int) -> bool:
    """Whether a kernel has more elements than the images and the results.

    JAX's gradient of x is a convolution with the kernel flipped and transposed, which XLA for CPUs
    does in one strided loop: for 8 images of 7 x 7 x 512 and a kernel of 3 x 3 x 512 x 512 that is
    9.7 of 24.3 ms (benchmarks/history/cpu.md). The gradient of a matmul of patches (im2col) reads
    the kernel in its own layout.
    """
    if x_BHWC.ndim != 4 or x_BHWC.dtype != jnp.float32 or not _is_one_cpu():
        return False
    S, _, _, D = kernel.shape
    B, *sides, _ = x_BHWC.shape
    H, W = (pool_output_size(side, S, stride, padding) for side in sides)
    return S > 1 and kernel.size >= x_BHWC.size + B * H * W * D


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve_on_cpu(x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """As `_convolve`: forward and the gradient of x with folded columns where that is faster, or
    the gradient of x by patches; the gradient of the kernel by tiles of images.
    """
    columns = _columns_folded(x_BHWC, kernel, stride)
    if columns > 1:
        return _fold_columns(x_BHWC, kernel, padding, columns)
    return _convolve(x_BHWC, kernel, stride, padding)


def _forward(
    x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: int
) -> tuple[jax.Array, Kept]:
    return _convolve_on_cpu(x_BHWC, kernel, stride, padding), (x_BHWC, kernel)


def _backward(stride: int, padding: int, kept: Kept, gradient_BHWD: jax.Array) -> Kept:
    x_BHWC, kernel = kept
    form = _convolve_on_cpu.fun
    if _is_larger_than_images(kernel, x_BHWC, stride, padding):
        form = _multiply_patches
    of_x = jax.vjp(lambda x: form(x, kernel, stride, padding), x_BHWC)[1](gradient_BHWD)[0]
    if images := _images_of_a_tile(x_BHWC, kernel, stride, padding):
        return of_x, _sum_over_tiles(images, x_BHWC, gradient_BHWD, kernel, stride)
    convolve = functools.partial(_convolve, x_BHWC, stride=stride, padding=padding)
    return of_x, jax.vjp(convolve, kernel)[1](gradient_BHWD)[0]


_convolve_on_cpu.defvjp(_forward, _backward)


def _sum_over_tiles(
    images: int, x_BHWC: jax.Array, gradient_BHWD: jax.Array, kernel: jax.Array, stride: int
) -> jax.Array:
    """Gradient of the kernel: of each tile its patches times its gradient, without transposes."""
    S, _, C, D = kernel.shape
    tiles = len(x_BHWC) // images

    def add(total_DP: jax.Array, tile: Kept) -> tuple[jax.Array, None]:
        x, gradient = tile
        patches_RP = _patches(x, S, stride, S // 2).reshape(-1, S * S * C)
        return total_DP + gradient.reshape(-1, D).T @ patches_RP, None

    def split(a: jax.Array) -> jax.Array:
        return a.reshape(tiles, images, *a.shape[1:])

    zero = jnp.zeros((D, S * S * C), kernel.dtype)
    total_DP, _ = lax.scan(add, zero, (split(x_BHWC), split(gradient_BHWD)))
    return total_DP.T.reshape(kernel.shape)


# -- pooling -------------------------------------------------------------------------------------


class Window(NamedTuple):
    """Pooling window.

    Attributes:
      size: size of the window.
      stride: the stride, in pixels.
      rows, columns: padding before and after the image.
    """

    size: int
    stride: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def pool_output_size(
    side: int, size: int, stride: int, padding: int = 0, *, ceil: bool = False
) -> int:
    """Output size of a side; `ceil` lets the last window reach over the edge."""
    free = side + 2 * padding - size
    if not ceil:
        return free // stride + 1
    pooled = -(-free // stride) + 1
    # As in PyTorch's ceil_mode: a window that begins after the image is dropped.
    return pooled - ((pooled - 1) * stride >= side + padding)


def max_pool(
    x_BHWC: jax.Array, size: int = 3, stride: int = 2, padding: int = 1, *, ceil: bool = False
) -> jax.Array:
    """Max pooling over size x size pixels; padding is never the maximum.

    Its gradient goes to the first maximum, as in PyTorch.

    Args:
      x_BHWC: images.
      size, stride, padding, ceil: as in `pool_output_size`.
    """

    def padding_of(side: int) -> tuple[int, int]:
        pooled = pool_output_size(side, size, stride, padding, ceil=ceil)
        return padding, max((pooled - 1) * stride + size - side - padding, padding * (not ceil))

    window = Window(size, stride, padding_of(x_BHWC.shape[1]), padding_of(x_BHWC.shape[2]))
    if (
        platform_of(jax.sharding.get_abstract_mesh()) == "tpu"
    ):  # has an instruction for both directions
        return _pool(x_BHWC, window)
    return _pool_by_index(x_BHWC, window)


def _pool(x_BHWC: jax.Array, window: Window) -> jax.Array:
    size, stride, rows, columns = window
    border = ((0, 0), rows, columns, (0, 0))
    return lax.reduce_window(
        x_BHWC, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), border
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pool_by_index(x_BHWC: jax.Array, window: Window) -> jax.Array:
    """As `_pool`; JAX's gradient scatters into the image, on GPUs by atomic additions."""
    return _pool(x_BHWC, window)


def _pool_forward(
    x_BHWC: jax.Array, window: Window
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the result, and the index in the window of each maximum; an x without channels."""
    size, stride, rows, columns = window
    padded = jnp.pad(x_BHWC, ((0, 0), rows, columns, (0, 0)), constant_values=-jnp.inf)
    last_h, last_w = (padded.shape[i] - size + 1 for i in (1, 2))
    windows = [padded[:, i : i + last_h : stride, j : j + last_w : stride]
             for i in range(size) for j in range(size)]  # fmt: skip
    largest, index = windows[0], jnp.zeros(windows[0].shape, jnp.uint8)
    for k, pixel in enumerate(windows[1:], 1):
        index = jnp.where(pixel > largest, jnp.uint8(k), index)
        largest = jnp.maximum(largest, pixel)
    return largest, (index, x_BHWC[:, :, :, :0])


def _pool_backward(
    window: Window, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array]:
    """Send each gradient to the pixel of its maximum."""
    index, like = kept
    if _is_one_cpu():
        return (_gather_gradients(window, index, like.shape[1:3], gradient),)
    return (_scatter_gradients(window, index, like.shape[1:3], gradient),)


def _scatter_gradients(
    window: Window, index: jax.Array, sides: tuple[int, ...], gradient: jax.Array
) -> jax.Array:
    """Return the elements of the window, each over the whole image, in one pass."""
    size, stride, rows, columns = window
    H, W = sides

    def scatter(k: int) -> jax.Array:
        def edges(offset: int, side: int, pooled: int) -> tuple[int, int, int]:
            return offset, side - offset - (stride * (pooled - 1) + 1), stride - 1

        here = jnp.where(index == k, gradient.astype(jnp.float32), 0.0)
        high = edges(k // size - rows[0], H, index.shape[1])
        wide = edges(k % size - columns[0], W, index.shape[2])
        return lax.pad(here, jnp.float32(0), ((0, 0, 0), high, wide, (0, 0, 0)))

    total = sum((scatter(k) for k in range(1, size * size)), scatter(0))
    return total.astype(gradient.dtype)


def _gather_gradients(
    window: Window, index: jax.Array, sides: tuple[int, ...], gradient: jax.Array
) -> jax.Array:
    """As `_scatter_gradients`: each pixel adds the gradients of the windows that have it.

    XLA for CPUs writes each padded array of `_scatter_gradients` to memory and computes the index
    again for each. Here pixels of the same row and column modulo the stride, which have the same
    places in their windows, are one loop over gradients and index (benchmarks/history/cpu.md).
    """
    size, stride, rows, columns = window
    B, P, Q, C = index.shape
    # Windows that have a pixel, along one side; rows and columns of windows that reach the image.
    reach = -(-size // stride)
    H, W = (-(-(side + at[0]) // stride) for side, at in zip(sides, (rows, columns), strict=True))
    border = ((0, 0, 0), (reach - 1, H - P, 0), (reach - 1, W - Q, 0), (0, 0, 0))
    around = lax.pad(gradient.astype(jnp.float32), jnp.float32(0), border)
    index = lax.pad(index, jnp.uint8(0), border)
    # Else XLA computes both again for every pixel of a window.
    around, index = lax.optimization_barrier((around, index))

    def add(row: int, column: int) -> jax.Array:
        total = jnp.zeros((B, H, W, C), jnp.float32)
        for i, j in itertools.product(range(reach), range(reach)):
            high, wide = row + i * stride, column + j * stride
            if high < size and wide < size:
                top, left = reach - 1 - i, reach - 1 - j
                here = (slice(None), slice(top, top + H), slice(left, left + W))
                total += jnp.where(index[here] == high * size + wide, around[here], 0.0)
        return total

    phases = [jnp.stack([add(i, j) for j in range(stride)], 3) for i in range(stride)]
    whole = jnp.stack(phases, 2).reshape(B, H * stride, W * stride, C)
    inside = (slice(at, at + side) for side, (at, _) in zip(sides, (rows, columns), strict=True))
    return whole[(slice(None), *inside)].astype(gradient.dtype)


_pool_by_index.defvjp(_pool_forward, _pool_backward)


def average_pool(x_BHWC: jax.Array, size: int, stride: int) -> jax.Array:
    """Mean pooling over size x size pixels, in float32."""
    rows, columns = (pool_output_size(side, size, stride) for side in x_BHWC.shape[1:3])
    total = jnp.zeros((), jnp.float32)
    for i, j in itertools.product(range(size), range(size)):
        last_h, last_w = i + (rows - 1) * stride + 1, j + (columns - 1) * stride + 1
        total = total + x_BHWC[:, i:last_h:stride, j:last_w:stride].astype(jnp.float32)
    return (total / size**2).astype(x_BHWC.dtype)


def pool_to(x_BHWC: jax.Array, side: int) -> jax.Array:
    """Adaptive mean pooling to side x side, in float32.

    Part i of n pixels spans floor(i n / side) to ceil((i + 1) n / side), as in PyTorch's
    AdaptiveAvgPool2d: smaller images have pixels in several parts.
    """
    if x_BHWC.shape[1:3] == (side, side):
        return x_BHWC

    def parts(size: int) -> jax.Array:
        index, part = np.arange(size), np.arange(side)[:, None]
        here = (index >= part * size // side) & (index < -(-(part + 1) * size // side))
        return jnp.asarray(here / here.sum(1, keepdims=True), jnp.float32)

    _, H, W, _ = x_BHWC.shape
    x_BHWC32 = x_BHWC.astype(jnp.float32)
    pooled = jnp.einsum("BHWC,hH,wW->BhwC", x_BHWC32, parts(H), parts(W))
    return pooled.astype(x_BHWC.dtype)
