"""Grouped matmul kernel for NVIDIA GPUs (Pallas, Triton).

XLA has none for them: it gives each expert a copy of all rows, zeroed except its own, and
does E times the work (openxla/xla#40189). Here a grid point computes one tile of one
expert. Rows are visited as in MegaBlocks (arXiv 2211.15841): a tile of rows that several experts
share is visited once per expert, which writes its own rows.

Letters: N rows sorted by expert, E experts, K contracted, M output,
V visits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn.remat import OF_ROWS, OF_WEIGHTS

# Tile sizes: rows or columns, and the contraction per loop iteration.
SIDE, DEPTH = 128, 64
WARPS, STAGES = 8, 3
# Smaller sides do not fill a tensor core.
_LEAST = 16


def of_rows(
    x_NK: jax.Array,
    weight: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype,
    *,
    turned: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """[N, M]: each row times its expert's weights; zeros for rows after the last expert's.

    Args:
      x_NK: the rows.
      weight: [E, K, M], or [E, M, K] if `turned`.
      sizes_E: int32, rows of each expert, together N or fewer.
      dtype: of the result; sums are float32.
      turned: whether the last dimension of the weights is contracted.
      interpret: runs the kernel without a GPU, for tests.
    """
    E, (N, K), M = len(sizes_E), x_NK.shape, weight.shape[1 if turned else 2]
    rows, columns, depth = _side(N, SIDE), _side(M, SIDE), _side(K, DEPTH)
    x_NK = _pad(x_NK, rows, depth)
    weight = _pad(weight, *((columns, depth) if turned else (depth, columns)))
    visits_V4 = visits(sizes_E, N, rows)

    def kernel(visits_ref: Any, x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        pl, triton = _pallas()
        tile, begin, end, expert = (visits_ref[pl.program_id(1), i] for i in range(4))
        row_slice = pl.ds(tile * rows, rows)
        column = pl.ds(pl.program_id(0) * columns, columns)

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            summed = pl.ds(turn * depth, depth)
            x = triton.load(x_ref.at[row_slice, summed])
            if turned:
                return total + _product(x, triton.load(weight_ref.at[expert, column, summed]).T)
            return total + _product(x, triton.load(weight_ref.at[expert, summed, column]))

        # Rows without an expert stay zero.
        turns = jnp.where(expert < E, jnp.int32(x_ref.shape[1] // depth), jnp.int32(0))
        total = jax.lax.fori_loop(0, turns, add, jnp.zeros((rows, columns), jnp.float32))
        number = tile * rows + jnp.arange(rows)
        own = jnp.broadcast_to(((number >= begin) & (number < end))[:, None], total.shape)
        triton.store(out_ref.at[row_slice, column], total.astype(dtype), mask=own)

    out_shape = (x_NK.shape[0], weight.shape[1 if turned else 2])
    grid = (out_shape[1] // columns, len(visits_V4))
    run = _call(OF_ROWS, kernel, grid, out_shape, dtype, 2 * N * K * M, interpret)
    return run(visits_V4, x_NK, weight)[:N, :M]


def of_weights(
    x_NK: jax.Array,
    y_NM: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """[E, K, M]: the sum over each expert's rows of the products of their x and y.

    Args:
      x_NK, y_NM: the rows.
      sizes_E, dtype, interpret: as in `of_rows`.
    """
    E, (N, K), M = len(sizes_E), x_NK.shape, y_NM.shape[1]
    depth, rows, columns = _side(N, DEPTH), _side(K, SIDE), _side(M, SIDE)
    x_NK, y_NM = _pad(x_NK, depth, rows), _pad(y_NM, depth, columns)
    end_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    span_E2 = jnp.stack([end_E - sizes_E, end_E], axis=1)

    def kernel(span_ref: Any, x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        pl, triton = _pallas()
        column, row, expert = (pl.program_id(i) for i in range(3))
        row, column = pl.ds(row * rows, rows), pl.ds(column * columns, columns)
        begin, end = span_ref[expert, 0], span_ref[expert, 1]

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            number = turn * depth + jnp.arange(depth)
            own = ((number >= begin) & (number < end))[:, None]

            def load(ref: Any, side: Any, width: int) -> jax.Array:
                # Other experts' rows are not read: zero times infinity would be NaN.
                mask = jnp.broadcast_to(own, (depth, width))
                return triton.load(ref.at[pl.ds(turn * depth, depth), side], mask=mask, other=0)

            return total + _product(load(x_ref, row, rows).T, load(y_ref, column, columns))

        zeros = jnp.zeros((rows, columns), jnp.float32)
        total = jax.lax.fori_loop(begin // depth, pl.cdiv(end, depth), add, zeros)
        triton.store(out_ref.at[expert, row, column], total.astype(dtype))

    out_shape = (E, x_NK.shape[1], y_NM.shape[1])
    grid = (out_shape[2] // columns, out_shape[1] // rows, E)
    run = _call(OF_WEIGHTS, kernel, grid, out_shape, dtype, 2 * N * K * M, interpret)
    return run(span_E2, x_NK, y_NM)[:, :K, :M]


def visits(sizes_E: jax.Array, N: int, rows: int) -> jax.Array:
    """[V, 4]: each visit's tile, its first row, the row after its last, and the expert.

    Experts, and after them the rows without an expert (E), have their tiles in order. V is the
    maximum number of visits; spare ones visit the last tile with no rows.

    Args:
      sizes_E: int32, rows of each expert.
      N: rows.
      rows: of a tile.
    """
    V = -(-N // rows) + len(sizes_E)
    sizes = jnp.append(sizes_E, N - sizes_E.sum()).astype(jnp.int32)
    end = jnp.cumsum(sizes)
    begin = end - sizes
    first = begin // rows
    count = jnp.where(sizes > 0, (end - 1) // rows - first + 1, 0)
    visited = jnp.cumsum(count)
    visit = jnp.arange(V, dtype=jnp.int32)
    # The expert of this visit: the number of experts whose visits are all done.
    whose = (visit[:, None] >= visited).sum(1, dtype=jnp.int32)
    known = jnp.minimum(whose, len(sizes_E))
    tile = first[known] + visit - (visited - count)[known]
    is_one = whose < len(sizes)
    tile = jnp.where(is_one, tile, -(-N // rows) - 1)
    begin, end = (jnp.where(is_one, x[known], 0) for x in (begin, end))
    return jnp.stack([tile, begin, end, known], axis=1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.dtype.itemsize == 1:  # both float8 formats: bfloat16 represents all their values
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _side(length: int, most: int) -> int:
    """Side of a tile: a power of two that divides the length or its padded size."""
    divisor = length & -length
    if divisor >= min(most, 2 * _LEAST):
        return min(most, divisor)
    return max(_LEAST, min(most, 1 << (length - 1).bit_length()))


def _pad(x: jax.Array, *sides: int) -> jax.Array:
    """Pad the last dimensions to multiples of the tile sides."""
    sides = (*(1,) * (x.ndim - len(sides)), *sides)
    missing = [-length % side for length, side in zip(x.shape, sides, strict=True)]
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x


def _call(
    name: str,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out_shape: tuple[int, ...],
    dtype: jnp.dtype,
    flops: int,
    interpret: bool,
) -> Callable[..., jax.Array]:
    pl, triton = _pallas()
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(out_shape, dtype),
        grid=grid,
        name=name,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        # Only the expert's own rows: the others of a tile are written by other experts.
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
    )


@functools.cache
def _pallas() -> tuple[Any, Any]:
    # Importing it takes as long as the rest of JAX.
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton
