"""Expert parallel dispatch of tokens to experts and back (MoE), by all-to-all over `expert`.

Letters: B rows, T length, t tokens of any rows, D embed, F mlp, E experts, k experts per token, N =
B T k assignments on a device, C slots per row and expert, R devices along `expert`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.matmul.grouped import Grouped
from jaxtrain.nn.remat import elementwise, name_activation
from jaxtrain.nn.transformer.mlp import Gated
from jaxtrain.parallel.sharding import (
    current_layout,
    on_each_device,
    parts_of,
    reduce_scatter_tokens,
)

TOKENS = ("batch", "length", "embed")
# Minimum rows per expert and part of the exchange: with fewer rows a matmul takes hardly longer
# than reading its weights and updating their gradients, which each part does.
ROWS_OF_A_PART = 4096
# Each expert's parameters, sharded with it; a network is those of all experts by name.
AXES = {
    "gate": ("experts", "embed", "mlp"),
    "up": ("experts", "embed", "mlp"),
    "down": ("experts", "mlp", "embed"),
    "gate_bias": ("experts", "mlp"),
    "up_bias": ("experts", "mlp"),
    "down_bias": ("experts", "vector"),
}
Networks = dict[str, jax.Array]


def slots_per_expert(
    capacity_factor: float, length: int, experts_per_token: int, num_experts: int
) -> int:
    """C = ceil(capacity_factor T k / E), the tokens of one row that an expert takes.

    Capacity belongs to a row (a group of GShard, arXiv 2006.16668), not to a device: which tokens
    are dropped does not depend on the mesh. At most T tokens choose an expert, since a token's k
    experts are distinct.
    """
    slots = math.ceil(capacity_factor * length * experts_per_token / num_experts)
    return min(slots, length)


def parts_of_exchange(ranks: int, rows: int, *, one_scale: bool) -> int:
    """Number of parts of the all-to-all.

    The computation of one part overlaps with the exchange of the other. At most two:
    each further part is one more matmul per weight (benchmarks/history/overlap.md).

    Args:
      ranks: devices along `expert`.
      rows: mean rows of an expert, from all of them.
      one_scale: whether all rows share a scale, as in float8: they are not split.
    """
    return 2 if ranks > 1 and rows >= 2 * ROWS_OF_A_PART and not one_scale else 1


def rank_in_expert(experts_BTk: jax.Array, num_experts: int) -> jax.Array:
    """Rank of each assignment among those of its row and expert."""
    B, T, k = experts_BTk.shape
    one_hot = (experts_BTk[..., None] == jnp.arange(num_experts)).astype(jnp.int32)
    one_hot = one_hot.reshape(B, T * k, num_experts)
    before = jnp.cumsum(one_hot, axis=1) - one_hot
    return (before * one_hot).sum(-1).reshape(B, T, k)


def dispatch(
    run: Any,
    x_BTD: jax.Array,
    routes: tuple[jax.Array, ...],
    networks: Networks,
    out: tuple[str, ...],
) -> jax.Array:
    """Run the all-to-all and each device's experts."""
    layout = current_layout()
    if layout is None:
        return run(1, x_BTD, *routes, networks)
    tokens, result = layout.activation(TOKENS), layout.activation(out)
    ranks, tensor = layout.mesh.shape["expert"], layout.mesh.shape["tensor"]

    if "down_bias" in networks:  # each device of `tensor` adds a part of it to its partial sum
        networks = {**networks, "down_bias": networks["down_bias"] / tensor}

    def each(*local: Any) -> jax.Array:
        inside = current_layout()
        assert inside is not None, "on_each_device has made one current"
        # Mesh axes of rows and experts that share a scale with these.
        others = inside.one_batch | (inside.manual - layout.manual)
        with dataclasses.replace(inside, one_batch=others).current():
            y_BTD = run(ranks, *local)
        # Each device of `tensor` computed a part of F, so it has a partial sum.
        if "tensor" in parts_of(result[1]):
            return reduce_scatter_tokens(y_BTD, ("tensor",))
        return jax.lax.psum(y_BTD, "tensor") if tensor > 1 else y_BTD

    route = P(*tokens[:2])
    of_networks = {name: layout.weight(AXES[name]) for name in networks}
    in_specs = (tokens, *(route for _ in routes), of_networks)
    return on_each_device(each, in_specs, result)(x_BTD, *routes, networks)


