"""Grouped matmul on a CPU: a loop over tiles of rows, each times its expert's weights.

XLA's `ragged_dot` multiplies all rows by every expert there: E times the work. Rows are visited as
in `grouped_kernel`: a tile that several experts share once for each of them.

Letters: N rows sorted by expert, E experts, K contracted, M output,
R rows of a tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.nn.matmul.grouped_kernel import visits

# Rows of a tile: fewer do not occupy a matmul's threads, more are multiplied twice where
# experts meet (benchmarks/history/cpu.md).
ROWS = 128


def of_rows(
    x_NK: jax.Array,
    weight: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype,
    *,
    turned: bool = False,
) -> jax.Array:
    """[N, M]: as `grouped_kernel.of_rows`."""
    M, rows = weight.shape[1 if turned else 2], min(ROWS, len(x_NK))
    tiles = -(-len(x_NK) // rows)
    padded = jnp.pad(x_NK, ((0, tiles * rows - len(x_NK)), (0, 0)))

    def add(y_NM: jax.Array, first: jax.Array, own_R1: jax.Array, expert: jax.Array) -> jax.Array:
        x_RK = lax.dynamic_slice_in_dim(padded, first, rows)
        own = lax.dynamic_index_in_dim(weight, expert, keepdims=False)
        y_RM = jnp.dot(x_RK, own.T if turned else own, preferred_element_type=dtype)
        before = lax.dynamic_slice_in_dim(y_NM, first, rows)
        return lax.dynamic_update_slice_in_dim(y_NM, jnp.where(own_R1, y_RM, before), first, 0)

    y_NM = jnp.zeros((tiles * rows, M), dtype)
    return _visit(add, y_NM, sizes_E, len(x_NK), rows)[: len(x_NK)]


def of_weights(x_NK: jax.Array, y_NM: jax.Array, sizes_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[E, K, M]: as `grouped_kernel.of_weights`."""
    N, rows = len(x_NK), min(ROWS, len(x_NK))
    border = ((0, -N % rows), (0, 0))
    x_NK, y_NM = jnp.pad(x_NK, border), jnp.pad(y_NM, border)

    def add(
        total_EKM: jax.Array, first: jax.Array, own_R1: jax.Array, expert: jax.Array
    ) -> jax.Array:
        # Mask both operands of other experts' rows: zero times infinity would be NaN.
        x_RK, y_RM = (
            jnp.where(own_R1, lax.dynamic_slice_in_dim(a, first, rows), 0) for a in (x_NK, y_NM)
        )
        before_KM = lax.dynamic_index_in_dim(total_EKM, expert, keepdims=False)
        after_KM = before_KM + jnp.dot(x_RK.T, y_RM, preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(total_EKM, after_KM, expert, 0)

    zero = jnp.zeros((len(sizes_E), x_NK.shape[1], y_NM.shape[1]), jnp.float32)
    return _visit(add, zero, sizes_E, N, rows).astype(dtype)


def _visit(
    add: Callable[..., jax.Array], result: jax.Array, sizes_E: jax.Array, N: int, rows: int
) -> jax.Array:
    """`result = add(result, first row, the expert's rows [R, 1], expert)` of all visits."""

    def visit(result: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        tile, begin, end, expert = one
        first = tile * rows
        position_R = first + jnp.arange(rows, dtype=jnp.int32)
        own_R1 = ((position_R >= begin) & (position_R < end) & (expert < len(sizes_E)))[:, None]
        return add(result, first, own_R1, jnp.minimum(expert, len(sizes_E) - 1)), None

    return lax.scan(visit, result, visits(sizes_E, N, rows))[0]
