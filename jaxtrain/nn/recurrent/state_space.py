"""Layer of a state space model, and the decoder and checks that its models share.

Letters: B batch, T length, D embed, V vocab, K kernel size of the convolution.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax

from jaxtrain.config.errors import require_at_least, require_positive
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import LayerFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.parameters import Weights, normal, param, under
from jaxtrain.nn.transformer.block import pre_norm
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.sharding import shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpaceLayer(abc.ABC):
    """x + mix(norm(x)), where `mix` has a state.

    Attributes:
      embed_dim: width of the residual stream.
      state_dim: states of each channel.
      conv_width: positions of the convolution.
      norm: of the input.
      num_layers: of the model; scales initialization.
      scope: its operations' name in profiles.
    """

    embed_dim: int
    state_dim: int
    conv_width: int
    norm: RMSNorm
    num_layers: int

    scope: ClassVar[str]

    @abc.abstractmethod
    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters of one layer."""

    @property
    @abc.abstractmethod
    def cached(self) -> tuple[Cached, ...]:
        """Its cached arrays, of a size independent of length."""

    @property
    def facts(self) -> LayerFacts:
        """Facts of the layer: what it caches."""
        return LayerFacts(cached=self.cached)

    @abc.abstractmethod
    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""

    @abc.abstractmethod
    def other_flops(self) -> int:
        """Other forward FLOPs per token: 2 K per channel of the
        convolution, 6 per state (its rate, its input, two for the recurrence, two for the output
        sum)."""

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Three times those forward, whatever the length."""
        del sequence_length
        return 3 * self.other_flops()

    @abc.abstractmethod
    def mix(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Return the update of the residual stream, and the states after the last token."""

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
        """Run one layer, whose cache is its states; arguments and results as in `decoder.Layer`."""
        del positions_BT, start  # positions are implicit in the recurrence

        def mix(h_BTD: jax.Array) -> tuple[jax.Array, LayerCache | None]:
            return self.mix(own, shard(h_BTD, HIDDEN), mask, execution, cache)

        with jax.named_scope(self.scope):
            x_BTD, cache = pre_norm(lambda x: self.norm(under("norm", own), x), x_BTD, mix)
        return x_BTD, cache, {}


def state_space_decoder(sizes: Any, key: jax.Array) -> Decoder:
    """Return a decoder of newly initialized layers with tied embeddings.

    Args:
      sizes: the model's settings, whose `block` is a `StateSpaceLayer`.
      key: for the parameters.
    """
    key_tokens, key_layers = jax.random.split(key)
    shape, axes = (sizes.vocab_size, sizes.embed_dim), ("vocab", "vocab_embed")
    block = sizes.block
    return Decoder(
        block,
        key_layers,
        num_layers=sizes.num_layers,
        token_embedding=param(key_tokens, shape, axes, normal(0.02), role="embedding"),
        norm=block.norm,
    )


def validate_state_space(sizes: Any) -> None:
    """Raise UserError if one of the settings that these models share is out of range."""
    require_at_least(
        1, sizes, "vocab_size", "num_layers", "embed_dim", "expand", "state_dim", "context_length"
    )
    require_at_least(2, sizes, "conv_width")
    require_positive(sizes, "norm_eps")