def _all_to_all(x: jax.Array, *, axis: int, concat: int) -> jax.Array:
    """Part r of dimension `axis` goes to rank r; received parts are concatenated along `concat`."""
    return jax.lax.all_to_all(x, "expert", split_axis=axis, concat_axis=concat, tiled=True)


def run_with_capacity(
    gated: Gated,
    by: Grouped,
    C: int,
    ranks: int,
    x_BTD: jax.Array,
    experts_BTk: jax.Array,
    gates_BTk: jax.Array,
    slots_BTk: jax.Array,
    networks: Networks,
) -> jax.Array:
    """Experts that take C tokens per row; assignments without a slot are dropped.

    All parts of an all-to-all are one array of E B C D values per device (B its own rows), there
    and back; a part has some of the slots of every row and expert.
    """
    B, T, D = x_BTD.shape
    E = ranks * networks["gate"].shape[0]
    k = experts_BTk.shape[-1]
    row = jnp.arange(B)[:, None, None]
    # The assignment in each slot; B T k for empty ones, which read zeros.
    assignment_BEC = jnp.full((B, E, C), B * T * k, jnp.int32)
    assignment_BEC = assignment_BEC.at[row, experts_BTk, slots_BTk].set(
        jnp.arange(B * T * k, dtype=jnp.int32).reshape(B, T, k), mode="drop"
    )

    def multiply(x_ESD: jax.Array, name: str) -> jax.Array:
        return by(x_ESD, networks[name], None)

    def bias(name: str) -> jax.Array:
        return networks[name][:, None]

    def there_and_back(x_BECD: jax.Array, gate_BEC1: jax.Array) -> jax.Array:
        x_ESD, gate_ES1 = (
            jnp.moveaxis(array, 1, 0).reshape(E, -1, array.shape[-1])
            for array in (x_BECD, gate_BEC1)
        )
        if ranks > 1:
            x_ESD, gate_ES1 = (_all_to_all(array, axis=0, concat=1) for array in (x_ESD, gate_ES1))
        y_ESD = _run_network(gated, x_ESD, gate_ES1, multiply, bias if has_biases else None)
        if ranks > 1:
            y_ESD = _all_to_all(y_ESD, axis=1, concat=0)
        return jnp.moveaxis(y_ESD.reshape(E, B, -1, D), 0, 1)

    has_biases = "down_bias" in networks
    parts = parts_of_exchange(ranks, ranks * B * C, one_scale=by.float8)
    slot_BTk = jnp.where(slots_BTk < C, (row * E + experts_BTk) * C + slots_BTk, B * E * C)
    x_BECD = _rows(x_BTD.reshape(B * T, D), assignment_BEC // k, slot_BTk.reshape(B * T, k))
    gate_BEC1 = _rows(gates_BTk.reshape(-1, 1), assignment_BEC, slot_BTk.reshape(-1, 1))
    cut = zip(
        *(jnp.array_split(array, parts, axis=2) for array in (x_BECD, gate_BEC1)), strict=True
    )
    y_BECD = jnp.concatenate([there_and_back(*part) for part in cut], axis=2)
    y_BTkD = _rows(y_BECD.reshape(-1, D), slot_BTk, assignment_BEC.reshape(-1, 1))
    return _sum_of_experts(y_BTkD)


def run_dropless(
    gated: Gated,
    by: Grouped,
    ranks: int,
    x_BTD: jax.Array,
    experts_BTk: jax.Array,
    gates_BTk: jax.Array,
    networks: Networks,
) -> jax.Array:
    """Dropless experts: rows sorted by expert, one grouped matmul per projection.

    On one rank these are exactly N = B T k rows. Between ranks any one rank may be chosen for all
    of them, and shapes are static, so all parts of an all-to-all are one array of R N D values per
    device: R / capacity_factor times what a capacity would send. A part has some of the tokens.
    """
    B, T, D = x_BTD.shape
    N, k, E = experts_BTk.size, experts_BTk.shape[-1], ranks * networks["gate"].shape[0]

    def there_and_back(x_tD: jax.Array, experts_tk: jax.Array, gates_tk: jax.Array) -> jax.Array:
        expert_N = experts_tk.reshape(-1)
        order_N = jnp.argsort(expert_N, stable=True)
        sizes_E = (expert_N[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)
        position_N = jnp.argsort(order_N)
        x_ND = _rows(x_tD, order_N // k, position_N.reshape(-1, k))
        gate_N1 = _rows(gates_tk.reshape(-1, 1), order_N, position_N[:, None])
        if ranks == 1:
            y_ND = _run_grouped(gated, by, x_ND, gate_N1, sizes_E, networks)
        else:
            y_ND = _run_grouped_over_ranks(
                gated, by, ranks, x_ND, gate_N1, expert_N[order_N], sizes_E, networks
            )
        return _rows(y_ND, position_N, order_N[:, None]).reshape(-1, k, D)

    parts = parts_of_exchange(ranks, ranks * N // E, one_scale=by.float8)
    of_tokens = (array.reshape(B * T, -1) for array in (x_BTD, experts_BTk, gates_BTk))
    cut = zip(*(jnp.array_split(array, parts) for array in of_tokens), strict=True)
    y_BTkD = jnp.concatenate([there_and_back(*part) for part in cut]).reshape(B, T, k, D)
    return _sum_of_experts(y_BTkD)


def _run_grouped_over_ranks(
    gated: Gated,
    by: Grouped,
    ranks: int,
    x_ND: jax.Array,
    gate_N1: jax.Array,
    expert_N: jax.Array,
    sizes_E: jax.Array,
    networks: Networks,
) -> jax.Array:
    """`_run_grouped` with the experts on several ranks; the rows are sorted by expert."""
    N, D = x_ND.shape
    sizes_RE = sizes_E.reshape(ranks, -1)
    count_R = sizes_RE.sum(1)
    start_R = jnp.cumsum(count_R) - count_R
    position_N = jnp.arange(N)
    # Part r of the send buffer: the rows for rank r's experts, padded with zeros.
    source_RN = jnp.where(position_N < count_R[:, None], start_R[:, None] + position_N, N)
    rank_N = expert_N // networks["gate"].shape[0]
    sent_N = rank_N * N + position_N - start_R[rank_N]
    sent = (_rows(array, source_RN, sent_N[:, None]) for array in (x_ND, gate_N1))
    # From now on part r is from rank r, for the experts of this device.
    x_RND, gate_RN1 = (_all_to_all(array, axis=0, concat=0) for array in sent)
    sizes_RE = _all_to_all(sizes_RE, axis=0, concat=0)
    # The local expert of each row; one past the last for padding, which sorts to the end.
    ends_RE = jnp.cumsum(sizes_RE, axis=1)
    local_RN = (position_N[None, :, None] >= ends_RE[:, None, :]).sum(-1)
    order = jnp.argsort(local_RN.reshape(-1), stable=True)
    position = jnp.argsort(order)
    x, gate = (
        _rows(array.reshape(ranks * N, -1), order, position[:, None]) for array in (x_RND, gate_RN1)
    )
    y = _run_grouped(gated, by, x, gate, sizes_RE.sum(0), networks)
    y_RND = _rows(y, position, order[:, None]).reshape(ranks, N, D)
    y_RND = _all_to_all(y_RND, axis=0, concat=0)
    return _rows(y_RND.reshape(-1, D), sent_N, source_RN.reshape(-1, 1))


def _run_grouped(
    gated: Gated,
    by: Grouped,
    x_ND: jax.Array,
    gate_N1: jax.Array,
    sizes_E: jax.Array,
    networks: Networks,
) -> jax.Array:
    """The networks' outputs for rows sorted by expert, sizes_E of them each."""

    # The expert of each row; E for a row without one.
    expert_N = (jnp.arange(x_ND.shape[0])[:, None] >= jnp.cumsum(sizes_E)).sum(1)

    def multiply(x_ND: jax.Array, name: str) -> jax.Array:
        return by(x_ND, networks[name], sizes_E)

    def bias(name: str) -> jax.Array:
        return _own(networks[name], expert_N)

    has_biases = "down_bias" in networks
    return _run_network(gated, x_ND, gate_N1, multiply, bias if has_biases else None)


@jax.custom_vjp
def _own(bias_EF: jax.Array, expert_N: jax.Array) -> jax.Array:
    """[N, F]: the bias of each row's expert, zeros without one."""
    return bias_EF.at[expert_N].get(mode="fill", fill_value=0)


def _own_forward(bias_EF: jax.Array, expert_N: jax.Array) -> tuple[jax.Array, Any]:
    return _own(bias_EF, expert_N), (bias_EF, expert_N)


def _own_backward(kept: Any, gradient_NF: jax.Array) -> tuple[jax.Array, None]:
    # As a matmul: scatter-adds into few rows serialize.
    bias_EF, expert_N = kept
    own_NE = (expert_N[:, None] == jnp.arange(len(bias_EF))).astype(gradient_NF.dtype)
    of_bias = jnp.einsum("NE,NF->EF", own_NE, gradient_NF, preferred_element_type=jnp.float32)
    return of_bias.astype(bias_EF.dtype), None


_own.defvjp(_own_forward, _own_backward)


@dataclasses.dataclass(frozen=True)
class _Weighted:
    """A gated activation times the router's gate of each row, rounded once."""

    gated: Gated

    def __call__(self, gate: jax.Array, up: jax.Array, weight_1: jax.Array) -> jax.Array:
        return (self.gated(gate, up).astype(jnp.float32) * weight_1).astype(up.dtype)


def _run_network(
    gated: Gated,
    x: jax.Array,
    weight_1: jax.Array,
    multiply: Callable[[jax.Array, str], jax.Array],
    bias: Callable[[str], jax.Array] | None,
) -> jax.Array:
    """Gated MLP of three projections, by their names, times the router's gates [..., 1].

    The gates multiply the input of the last projection, which is linear, so that the backward pass
    does not need its output, which remat would recompute and send again.
    """

    def project(name: str) -> jax.Array:
        h = multiply(x, name) if bias is None else multiply(x, name) + bias(f"{name}_bias")
        return name_activation(h, f"mlp_{name}")

    inside = elementwise(_Weighted(gated), project("gate"), project("up"), weight_1)
    y = multiply(inside, "down")
    return y if bias is None else y + (weight_1 * bias("down_bias")).astype(y.dtype)


@jax.custom_vjp
def _rows(x_nD: jax.Array, index: jax.Array, uses_nr: jax.Array) -> jax.Array:
    """x_nD[index], zeros where an index is past the end; its gradient is a gather too.

    A gather's own gradient is a scatter-add: on a GPU atomic additions, at a fifth of the
    memory's bandwidth.

    Args:
      x_nD: rows.
      index: [...], the row of x of each row of the result.
      uses_nr: flat indices in the result of each row of x; past its
        end for a row that is used fewer than r times.
    """
    del uses_nr
    return x_nD.at[index].get(mode="fill", fill_value=0)


def _rows_forward(x_nD: jax.Array, index: jax.Array, uses_nr: jax.Array) -> tuple[jax.Array, Any]:
    return _rows(x_nD, index, uses_nr), uses_nr


def _rows_backward(uses_nr: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    gradient = gradient.reshape(-1, gradient.shape[-1])
    return gradient.at[uses_nr].get(mode="fill", fill_value=0).sum(1), None, None


_rows.defvjp(_rows_forward, _rows_backward)


def _sum_of_experts(y_BTkD: jax.Array) -> jax.Array:
    return y_BTkD.sum(2, dtype=jnp.float32).astype(y_BTkD.dtype)
