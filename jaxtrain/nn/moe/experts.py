"""Mixture of experts (MoE): expert parallel all-to-all over the mesh axis `expert`, and experts.

Letters: B rows, T length, t tokens of any rows, D embed, F mlp, E experts, k experts per token, N =
B T k assignments on a device, C slots per row and expert, R devices along `expert`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.nn.attention.context import split, sum_of_sequence
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.facts import ExpertsFacts
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.matmul.grouped import Grouped
from jaxtrain.nn.moe.routing import Router, Routes, Softmax
from jaxtrain.nn.parameters import Weights, constant, normal, param, residual_stddev
from jaxtrain.nn.remat import elementwise, name_activation
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD, Auxiliary
from jaxtrain.nn.transformer.mlp import Gated, swiglu
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import (
    current_layout,
    on_each_device,
    parts_of,
    scatter_places,
    shard,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of E gated experts; each token is routed to the k with the highest scores.

    A part of a block. Router logits and gates are float32 whatever the
    compute dtype.

    Attributes:
      embed_dim: width of the residual stream.
      mlp_dim: width inside each expert.
      num_experts, experts_per_token: E and k.
      capacity_factor: tokens of a row that an expert takes, see `slots_per_expert`; None is
        dropless.
      residual_stddev: standard deviation of the output projections at initialization.
      balance_weight, router_z_weight: weights of these losses.
      num_layers: layers over which the router's losses and metrics are averaged.
      router: selects the experts and their gates.
      gated: combines gate and up.
      biases: whether the logits and the three projections of each expert have biases.
    """

    embed_dim: int
    mlp_dim: int
    num_experts: int
    experts_per_token: int
    capacity_factor: float | None
    residual_stddev: float
    balance_weight: float
    router_z_weight: float
    num_layers: int
    router: Router = Softmax()
    gated: Gated = swiglu
    biases: bool = False

    num_keys: ClassVar[int] = 1
    scope: ClassVar[str] = "experts"

    @property
    def facts(self) -> ExpertsFacts:
        """Facts of each layer; router biases are updated if the model sets it."""
        return ExpertsFacts(
            count=self.num_experts,
            per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor,
        )

    def weights(self, keys: jax.Array) -> Weights:
        """Parameters: router [D, E], gate and up [E, D, F], down [E, F, D]; biases."""
        D, F, E = self.embed_dim, self.mlp_dim, self.num_experts
        key_router, key_gate, key_up, key_down = jax.random.split(keys[0], 4)
        own = {
            # The router treats experts as classes: every device scores all of them.
            "router": param(key_router, (D, E), ("embed", "classes"), normal(0.02), role="router"),
            "gate": param(key_gate, (E, D, F), AXES["gate"], normal(0.02)),
            "up": param(key_up, (E, D, F), AXES["up"], normal(0.02)),
            "down": param(key_down, (E, F, D), AXES["down"], normal(self.residual_stddev)),
        }
        if self.biases:
            zero = constant(0.0)
            own |= {
                "router_bias": param(key_router, (E,), ("classes",), zero),
                "gate_bias": param(key_gate, (E, F), AXES["gate_bias"], zero),
                "up_bias": param(key_up, (E, F), AXES["up_bias"], zero),
                "down_bias": param(key_down, (E, D), AXES["down_bias"], zero),
            }
        own |= self.router.weights(key_router, E)
        return {"experts": own}

    def matmul_parameters(self) -> int:
        """Matmul parameters of the router and of the k experts of a token."""
        active = 3 * self.embed_dim * self.mlp_dim * self.experts_per_token
        return active + self.embed_dim * self.num_experts

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the weighted sum of each token's experts [B, T, D], and the router's losses and
        metrics.

        Arguments as in `block.Feeds`. Padding is routed too, but not counted in statistics.

        Raises:
          UserError: while tracing, if rows are split and experts have a capacity.
        """
        own, h_BTD = own["experts"], shard(h_BTD, TOKENS)
        logits_BTE = contract("BTD,DE->BTE", h_BTD.astype(jnp.float32), own["router"])
        if self.biases:
            logits_BTE = add_bias(logits_BTE, own["router_bias"])
        routed = self.router(own, logits_BTE, self.experts_per_token)
        experts_BTk, gates_BTk = routed.experts_BTk, routed.gates_BTk
        if self.capacity_factor is None:
            kept_BTk = jnp.ones_like(experts_BTk, dtype=bool)
            run = functools.partial(_dropless, self.gated, execution.grouped or Grouped())
            routes = (experts_BTk, gates_BTk)
        else:
            if split() > 1:
                raise UserError(
                    f"capacity_factor={self.capacity_factor} with Mesh.context={split()}: an "
                    "expert's slots are counted along whole rows, which context splits; use "
                    "Mesh.context=1 or capacity_factor=None (dropless)"
                )
            k, E = self.experts_per_token, self.num_experts
            C = slots_per_expert(self.capacity_factor, h_BTD.shape[1], k, E)
            slots_BTk = _slots(experts_BTk, E)
            kept_BTk = slots_BTk < C
            run = functools.partial(_with_capacity, self.gated, execution.grouped or Grouped(), C)
            routes = (experts_BTk, gates_BTk, slots_BTk)
        networks = {name: gather(own[name]).astype(h_BTD.dtype) for name in AXES if name in own}
        y_BTD = _over_the_mesh(run, h_BTD, routes, networks, out)
        statistics, load_E = router_statistics(logits_BTE, routed, kept_BTk, mask.segment_ids_BT)
        auxiliary = self._auxiliary(statistics)
        if self.router.biased:
            # With a layers dimension, so that their sum over layers is each layer's load.
            is_this_L1 = jnp.arange(self.num_layers)[:, None] == execution.layer
            auxiliary[EXPERT_LOAD] = jnp.where(is_this_L1, load_E, 0.0)
        return y_BTD, auxiliary

    def _auxiliary(self, statistics: dict[str, jax.Array]) -> Auxiliary:
        """One layer's part of the mean over layers of the router's sums over tokens."""
        mean = {name: total / self.num_layers for name, total in statistics.items()}
        weighted = self.balance_weight * mean["balance"] + self.router_z_weight * mean["z"]
        return {
            "auxiliary_loss": weighted,
            "router_balance_loss": mean["balance"],
            "router_z_loss": mean["z"],
            "router_dropped": mean["dropped"],
            "router_max_load": mean["max_load"],
        }


def router_statistics(
    logits_BTE: jax.Array,
    routed: Routes,
    kept_BTk: jax.Array,
    segment_ids_BT: jax.Array | None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Sums over the tokens that are not padding, each a float32 scalar, and each expert's load [E].

    A row's balance and its maximum load count once per token, so that every sum
    over the number of tokens is a mean, independent of how rows are batched:

    - balance: E sum_e f_e P_e of the token's row (arXiv 2101.03961, equation 4, taken row by row as
      in arXiv 2412.19437, equation 17). f_e is the fraction of the row's tokens that chose expert
      e, so the f_e sum to k and an even load gives k, as in Mixtral; P_e is its mean probability,
      of sigmoids their share.
    - z: the squared logsumexp of the router's logits (ST-MoE, arXiv 2202.08906, equation 5).
    - dropped: the fraction of the token's k assignments without a slot.
    - max_load: the load of the row's busiest expert over that of an even spread.
    """
    experts_BTk = routed.experts_BTk
    E, k = logits_BTE.shape[-1], experts_BTk.shape[-1]
    counts_BT = jnp.ones_like(logits_BTE[..., 0])
    if segment_ids_BT is not None:
        counts_BT *= segment_ids_BT != 0
    own_B = counts_BT.sum(1)  # of this device, if it has only a part of each row
    tokens_B = sum_of_sequence(own_B)
    chosen_BTE = (experts_BTk[..., None] == jnp.arange(E)).sum(2) * counts_BT[..., None]
    probability_BTE = routed.probability_BTE * counts_BT[..., None]
    at_least_one_B1 = jnp.maximum(tokens_B, 1.0)[:, None]
    own_load_BE = chosen_BTE.sum(1)
    load_BE = sum_of_sequence(own_load_BE) / at_least_one_B1
    probability_BE = sum_of_sequence(probability_BTE.sum(1)) / at_least_one_B1
    partition_BT = jax.nn.logsumexp(logits_BTE, axis=-1)
    dropped_BT = (~kept_BTk).sum(-1) / k
    sums = {
        "balance": (E * (load_BE * probability_BE).sum(-1) * own_B).sum(),
        "z": (jnp.square(partition_BT) * counts_BT).sum(),
        "dropped": (dropped_BT * counts_BT).sum(),
        "max_load": (load_BE.max(-1) * E / k * own_B).sum(),
    }
    return sums, own_load_BE.sum(0)


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


