"""Mixture of experts (MoE): experts, their router's losses and metrics.

Letters: B rows, T length, t tokens of any rows, D embed, F mlp, E experts, k experts per token, N =
B T k assignments on a device, C slots per row and expert, R devices along `expert`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.nn.attention.context import split, sum_of_sequence
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import ExpertsFacts
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.matmul.grouped import Grouped
from jaxtrain.nn.moe.dispatch import (
    AXES,
    TOKENS,
    dispatch,
    rank_in_expert,
    run_dropless,
    run_with_capacity,
    slots_per_expert,
)
from jaxtrain.nn.moe.routing import Router, Routes, Softmax
from jaxtrain.nn.parameters import (
    Weights,
    add_prefix,
    constant,
    merge_weights,
    normal,
    param,
    residual_stddev,
    under,
)
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD, Auxiliary
from jaxtrain.nn.transformer.mlp import Gated, SwiGLU, swiglu
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import (
    shard,
)


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
        grouped = execution.grouped or Grouped()
        if self.capacity_factor is None:
            kept_BTk = jnp.ones_like(experts_BTk, dtype=bool)
            run = functools.partial(run_dropless, self.gated, grouped)
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
            slots_BTk = rank_in_expert(experts_BTk, E)
            kept_BTk = slots_BTk < C
            run = functools.partial(run_with_capacity, self.gated, grouped, C)
            routes = (experts_BTk, gates_BTk, slots_BTk)
        networks = {name: gather(own[name]).astype(h_BTD.dtype) for name in AXES if name in own}
        y_BTD = dispatch(run, h_BTD, routes, networks, out)
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


# -- shared experts, applied to every token in addition to its routed ones -------------------------
# Letters: B batch, T length, D embed, X size 1 of a gate.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """shared(x) + routed(x): DeepSeekMoE (arXiv 2401.06066, section 3.2); with a gate
    sigmoid(gate x) shared(x) + routed(x), as in Qwen1.5-MoE and Qwen 2 (arXiv 2407.10671, 2.2.2).

    Attributes:
      shared: all shared experts as one wide SwiGLU.
      routed: the routed experts.
      gated: whether the shared experts' output has a gate per token.
    """

    shared: SwiGLU
    routed: Experts
    gated: bool = False

    num_keys: ClassVar[int] = SwiGLU.num_keys + Experts.num_keys
    scope: ClassVar[str] = "experts"

    @property
    def facts(self) -> ExpertsFacts:
        """Facts of the routed experts."""
        return self.routed.facts

    def weights(self, keys: jax.Array) -> Weights:
        """Parameters of both, the shared ones with the prefix "shared"."""
        first = self.shared.num_keys
        shared = add_prefix("shared", self.shared.weights(keys[:first]))
        if self.gated:
            matrix = param(keys[0], (self.shared.embed_dim, 1), ("embed", "narrow"), normal(0.02))
            shared = merge_weights(shared, {"share": matrix})
        return merge_weights(shared, self.routed.weights(keys[first:]))

    def matmul_parameters(self) -> int:
        """Matmul parameters of both per token."""
        gate = self.shared.embed_dim if self.gated else 0
        return self.shared.matmul_parameters() + self.routed.matmul_parameters() + gate

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the sum of both; arguments and results as in `block.Feeds`."""
        h_BTD = shard(h_BTD, HIDDEN)  # once for both
        routed_BTD, auxiliary = self.routed(own, h_BTD, mask, execution, out=out)
        with jax.named_scope(self.shared.scope):
            shared_BTD, _ = self.shared(under("shared", own), h_BTD, mask, execution, out=out)
            if self.gated:
                share_BTX = contract("BTD,DX->BTX", h_BTD, own["share"], (*out[:2], "narrow"))
                shared_BTD *= jax.nn.sigmoid(share_BTX)
        return shared_BTD + routed_BTD, auxiliary
