"""Shared settings of recurrent models, and what follows from them.

Letters: V vocab, C classes, D embed, N of 6N.
"""

import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import jax

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.models.model import Inputs, validate_features
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.execution import HIDDEN
from jaxtrain.nn.layers import map_of_vectors
from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.recurrent.bidirectional import BothWays
from jaxtrain.nn.transformer.decoder import Decoder, Layer


class RecurrentLayer(Layer, Protocol):
    """A layer of one of them."""

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token."""
        ...


class Directed(Protocol):
    """What says whether its layers go both ways, and how wide they are."""

    @property
    def embed_dim(self) -> int: ...
    @property
    def bidirectional(self) -> bool: ...


def require_even_halves(sizes: Directed) -> None:
    """Raises UserError where two directions cannot have half of the width each."""
    if sizes.bidirectional and sizes.embed_dim % 2:
        name = type(sizes).__name__
        raise UserError(
            f"{name}.embed_dim={sizes.embed_dim} with {name}.bidirectional=True: each direction "
            f"has half of it; use {sizes.embed_dim + 1}"
        )


def one_or_both_ways(sizes: Directed, one_way: Callable[[int], RecurrentLayer]) -> RecurrentLayer:
    """A layer in as many directions, out of what one computes with a state of some width."""
    if not sizes.bidirectional:
        return one_way(sizes.embed_dim)
    half = one_way(sizes.embed_dim // 2)
    return BothWays(half, half.matmul_parameters())


class RecurrentSizes(Protocol):
    """The settings, each documented at the models, and what a `TokenModel` says by them.

    A model that is this has the settings as fields, each with a default (a dataclass would take
    the property for a missing one), and says what its `layer` is.

    Attributes:
      states: arrays [D] that a layer carries from token to token.
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
    def objective(self) -> str: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def bidirectional(self) -> bool: ...
    @property
    def features(self) -> int | None: ...

    def one_way(self, state_dim: int) -> RecurrentLayer:
        """What a layer computes in one direction, with a state of this width."""
        ...

    states: ClassVar[int] = 1
    inputs: ClassVar[Inputs] = "tokens"
    attention: None = None
    experts: None = None
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "gates": "embed_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        require_at_least(
            1, self, "vocab_size", "num_layers", "embed_dim", "context_length", "num_classes"
        )
        name = type(self).__name__
        if self.bidirectional and self.objective == "next_token":
            raise UserError(
                f"{name}.bidirectional=True with {name}.objective='next_token' would read what it "
                f"is to tell; use {name}.objective='token_classification', or False"
            )
        require_even_halves(self)
        validate_features(self)

    @property
    def layer(self) -> RecurrentLayer:
        """What every layer computes."""
        return one_or_both_ways(self, self.one_way)

    @property
    def layers(self) -> int:
        """All layers are one stack."""
        return self.num_layers

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What a layer carries; nothing where no token follows."""
        if self.objective != "next_token":
            return ()
        one = Cached(shape=(self.embed_dim,), axes=("embed",), every_token=False, dtype="float32")
        return (one,) * self.states

    def build(self, key: jax.Array) -> Decoder:
        """The module with freshly drawn parameters."""
        key_tokens, key_output, key_layers = jax.random.split(key, 3)
        shape, axes = (self.vocab_size, self.embed_dim), ("vocab", "vocab_embed")
        spread = normal(1 / math.sqrt(3 * self.embed_dim))
        told, told_axes = shape, axes
        if self.features is None:
            table = param(key_tokens, shape, axes, normal(1.0), role="embedding")
        else:
            table = map_of_vectors(key_tokens, self.features, self.embed_dim)
        if self.objective != "next_token":
            told, told_axes = (self.num_classes, self.embed_dim), ("narrow", "vocab_embed")
        return Decoder(
            self.layer,
            key_layers,
            num_layers=self.num_layers,
            token_embedding=table,
            output=param(key_output, told, told_axes, spread, role="output"),
            stream=HIDDEN,
        )

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        told = self.vocab_size if self.objective == "next_token" else self.num_classes
        around = told + (self.features or 0)
        return self.num_layers * self.layer.matmul_parameters() + around * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token: 6 N, whatever the length."""
        del sequence_length
        return 6.0 * self.matmul_parameters()

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one sequence of shape (T,), or (T, F)."""
        return shape[0] * self.flops_per_token(shape[0])
