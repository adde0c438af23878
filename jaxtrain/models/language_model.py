"""Facts of language models and encoder-decoders, from their settings and their layers' parts.

Letters: S source length, T length, D embed, V vocab, N of 6N.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jaxtrain.models.model import Inputs, classifies, features_of, token_classes_of
from jaxtrain.nn.facts import AttentionFacts, ExpertsFacts, LayerFacts
from jaxtrain.nn.kv_cache import Cached

if TYPE_CHECKING:
    from jaxtrain.nn.transformer.block import Block
    from jaxtrain.nn.transformer.decoder import PredictionModule
    from jaxtrain.nn.transformer.encoder_decoder import CrossBlock


class LayerPart(Protocol):
    """A layer with facts: a `Block`, or a recurrent layer."""

    @property
    def facts(self) -> LayerFacts:
        """Its attention, its experts and what it caches."""
        ...

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""
        ...

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token besides those of these parameters."""
        ...


class LanguageModel(Protocol):
    """Facts of a model of tokens, for plans, generation and checks.

    A model that inherits this has the sizes below as fields, returns its layer from `block` and
    its module from `build`.
    """

    inputs: ClassVar[Inputs] = "tokens"
    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads",
        "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "experts": "num_experts",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...

    @property
    def block(self) -> LayerPart:
        """The layers' definition."""
        ...

    @property
    def objective(self) -> str:
        """The name of the training objective."""
        return "next_token"

    @property
    def leading(self) -> Sequence[LayerPart]:
        """The first of the `num_layers` layers, if they differ from the others."""
        return ()

    @property
    def predicting(self) -> "Sequence[PredictionModule]":
        """Modules after the layers, each of which predicts one more token in training."""
        return ()

    @functools.cached_property
    def layers(self) -> int:
        """All layers but the leading ones are one stack."""
        return self.num_layers - len(self.leading)

    @functools.cached_property
    def attention(self) -> AttentionFacts | None:
        """That of every layer."""
        return self.block.facts.attention

    @functools.cached_property
    def experts(self) -> ExpertsFacts | None:
        """Those of every layer but the leading ones."""
        return self.block.facts.experts

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What every layer caches in generation; nothing if the model classifies."""
        model: Any = self
        if classifies(model):
            return ()
        leading = len(self.leading)
        return tuple(dataclasses.replace(one, leading=leading) for one in self.block.facts.cached)

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        around = sum(part.matmul_parameters() for part in (*self.leading, *self.predicting))
        model: Any = self
        rows = self.vocab_size * (1 + len(self.predicting))
        if classifies(model):
            rows = token_classes_of(model) or 0
        rows += features_of(model) or 0
        return self.layers * self.block.matmul_parameters() + around + rows * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token: 6 N, and the attention scores or the recurrence (arXiv
        2204.02311, appendix B)."""
        layers = self.num_layers + len(self.predicting)
        others = layers * self.block.other_flops_per_token(sequence_length)
        return 6 * self.matmul_parameters() + others

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one sequence of shape (T,), or (T, F)."""
        return shape[0] * self.flops_per_token(shape[0])


class EncoderDecoderModel(Protocol):
    """Facts of a model of pairs: an encoder and a decoder of as many layers.

    A model that inherits this has the sizes below as fields, returns what a layer of each stack
    computes from `encoder` and `decoder`, and its module from `build`.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...

    @property
    def encoder(self) -> "Block":
        """The definition of the encoder's layers."""
        ...

    @property
    def decoder(self) -> "CrossBlock":
        """The definition of the decoder's layers."""
        ...

    objective: str = "sequence_to_sequence"
    inputs: ClassVar[Inputs] = "pairs"
    experts: None = None

    @property
    def layers(self) -> int:
        """Layers of each of the two stacks."""
        return self.num_layers

    @property
    def attention(self) -> AttentionFacts:
        """Of the source and to it a query sees all, of the target what is written."""
        return self.encoder.attention.facts

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What every layer of the decoder caches of the target's tokens so far."""
        return self.decoder.attention.cached

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one pair of S and T tokens: of the stacks, and of the logits."""
        return sum(self.flops_of_stacks(shape)) + 6.0 * shape[1] * self.vocab_size * self.embed_dim

    def flops_of_stacks(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Those of the encoder's layers and of the decoder's: 6 a parameter and token, scores of
        all keys, and of half of them where the target sees its own."""
        S, T = shape
        encoder, decoder = self.encoder, self.decoder
        of_memory = decoder.cross.matmul_parameters() // 2  # its keys and values
        read = S * (6 * encoder.matmul_parameters() + encoder.attention.score_flops_per_token(S))
        own = decoder.matmul_parameters() - of_memory
        scores = decoder.attention.score_flops_per_token(T) / 2
        scores += decoder.cross.score_flops_per_token(S)
        written = 6 * S * of_memory + T * (6 * own + scores)
        return self.num_layers * read, self.num_layers * written
