"""Shared experts, applied to every token in addition to its routed ones.

Letters: B batch, T length, D embed, X size 1 of a gate.
"""

import dataclasses
from typing import ClassVar

import jax

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import ExpertsFacts
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.moe.experts import Experts
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, normal, param, under
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.nn.transformer.mlp import SwiGLU
from jaxtrain.parallel.sharding import shard


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
