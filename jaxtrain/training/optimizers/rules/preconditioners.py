"""Sharded Kronecker-factored preconditioners (Shampoo, SOAP).

Letters: i, k indices along the rows, j, l along the columns. Matmuls are in full float32: their
results enter roots and bases.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.sharding import logical_axes, on_each_device, reshape
from jaxtrain.training.optimizers.matrices import Sides, on_whole, sides
from jaxtrain.training.optimizers.rule import Kept

ROWS, COLUMNS = 0, 1


def of_sides(shape: tuple[int, ...], axes: tuple[str, ...], largest: int) -> list[Kept | None]:
    """Return a square matrix for either side of a parameter; None for sides longer than `largest`.

    Both are None if the parameter is not a matrix.
    """
    stack, *both = sides(axes)
    if not both[ROWS]:
        return [None, None]
    lengths = [math.prod(shape[i] for i in part) for part in both]
    stacked = tuple(shape[i] for i in stack), tuple(axes[i] for i in stack)
    return [
        Kept((*stacked[0], n, n), (*stacked[1], axes[part[0]], "side"), "float32")
        if n <= largest
        else None
        for n, part in zip(lengths, both, strict=True)
    ]


def for_sides(param: Any, largest: int, *, diagonal: float) -> tuple[Any, Any]:
    """Return matrices with this diagonal and zeros elsewhere, () for None."""

    def one(kept: Kept | None) -> Any:
        if kept is None:
            return ()
        square = jnp.broadcast_to(diagonal * jnp.eye(kept.shape[-1]), kept.shape)
        return param.replace(square, axes=kept.axes)

    rows, columns = of_sides(param.get_value().shape, logical_axes(param), largest)
    return one(rows), one(columns)


def is_none(square: Any) -> bool:
    """Whether `for_sides` left out a side."""
    return isinstance(square, tuple)


def are_none(squares: Any) -> bool:
    """Whether `for_sides` left out both sides."""
    return all(map(is_none, squares))


def flat(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return a parameter's array as matrices [..., rows, columns]."""
    stack, rows, columns = sides(axes)
    lengths = (math.prod(x.shape[i] for i in part) for part in (rows, columns))
    parts = _parts(x)
    shape = *(x.shape[i] for i in stack), *lengths
    return reshape(x, shape, (*parts[: len(stack)], parts[rows[0]], parts[columns[0]]))


def like(m: jax.Array, x: jax.Array) -> jax.Array:
    """Return matrices in the shape of the array that they were made from."""
    return reshape(m, x.shape, _parts(x))


def gram(m: jax.Array, side: int) -> jax.Array:
    """Return M M^T for the rows, M^T M for the columns."""
    product = "...ij,...kj->...ik" if side == ROWS else "...ij,...il->...jl"
    *stack, rows, columns = _parts(m)
    return _einsum(product, m, _gather(m, side), (*stack, (rows, columns)[side], None))


def into(basis: jax.Array, m: jax.Array, side: int) -> jax.Array:
    """Project M into a basis of one side, given by columns: B^T M for the rows, M B for the
    columns.
    """
    if side == ROWS:
        return _einsum("...ik,...ij->...kj", basis, m, _parts(m))
    return _einsum("...ij,...jl->...il", m, basis, _parts(m))


def out_of(basis: jax.Array, m: jax.Array, side: int) -> jax.Array:
    """Invert `into`: B M for the rows, M B^T for the columns."""
    if side == ROWS:
        return _einsum("...ik,...kj->...ij", basis, _gather(m, side), _parts(m))
    return _einsum("...ij,...lj->...il", _gather(m, side), basis, _parts(m))


def inverse_root(square: jax.Array, order: int, least: float) -> jax.Array:
    """Return square^(-1 / order) of symmetric matrices, with eigenvalues of at least `least`."""

    def root(x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(x)
        scaled = vectors * (jnp.maximum(values, least) ** (-1 / order))[..., None, :]
        return jnp.einsum("...ik,...jk->...ij", scaled, vectors, precision="highest")

    return _each_whole(root, square)


def eigenbasis(square: jax.Array) -> jax.Array:
    """Return the eigenvectors of symmetric matrices as columns, the largest eigenvalue's first."""
    return _each_whole(lambda x: jnp.linalg.eigh(x)[1][..., ::-1], square)


def power_iterate(square: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a basis after one power iteration, and the permutation of its columns.

    Returns:
      The basis and a permutation [..., n, n], unsharded: column l of the new one is column k of
      the old one where [k, l] is 1. The largest of the estimated eigenvalues comes first.
    """
    *stack, rows, _ = _parts(square)
    turn = _einsum("...ik,...kl->...il", square, _gather(basis, ROWS), (*stack, rows, None))
    values = (basis * turn).sum(-2)
    order = jnp.argsort(-values, axis=-1)
    permutation = (jnp.arange(values.shape[-1])[:, None] == order[..., None, :]) * 1.0
    turn = _einsum("...ik,...kl->...il", turn, permutation, (*stack, rows, None))
    return _each_whole(lambda x: jnp.linalg.qr(x)[0], turn), permutation


def permute(permutation: jax.Array, m: jax.Array, side: int) -> jax.Array:
    """Permute the rows or columns of M as `power_iterate` permuted a basis."""
    if side == ROWS:
        return _einsum("...kl,...kj->...lj", permutation, _gather(m, side), _parts(m))
    return _einsum("...ij,...jl->...il", _gather(m, side), permutation, _parts(m))


def _each_whole(function: Any, square: jax.Array) -> jax.Array:
    dims = Sides(tuple(range(square.ndim - 2)), (square.ndim - 2,), (square.ndim - 1,))

    def of_stack(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=one_by_one, default=function)

    def one_by_one(x: jax.Array) -> jax.Array:
        """jaxlib's LAPACK runs a stack of large matrices on the threads of its devices,
        and waits: if all simulated devices reach it, they deadlock."""
        found = jax.lax.map(function, x.reshape(-1, *x.shape[-2:]))
        return found.reshape(x.shape)

    def local(x: jax.Array) -> jax.Array:
        sharding = jax.typeof(x).sharding
        if sharding.mesh.empty:
            return of_stack(x)
        # In shard_map: the compiler cannot partition the decomposition of a stack.
        return on_each_device(of_stack, sharding.spec, sharding.spec)(x)

    return on_whole(local, square, dims)


def _gather(m: jax.Array, side: int) -> jax.Array:
    """Gather one side of matrices on every device."""
    if jax.typeof(m).sharding.mesh.empty:
        return m
    parts = list(_parts(m))
    parts[m.ndim - 2 + side] = None
    return jax.sharding.reshard(m, P(*parts))


def _einsum(product: str, a: jax.Array, b: jax.Array, parts: tuple[MeshAxes, ...]) -> jax.Array:
    out = None if jax.typeof(a).sharding.mesh.empty else P(*parts)
    return jnp.einsum(product, a, b, precision="highest", out_sharding=out)


def _parts(x: jax.Array) -> tuple[MeshAxes, ...]:
    return tuple(jax.typeof(x).sharding.spec)
