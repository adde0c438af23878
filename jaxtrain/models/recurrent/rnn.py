"""RNN, GRU and LSTM language models: embedding, stacked recurrent layers, output matrix.

Sources: Elman 1990, "Finding Structure in Time"; Cho et al. 2014 (arXiv 1406.1078); Hochreiter and
Schmidhuber 1997, "Long Short-Term Memory", stacked as in Zaremba et al. 2014 (arXiv 1409.2329),
without its dropout.
"""

import dataclasses
import math
from typing import Any, Literal

import jax

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.models.model import validate_features
from jaxtrain.nn.execution import HIDDEN
from jaxtrain.nn.layers import map_of_vectors
from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.recurrent.lstm import LSTMLayer
from jaxtrain.nn.recurrent.recurrent import (
    RecurrentLayer,
    gru_layer,
    in_directions,
    rnn_layer,
    validate_directions,
)
from jaxtrain.nn.transformer.decoder import Decoder

# The setting of each logical axis's size: for messages about sizes that do not divide.
_SETTINGS = {
    "vocab": "vocab_size", "embed": "embed_dim", "gates": "embed_dim", "layers": "num_layers",
    "vocab_embed": "embed_dim",
}  # fmt: skip


def _validate(sizes: Any) -> None:
    """Raise UserError if one of the settings is out of range or does not fit the others."""
    require_at_least(
        1, sizes, "vocab_size", "num_layers", "embed_dim", "context_length", "num_classes"
    )
    name = type(sizes).__name__
    if sizes.bidirectional and sizes.objective == "next_token":
        raise UserError(
            f"{name}.bidirectional=True with {name}.objective='next_token' would read the tokens "
            f"it must predict; use {name}.objective='token_classification', or False"
        )
    validate_directions(sizes)
    validate_features(sizes)


def _decoder(sizes: Any, key: jax.Array) -> Decoder:
    """Return the module of newly initialized layers between an embedding, or a linear map of
    vectors that replace tokens, and an output matrix of tokens or of classes."""
    key_tokens, key_output, key_layers = jax.random.split(key, 3)
    D, axes = sizes.embed_dim, ("vocab", "vocab_embed")
    shape, output_axes = (sizes.vocab_size, D), axes
    if sizes.features is None:
        table = param(key_tokens, shape, axes, normal(1.0), role="embedding")
    else:
        table = map_of_vectors(key_tokens, sizes.features, D)
    if sizes.objective != "next_token":
        shape, output_axes = (sizes.num_classes, D), ("narrow", "vocab_embed")
    spread = normal(1 / math.sqrt(3 * D))
    return Decoder(
        sizes.block,
        key_layers,
        num_layers=sizes.num_layers,
        token_embedding=table,
        output=param(key_output, shape, output_axes, spread, role="output"),
        stream=HIDDEN,
    )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RNN(LanguageModel):
    """Sizes of an Elman network as a language model.

    Attributes:
      vocab_size: rows of the embedding table and of the output matrix.
      num_layers: recurrent layers.
      embed_dim: width of the embedding and of every layer's state.
      context_length: the longest sequence, in tokens; the state is reset at its beginning
        and at that of every document.
      objective: 'next_token'; or 'token_classification', with an output matrix of classes.
      num_classes: number of classes; for 'token_classification' alone.
      bidirectional: whether each layer reads in both directions, with half of embed_dim each.
      features: size of the vector that is read at each position instead of a token; None:
        tokens are read. For 'token_classification' alone.
    """

    vocab_size: int = 10000
    num_layers: int = 2
    embed_dim: int = 650
    context_length: int = 1024
    objective: Literal["next_token", "token_classification"] = "next_token"
    num_classes: int = 2
    bidirectional: bool = False
    features: int | None = None

    settings = _SETTINGS
    __post_init__ = _validate
    build = _decoder

    @property
    def block(self) -> RecurrentLayer:
        """The layers' definition."""
        return in_directions(self, rnn_layer)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GRU(LanguageModel):
    """Sizes of a GRU language model.

    Attributes:
      vocab_size: rows of the embedding table and of the output matrix.
      num_layers: recurrent layers.
      embed_dim: width of the embedding and of every layer's state.
      context_length: the longest sequence, in tokens; the state is reset at its beginning
        and at that of every document.
      objective: 'next_token'; or 'token_classification', with an output matrix of classes.
      num_classes: number of classes; for 'token_classification' alone.
      bidirectional: whether each layer reads in both directions, with half of embed_dim each.
      features: size of the vector that is read at each position instead of a token; None:
        tokens are read. For 'token_classification' alone.
    """

    vocab_size: int = 10000
    num_layers: int = 2
    embed_dim: int = 650
    context_length: int = 1024
    objective: Literal["next_token", "token_classification"] = "next_token"
    num_classes: int = 2
    bidirectional: bool = False
    features: int | None = None

    settings = _SETTINGS
    __post_init__ = _validate
    build = _decoder

    @property
    def block(self) -> RecurrentLayer:
        """The layers' definition."""
        return in_directions(self, gru_layer)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTM(LanguageModel):
    """Sizes of an LSTM language model; the defaults are the medium one of arXiv 1409.2329.

    Attributes:
      vocab_size: rows of the embedding table and of the output matrix.
      num_layers: LSTM layers.
      embed_dim: width of the embedding and of every layer's state.
      context_length: the longest sequence, in tokens; the state is reset at its beginning
        and at that of every document.
      objective: 'next_token'; or 'token_classification', with an output matrix of classes.
      num_classes: number of classes; for 'token_classification' alone.
      bidirectional: whether each layer reads in both directions, with half of embed_dim each.
      features: size of the vector that is read at each position instead of a token; None:
        tokens are read. For 'token_classification' alone.
    """

    vocab_size: int = 10000
    num_layers: int = 2
    embed_dim: int = 650
    context_length: int = 1024
    objective: Literal["next_token", "token_classification"] = "next_token"
    num_classes: int = 2
    bidirectional: bool = False
    features: int | None = None

    settings = _SETTINGS
    __post_init__ = _validate
    build = _decoder

    @property
    def block(self) -> RecurrentLayer:
        """The layers' definition."""
        return in_directions(self, LSTMLayer)
