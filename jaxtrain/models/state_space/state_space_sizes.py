"""Shared settings of state space models, and what follows from them.

Letters: B batch, T length, D embed, V vocab, N of 6N.
"""

import abc
import dataclasses
from typing import ClassVar, Protocol

import jax

from jaxtrain.config.errors import require_at_least, require_positive
from jaxtrain.models.model import Inputs
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.layers import RMSNorm
from jaxtrain.nn.parameters import Weights, normal, param, under
from jaxtrain.nn.transformer.block import pre_norm
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.language_model import Auxiliary, LayerCache
from jaxtrain.parallel.sharding import shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpaceLayer(abc.ABC):
    """x + mix(norm(x)): a layer of one of them.

    Attributes:
      embed_dim: width of the residual stream.
      state_dim: states of each channel.
      conv_width: places of the convolution.
      norm: of what goes in.
      num_layers: of the model: the more, the less each adds at first.
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
        """Freshly drawn parameters of one layer."""

    @abc.abstractmethod
    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token."""

    @abc.abstractmethod
    def other_flops(self) -> int:
        """FLOPs a token of everything else that counts, forward."""

    @abc.abstractmethod
    def mix(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """What is added to the residual stream, and the states after the last token."""

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
        """One layer, whose cache is its states; arguments and results as in `decoder.Layer`."""
        del positions_BT, start  # the order is in the recurrence

        def mix(h_BTD: jax.Array) -> tuple[jax.Array, LayerCache | None]:
            return self.mix(own, shard(h_BTD, HIDDEN), mask, execution, cache)

        with jax.named_scope(self.scope):
            x_BTD, cache = pre_norm(lambda x: self.norm(under("norm", own), x), x_BTD, mix)
        return x_BTD, cache, {}


class StateSpaceSizes(Protocol):
    """The settings, each documented at the models, and what a `TokenModel` says by them.

    A model that is this has the settings as fields, each with a default (a dataclass would take
    the property for a missing one), and says what its `layer` is.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...

    @property
    def layer(self) -> StateSpaceLayer:
        """What every layer computes."""
        ...

    objective: str = "next_token"
    inputs: ClassVar[Inputs] = "tokens"
    attention: None = None
    experts: None = None
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "mlp": "embed_dim", "layers": "num_layers",
        "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        require_at_least(
            1, self, "vocab_size", "num_layers", "embed_dim", "expand", "state_dim",
            "context_length",
        )  # fmt: skip
        require_at_least(2, self, "conv_width")
        require_positive(self, "norm_eps")

    @property
    def layers(self) -> int:
        """All layers are one stack."""
        return self.num_layers

    @property
    def norm(self) -> RMSNorm:
        """The norm before each layer, and after the last."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    def build(self, key: jax.Array) -> Decoder:
        """The module with freshly drawn parameters."""
        key_tokens, key_layers = jax.random.split(key)
        shape, axes = (self.vocab_size, self.embed_dim), ("vocab", "vocab_embed")
        return Decoder(
            self.layer,
            key_layers,
            num_layers=self.num_layers,
            token_embedding=param(key_tokens, shape, axes, normal(0.02), role="embedding"),
            norm=self.norm,
        )

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        return self.num_layers * self.layer.matmul_parameters() + self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token, whatever the length, as the recurrence is written.

        6 N, and three times what else goes forward: 2 K of each channel's convolution, 6 of each
        state (its rate, its input, two for the recurrence, two for the sum that is read).
        """
        del sequence_length
        return 6.0 * self.matmul_parameters() + 3 * self.num_layers * self.layer.other_flops()

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one sequence of shape (T,)."""
        return shape[0] * self.flops_per_token(shape[0])
