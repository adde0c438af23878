"""Transformer block: attention, and an MLP or experts, each with its norm and residual.

A part is a frozen dataclass. Its fields define the computation, `weights` initializes its
parameters, and a call computes with them. The parameters of all parts of a block are stored side by
side under their own names: a block's structure does not show in a checkpoint.
Letters: B batch, T length, D embed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.dropout import Dropout
from jaxtrain.nn.execution import HIDDEN as HIDDEN  # in addition to RESIDUAL, for models
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.facts import AttentionFacts, LayerFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache
from jaxtrain.nn.normalization import Norm
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, under
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.language_model import Auxiliary

RESIDUAL = ("batch", "residual_length", "embed")


class Attends(Protocol):
    """The token-mixing part of a block.

    Attributes:
      num_keys: number of random keys of `weights`.
    """

    num_keys: ClassVar[int]

    @property
    def facts(self) -> AttentionFacts:
        """Facts for kernels and plans."""
        ...

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Its cached arrays."""
        ...

    def weights(self, keys: jax.Array) -> Weights:
        """Initialize the parameters."""
        ...

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""
        ...

    def score_flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token of attention scores and their sums."""
        ...

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
        cache: LayerCache | None,
        start: jax.Array | int,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Return the update of the residual stream, and the extended cache.

        Args:
          own: the parameters.
          h_BTD: the normalized stream, sharded like the stream: `Execution.project` gathers it.
          positions_BT: positions of the tokens in their documents.
          mask: which keys a query sees, the part's own window aside.
          execution: the kernel, and the precision of the matmuls.
          out: logical axes of the result.
          cache: the cached arrays, or None.
          start: the position in the cache where the new ones go.
        """
        ...


class Feeds(Protocol):
    """The position-wise part of a block.

    Attributes:
      num_keys: number of random keys of `weights`.
      scope: its name in profiles and plans.
    """

    num_keys: ClassVar[int]
    scope: ClassVar[str]

    def weights(self, keys: jax.Array) -> Weights:
        """Initialize the parameters."""
        ...

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""
        ...

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the update of the residual stream, sharded by `out`, and auxiliary sums.

        The input is sharded like the stream, or gathered along length.
        """
        ...


# A part with everything but its input: maps it to the stream's update, and extras.
Part = Callable[[jax.Array], tuple[jax.Array, Any]]

# Placement of the norm of a part: (norm with its parameters, stream, part) -> new stream, extras.
Placement = Callable[[Callable[[jax.Array], jax.Array], jax.Array, Part], tuple[jax.Array, Any]]


def pre_norm(
    norm: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, part: Part
) -> tuple[jax.Array, Any]:
    """x + part(norm(x)) (arXiv 2002.04745)."""
    y_BTD, found = part(norm(x_BTD))
    return x_BTD + y_BTD, found


def post_norm(
    norm: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, part: Part
) -> tuple[jax.Array, Any]:
    """norm(x + part(x)) (arXiv 1706.03762)."""
    y_BTD, found = part(x_BTD)
    return norm(x_BTD + y_BTD), found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x)), or with the norms elsewhere.

    Attributes:
      attention, mlp: the parts.
      norm: the norm of each.
      placement: before or after a part.
      after: norm of each part's output, before it is added; None: none.
      dropout: of each part's output, in training; the first is attention's.
    """

    attention: Attends
    mlp: Feeds
    norm: Norm
    placement: Placement = pre_norm
    after: Norm | None = None
    dropout: Dropout = Dropout()

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters of all parts, for `parameters.stack`."""
        first = self.attention.num_keys
        keys = jax.random.split(key, first + self.mlp.num_keys)
        after = {} if self.after is None else self.after.weights(key)
        return merge_weights(
            add_prefix("attention_norm", self.norm.weights(key)),
            self.attention.weights(keys[:first]),
            add_prefix("after_attention_norm", after),
            add_prefix("mlp_norm", self.norm.weights(key)),
            self.mlp.weights(keys[first:]),
            add_prefix("after_mlp_norm", after),
        )

    @property
    def facts(self) -> LayerFacts:
        """Parameters of both parts."""
        return LayerFacts(
            attention=self.attention.facts,
            experts=getattr(self.mlp, "facts", None),  # an MLP has no auxiliary sums
            cached=self.attention.cached,
        )

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""
        return self.attention.matmul_parameters() + self.mlp.matmul_parameters()

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token of the attention scores."""
        return self.attention.score_flops_per_token(sequence_length)

    def __call__(
        self,
        own: Weights,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Run one layer; arguments and results as in `Transformer.run_layer`."""

        def attend(h_BTD: jax.Array) -> tuple[jax.Array, LayerCache | None]:
            y_BTD, extended = self.attention(
                own, h_BTD, positions_BT, mask, execution, out=RESIDUAL, cache=cache, start=start
            )
            y_BTD = name_activation(y_BTD, "attention_out")
            return finish("after_attention_norm", y_BTD, 0), extended

        def feed(h_BTD: jax.Array) -> tuple[jax.Array, Auxiliary]:
            y_BTD, auxiliary = self.mlp(own, h_BTD, mask, execution, out=RESIDUAL)
            return finish("after_mlp_norm", y_BTD, 1), auxiliary

        def norm_of(name: str) -> Callable[[jax.Array], jax.Array]:
            return lambda x_BTD: self.norm(under(name, own), x_BTD)

        def finish(name: str, y_BTD: jax.Array, number: int) -> jax.Array:
            if self.after is not None:
                y_BTD = self.after(under(name, own), y_BTD)
            return self.dropout(y_BTD, execution.draws, execution.layer, number=number)

        with jax.named_scope("attention"):
            x_BTD, cache = self.placement(norm_of("attention_norm"), x_BTD, attend)
        with jax.named_scope(self.mlp.scope):
            x_BTD, auxiliary = self.placement(norm_of("mlp_norm"), x_BTD, feed)
        return x_BTD, cache, auxiliary
