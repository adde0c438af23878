"""PowerSGD: low-rank gradient compression.

Letters: k replicas, r rank; a matrix's rows and columns may be several dimensions each.
"""

import dataclasses
import string
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import (
    Layout,
    by_name,
    is_variable,
    logical_axes,
    name_of,
    on_each_device,
    reshape,
    shardings,
)
from jaxtrain.training.exchange.per_replica import replica_shardings, to_replicas
from jaxtrain.training.optimizers.matrices import sides


class Narrow(NamedTuple):
    """Split of a matrix [rows, columns] into two low-rank factors, [rows, rank] and [columns,
    rank].

    Attributes:
      stack, rows, columns: its dimensions, as in `matrices.Sides`.
      rank: columns of both.
    """

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    rank: int


def narrow(shape: tuple[int, ...], axes: tuple[str, ...], rank: int) -> Narrow | None:
    """Return how a parameter of this shape is compressed; None: not compressed, as a vector or a
    small matrix.

    Args:
      shape: of the parameter.
      axes: its logical axes.
      rank: of the two.
    """
    dims = sides(axes)
    if not dims.rows:
        return None
    n, m = (_product(shape, part) for part in (dims.rows, dims.columns))
    return Narrow(*dims, rank) if rank * (n + m) < n * m else None


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """PowerSGD (arXiv 1905.13727, algorithms 1 and 2), with error feedback and its warm start.

    With M the sum of the replicas' matrices and Q the last step's: P = M Q, its columns made
    orthonormal; Q = M^T P; the result is P Q^T, the projection of M on P's columns, and the
    residual stays with each replica: its own matrix minus its own projection. A device puts 4 r
    (rows + columns) bytes into two all-reduces instead of 4 rows x columns. An M of rank r is
    exact.

    Attributes:
      rank: r.
    """

    rank: int

    def init(self, params: nnx.State, replicas: int) -> dict[str, Any]:
        """Return the initial state as in `Reduction`.

        It has each replica's residual `left`, float32 [k, ...], and each matrix's `basis` Q,
        float32 [..., columns, r], which starts from random numbers.
        """
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return {"left": to_replicas(zeros, replicas), "basis": self._first(zeros)}

    def _first(self, params: nnx.State) -> dict[str, nnx.Param]:
        found = {}
        for name, variable in by_name(params).items():
            shape, axes = variable.get_value().shape, logical_axes(variable)
            narrowed = narrow(shape, axes, self.rank)
            if narrowed is not None:
                kept = (*narrowed.stack, *narrowed.columns)
                key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
                drawn = jax.random.normal(key, (*(shape[i] for i in kept), narrowed.rank))
                found[name] = nnx.Param(drawn, axes=(*(axes[i] for i in kept), "rank"))
        return found

    def shardings(self, kept: Any, layout: Layout) -> dict[str, Any]:
        """Return the shardings as in `Reduction`."""
        left = replica_shardings(kept["left"], layout.moment, layout)
        return {"left": left, "basis": shardings(kept["basis"], layout.moment, layout)}

    def reduce(self, grads: nnx.State, params: nnx.State, kept: Any) -> tuple[nnx.State, Any]:
        """Reduce as in `Reduction`."""
        pending = jax.tree.map(jnp.add, kept["left"], grads)
        leaves, structure = jax.tree.flatten(pending, is_leaf=is_variable)
        named = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable)
        basis = dict(kept["basis"])
        sent, left = [], []
        for (path, param), variable in zip(named, leaves, strict=True):
            name = name_of(path)
            x, axes = variable.get_value(), logical_axes(param)
            narrowed = narrow(x.shape[1:], axes, self.rank)
            if narrowed is None:
                arrived, rest = x.sum(0), jnp.zeros_like(x)
            else:
                arrived, rest, new = _exchange(x, basis[name].get_value(), narrowed)
                basis[name] = basis[name].replace(new)
            sent.append(param.replace(arrived))
            left.append(variable.replace(rest))
        of_params = jax.tree.structure(params, is_leaf=is_variable)
        return of_params.unflatten(sent), {"left": structure.unflatten(left), "basis": basis}


def _exchange(
    x: jax.Array, q: jax.Array, narrowed: Narrow
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the low-rank sum of the matrices [k, ...], each replica's residual, and the next Q."""
    letters = string.ascii_lowercase
    stack, rows, columns = ("".join(letters[i] for i in part) for part in narrowed[:3])
    whole = letters[: x.ndim - 1]
    spec: dict[str, Any] = {"R": None}
    spec.update(zip("K" + whole, jax.typeof(x).sharding.spec, strict=True))

    def product(a: str, b: str, out: str, one: jax.Array, other: jax.Array) -> jax.Array:
        where = P(*(spec[letter] for letter in out))
        return jnp.einsum(
            f"{a},{b}->{out}", one, other, out_sharding=where, precision=jax.lax.Precision.HIGHEST
        )

    matrix, of_rows, of_columns = "K" + whole, f"{stack}{rows}R", f"{stack}{columns}R"
    p = product(matrix, of_columns, "K" + of_rows, x, q).sum(0)
    p = _orthonormal(p, len(stack), [spec[letter] for letter in of_rows])
    own = product(matrix, of_rows, "K" + of_columns, x, p)
    new = own.sum(0)
    rest = x - product(of_rows, "K" + of_columns, matrix, p, own)
    return product(of_rows, of_columns, whole, p, new), rest, new


def _orthonormal(p: jax.Array, stack: int, parts: list[Any]) -> jax.Array:
    """Orthonormalize the columns of matrices [stack, rows, r]."""
    gathered = [*parts[:stack], *(None,) * (p.ndim - stack)]
    size = (*p.shape[:stack], _product(p.shape, range(stack, p.ndim - 1)), p.shape[-1])
    spec = P(*parts[:stack], None, None)
    whole = reshape(jax.sharding.reshard(p, P(*gathered)), size, list(spec))
    # Per device: JAX's QR does not propagate the sharding of a stack, such as experts.
    found = on_each_device(lambda a: jnp.linalg.qr(a)[0], (spec,), spec)(whole)
    return jax.sharding.reshard(reshape(found, p.shape, gathered), P(*parts))


def _product(shape: tuple[int, ...], dims: Any) -> int:
    found = 1
    for i in dims:
        found *= shape[i]
    return found
