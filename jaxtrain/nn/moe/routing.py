"""Mixture-of-experts routers: top-k experts of a token, and their gates.

Letters: B rows, T length, E experts, k experts per token, G groups of experts.
"""

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.nn.parameters import Weights, constant, param
from jaxtrain.parallel.gathering import gather


@dataclasses.dataclass(frozen=True)
class Routes:
    """Routes of tokens; all float32 but the expert indices.

    Attributes:
      experts_BTk: the experts of each token.
      gates_BTk: weights of their outputs.
      probability_BTE: each token's distribution over experts, for the balance loss.
    """

    experts_BTk: jax.Array
    gates_BTk: jax.Array
    probability_BTE: jax.Array


class Router(Protocol):
    """Router: maps scores of experts to routes for tokens.

    Attributes:
      biased: whether it has a bias that is updated by the experts' load.
    """

    biased: ClassVar[bool]

    def weights(self, key: jax.Array, num_experts: int) -> Weights:
        """Parameters in addition to the matrix of the logits."""
        ...

    def __call__(self, own: Weights, logits_BTE: jax.Array, experts_per_token: int) -> Routes:
        """Return the routes of tokens with these logits."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """Limit of a token's experts to its best groups (arXiv 2405.04434, section 2.1.3).

    Attributes:
      count: number of groups of consecutive experts.
      chosen: groups per token.
    """

    count: int
    chosen: int

    def mask_groups(self, scores_BTE: jax.Array, best: int) -> jax.Array:
        """Set the scores to minus infinity in groups that a token did not choose.

        Args:
          scores_BTE: of the experts.
          best: a group's score is the sum of this many best experts.
        """
        B, T, E = scores_BTE.shape
        of_group_BTGe = scores_BTE.reshape(B, T, self.count, E // self.count)
        group_BTG = jax.lax.top_k(of_group_BTGe, best)[0].sum(-1)
        _, chosen_BTg = jax.lax.top_k(group_BTG, self.chosen)
        is_chosen_BTG = (chosen_BTg[..., None] == jnp.arange(self.count)).any(2)
        return jnp.where(is_chosen_BTG[..., None], of_group_BTGe, -jnp.inf).reshape(B, T, E)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax:
    """Top-k of a softmax over the experts.

    Attributes:
      normalized: whether the gates of a token's experts sum to 1 (Mixtral, arXiv 2401.04088);
        else they are the softmax over all.
      scale: factor of the gates.
      groups: the group limit; None: each token chooses among all experts.
    """

    normalized: bool = True
    scale: float = 1.0
    groups: Groups | None = None

    biased: ClassVar[bool] = False

    def weights(self, key: jax.Array, num_experts: int) -> Weights:
        """None."""
        del key, num_experts
        return {}

    def __call__(self, own: Weights, logits_BTE: jax.Array, experts_per_token: int) -> Routes:
        """As in `Router`; a group is as good as its best expert."""
        del own
        among = logits_BTE if self.groups is None else self.groups.mask_groups(logits_BTE, best=1)
        top_BTk, experts_BTk = jax.lax.top_k(among, experts_per_token)
        gates_BTk = jax.nn.softmax(top_BTk, axis=-1)
        if not self.normalized:
            all_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
            gates_BTk = jnp.exp(top_BTk - all_BT1)
        if self.scale != 1:
            gates_BTk *= self.scale
        return Routes(experts_BTk, gates_BTk, jax.nn.softmax(logits_BTE, axis=-1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sigmoid:
    """Top-k of a sigmoid plus a bias, with the sigmoid alone as gates.

    The bias balances the load without a loss (arXiv 2408.15664): after each step it is increased
    for experts below the mean load and decreased for those above, see `balancing`. Source:
    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.

    Attributes:
      normalized: whether the gates of a token's experts sum to 1, before `scale`.
      scale: factor of the gates.
      groups: the group limit; None: each token chooses among all experts.
    """

    normalized: bool = True
    scale: float = 1.0
    groups: Groups | None = None

    biased: ClassVar[bool] = True

    def weights(self, key: jax.Array, num_experts: int) -> Weights:
        """Return the bias [E], which has no gradient."""
        return {"bias": param(key, (num_experts,), ("classes",), constant(0.0), role="balance")}

    def __call__(self, own: Weights, logits_BTE: jax.Array, experts_per_token: int) -> Routes:
        """As in `Router`; a group is as good as its two best experts."""
        scores_BTE = jax.nn.sigmoid(logits_BTE)
        among = jax.lax.stop_gradient(scores_BTE) + jax.lax.stop_gradient(gather(own["bias"]))
        if self.groups is not None:
            among = self.groups.mask_groups(among, best=2)
        _, experts_BTk = jax.lax.top_k(among, experts_per_token)
        picked_BTkE = experts_BTk[..., None] == jnp.arange(scores_BTE.shape[-1])
        gates_BTk = jnp.where(picked_BTkE, scores_BTE[:, :, None], 0).sum(-1)
        if self.normalized:
            gates_BTk /= gates_BTk.sum(-1, keepdims=True) + 1e-20
        if self.scale != 1:
            gates_BTk *= self.scale
        return Routes(experts_BTk, gates_BTk, scores_BTE / scores_BTE.sum(-1, keepdims=True))
