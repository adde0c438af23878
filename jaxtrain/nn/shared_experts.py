"""Experts that every token goes through beside those that its router chose: a part of a block."""

import dataclasses
from typing import ClassVar

import jax

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.experts import Experts
from jaxtrain.nn.mlp import SwiGLU
from jaxtrain.nn.parameters import Weights, prefixed, together, under
from jaxtrain.nn.transformer import Auxiliary


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """shared(x) + routed(x): DeepSeekMoE (arXiv 2401.06066, section 3.2).

    Attributes:
      shared: all of the shared experts, which side by side are one wide SwiGLU.
      routed: the others.
    """

    shared: SwiGLU
    routed: Experts

    num_keys: ClassVar[int] = SwiGLU.num_keys + Experts.num_keys
    scope: ClassVar[str] = "experts"

    def weights(self, keys: jax.Array) -> Weights:
        """Of both, the shared ones' names after "shared"."""
        first = self.shared.num_keys
        shared = prefixed("shared", self.shared.weights(keys[:first]))
        return together(shared, self.routed.weights(keys[first:]))

    def matmul_parameters(self) -> int:
        """Of both, for a token."""
        return self.shared.matmul_parameters() + self.routed.matmul_parameters()

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> tuple[jax.Array, Auxiliary]:
        """The sum of both; arguments and results as in `block.Feeds`."""
        routed_BTD, auxiliary = self.routed(own, h_BTD, mask, execution, out=out)
        with jax.named_scope(self.shared.scope):
            shared_BTD, _ = self.shared(under("shared", own), h_BTD, mask, execution, out=out)
        return shared_BTD + routed_BTD, auxiliary