class MixtureSizes(Protocol):
    """Sizes of `mixture`, each documented at `models.transformers.mixtral.Mixtral`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def capacity_factor(self) -> float | None: ...
    @property
    def balance_weight(self) -> float: ...
    @property
    def router_z_weight(self) -> float: ...


def mixture(sizes: MixtureSizes, **more: Any) -> Experts:
    """Return the experts of a model that has them in every layer; `more`: further attributes."""
    return Experts(
        embed_dim=sizes.embed_dim,
        mlp_dim=sizes.mlp_dim,
        num_experts=sizes.num_experts,
        experts_per_token=sizes.experts_per_token,
        capacity_factor=sizes.capacity_factor,
        residual_stddev=residual_stddev(sizes.num_layers),
        balance_weight=sizes.balance_weight,
        router_z_weight=sizes.router_z_weight,
        num_layers=sizes.num_layers,
        **more,
    )


def validate_mixture(sizes: MixtureSizes) -> None:
    """Raise UserError if one of these settings is out of range."""
    name = type(sizes).__name__
    require_at_least(1, sizes, "num_experts")
    if not 1 <= sizes.experts_per_token <= sizes.num_experts:
        raise UserError(
            f"{name}.experts_per_token={sizes.experts_per_token} with {name}.num_experts="
            f"{sizes.num_experts}; use 1 to {sizes.num_experts}"
        )
    for message in validate_settings(sizes, "balance_weight", "router_z_weight"):
        raise UserError(message)


def validate_settings(model: Any, *weights: str) -> Iterator[str]:
    """Yield an error message for an invalid capacity and each invalid weight.

    Args:
      model: the settings, whose `capacity_factor` it is.
      weights: names of the nonnegative ones.
    """
    name, factor = type(model).__name__, model.capacity_factor
    if factor is not None and not factor > 0:
        yield (
            f"{name}.capacity_factor={factor}; use None (dropless) or a number above 0, such as "
            "1.25"
        )
    for weight in weights:
        if not getattr(model, weight) >= 0:
            yield f"{name}.{weight}={getattr(model, weight)}; use 0 (none) or more"


def _slots(experts_BTk: jax.Array, num_experts: int) -> jax.Array:
    """Rank of each assignment among those of its row and expert."""
    B, T, k = experts_BTk.shape
    one_hot = (experts_BTk[..., None] == jnp.arange(num_experts)).astype(jnp.int32)
    one_hot = one_hot.reshape(B, T * k, num_experts)
    before = jnp.cumsum(one_hot, axis=1) - one_hot
    return (before * one_hot).sum(-1).reshape(B, T, k)


# -- over the mesh --------------------------------------------------------------------------------


def _over_the_mesh(
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
            return scatter_places(y_BTD, ("tensor",))
        return jax.lax.psum(y_BTD, "tensor") if tensor > 1 else y_BTD

    route = P(*tokens[:2])
    of_networks = {name: layout.weight(AXES[name]) for name in networks}
    in_specs = (tokens, *(route for _ in routes), of_networks)
    return on_each_device(each, in_specs, result)(x_BTD, *routes, networks)


def _all_to_all(x: jax.Array, *, axis: int, concat: int) -> jax.Array:
    """Part r of dimension `axis` goes to rank r; received parts are concatenated along `concat`."""
    return jax.lax.all_to_all(x, "expert", split_axis=axis, concat_axis=concat, tiled=True)


def _with_capacity(
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

    def project(x_ESD: jax.Array, name: str) -> jax.Array:
        h_ESF, bias = by(x_ESD, networks[name], None), f"{name}_bias"
        return h_ESF + networks[bias][:, None] if bias in networks else h_ESF

    def there_and_back(x_BECD: jax.Array) -> jax.Array:
        x_ESD = jnp.moveaxis(x_BECD, 1, 0).reshape(E, -1, D)
        if ranks > 1:
            x_ESD = _all_to_all(x_ESD, axis=0, concat=1)
        y_ESD = _through(gated, x_ESD, project)
        if ranks > 1:
            y_ESD = _all_to_all(y_ESD, axis=1, concat=0)
        return jnp.moveaxis(y_ESD.reshape(E, B, -1, D), 0, 1)

    parts = parts_of_exchange(ranks, ranks * B * C, one_scale=by.float8)
    slot_BTk = jnp.where(slots_BTk < C, (row * E + experts_BTk) * C + slots_BTk, B * E * C)
    x_BECD = _rows(x_BTD.reshape(B * T, D), assignment_BEC // k, slot_BTk.reshape(B * T, k))
    cut = jnp.array_split(x_BECD, parts, axis=2)
    y_BECD = jnp.concatenate([there_and_back(part) for part in cut], axis=2)
    y_BTkD = _rows(y_BECD.reshape(-1, D), slot_BTk, assignment_BEC.reshape(-1, 1))
    return _weight(y_BTkD, gates_BTk)


def _dropless(
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

    def there_and_back(x_tD: jax.Array, experts_tk: jax.Array) -> jax.Array:
        expert_N = experts_tk.reshape(-1)
        order_N = jnp.argsort(expert_N, stable=True)
        sizes_E = (expert_N[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)
        position_N = jnp.argsort(order_N)
        x_ND = _rows(x_tD, order_N // k, position_N.reshape(-1, k))
        if ranks == 1:
            y_ND = _run_grouped(gated, by, x_ND, sizes_E, networks)
        else:
            y_ND = _run_grouped_over_ranks(
                gated, by, ranks, x_ND, expert_N[order_N], sizes_E, networks
            )
        return _rows(y_ND, position_N, order_N[:, None]).reshape(-1, k, D)

    parts = parts_of_exchange(ranks, ranks * N // E, one_scale=by.float8)
    of_tokens = (x_BTD.reshape(B * T, D), experts_BTk.reshape(B * T, k))
    cut = zip(*(jnp.array_split(array, parts) for array in of_tokens), strict=True)
    y_BTkD = jnp.concatenate([there_and_back(*part) for part in cut]).reshape(B, T, k, D)
    return _weight(y_BTkD, gates_BTk)


def _run_grouped_over_ranks(
    gated: Gated,
    by: Grouped,
    ranks: int,
    x_ND: jax.Array,
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
    x_RND = _rows(x_ND, source_RN, sent_N[:, None])
    # From now on part r is from rank r, for the experts of this device.
    x_RND = _all_to_all(x_RND, axis=0, concat=0)
    sizes_RE = _all_to_all(sizes_RE, axis=0, concat=0)
    # The local expert of each row; one past the last for padding, which sorts to the end.
    ends_RE = jnp.cumsum(sizes_RE, axis=1)
    local_RN = (position_N[None, :, None] >= ends_RE[:, None, :]).sum(-1)
    order = jnp.argsort(local_RN.reshape(-1), stable=True)
    position = jnp.argsort(order)
    x = _rows(x_RND.reshape(-1, D), order, position[:, None])
    y = _run_grouped(gated, by, x, sizes_RE.sum(0), networks)
    y_RND = _rows(y, position, order[:, None]).reshape(ranks, N, D)
    y_RND = _all_to_all(y_RND, axis=0, concat=0)
    return _rows(y_RND.reshape(-1, D), sent_N, source_RN.reshape(-1, 1))


def _run_grouped(
    gated: Gated, by: Grouped, x_ND: jax.Array, sizes_E: jax.Array, networks: Networks
) -> jax.Array:
    """Return the networks' outputs for rows sorted by expert, sizes_E of them each."""

    # The expert of each row; E for a row without one.
    expert_N = (jnp.arange(x_ND.shape[0])[:, None] >= jnp.cumsum(sizes_E)).sum(1)

    def project(x_ND: jax.Array, name: str) -> jax.Array:
        h_NF, bias = by(x_ND, networks[name], sizes_E), f"{name}_bias"
        return h_NF + _own(networks[bias], expert_N) if bias in networks else h_NF

    return _through(gated, x_ND, project)


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


def _through(
    gated: Gated, x: jax.Array, projected: Callable[[jax.Array, str], jax.Array]
) -> jax.Array:
    """Gated MLP of three projections, by their names."""
    gate, up = (name_activation(projected(x, name), f"mlp_{name}") for name in ("gate", "up"))
    return projected(elementwise(gated, gate, up), "down")


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


def _weight(y_BTkD: jax.Array, gates_BTk: jax.Array) -> jax.Array:
    y_BTD = (y_BTkD.astype(jnp.float32) * gates_BTk[..., None]).sum(2)
    return y_BTD.astype(y_BTkD.dtype)
