"""Shared settings of decoders with grouped-query attention and RoPE."""

import dataclasses
from typing import Any, ClassVar, Literal, Protocol

from jaxtrain.config.errors import (
    UserError,
    nearest_divisor,
    nearest_multiple,
    require_at_least,
    require_positive,
)
from jaxtrain.models.model import AttentionFacts
from jaxtrain.models.transformers.decoder_sizes import DecoderSizes
from jaxtrain.nn.attention import patterns
from jaxtrain.nn.attention.grouped_query import GroupedQuery, Local
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.transformer.rotary import Linear, Rotary, Rotations, Yarn

RopeType = Literal["llama3", "yarn", "linear"]


class GroupedQuerySizes(DecoderSizes, Protocol):
    """The settings, each documented at `Llama`, and what a `TokenModel` says by them.

    A model that is this has the settings as fields, each with a default (a dataclass would take
    the property for a missing one), says which it has besides, and what its `block` is.
    """

    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads",
        "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "layers": "num_layers",
        "vocab_embed": "embed_dim",
    }  # fmt: skip

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...

    # What most have not: a model that has it has the setting.

    @property
    def rope_type(self) -> RopeType:
        return "llama3"

    @property
    def rope_fraction(self) -> float:
        return 1.0

    @property
    def rope_whole_pairs(self) -> bool:
        """As in `Yarn`."""
        return True

    @property
    def rope_low_frequency_factor(self) -> float:
        return 1.0

    @property
    def rope_high_frequency_factor(self) -> float:
        return 4.0

    @property
    def rope_original_context_length(self) -> int:
        return 8192

    @property
    def head_dim(self) -> int | None:
        """None: embed_dim / num_heads."""
        return None

    @property
    def qkv_bias(self) -> bool:
        return False

    @property
    def out_bias(self) -> bool:
        return False

    @property
    def sinks(self) -> bool:
        return False

    @property
    def qk_norm(self) -> bool:
        return False

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by besides."""
        return 1.0

    @property
    def global_every(self) -> int | None:
        """Every so manieth layer sees all tokens, the others a window; None: all layers alike."""
        return None

    @property
    def local_rotary(self) -> Rotations:
        """How positions turn queries and keys of those others."""
        return self.rotary

    @property
    def local(self) -> Local | None:
        """The layers between those that see all tokens; `sliding_window` is theirs then."""
        if self.global_every is None:
            return None
        assert self.sliding_window is not None, "layers differ by their window"
        numbers = range(1, self.num_layers + 1)
        return Local(
            layers=tuple(number % self.global_every != 0 for number in numbers),
            window=self.sliding_window,
            rotary=self.local_rotary,
        )

    @property
    def attention_pattern(self) -> Pattern | None:
        """Which of the tokens before it a query sees; None: all of them, or of a window."""
        return None

    @property
    def attention_softcap(self) -> float | None:
        """The bound that scores are flattened towards; None: none."""
        return None

    def check(self) -> None:
        """Raises UserError for a size under 1, or heads, a window or rotations that do not fit."""
        name = type(self).__name__
        require_at_least(
            1, self, "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads",
            "mlp_dim", "context_length", "rope_original_context_length",
        )  # fmt: skip
        require_positive(self, "rope_theta", "norm_eps")
        if self.global_every is not None:
            require_at_least(1, self, "global_every")
        for setting in ("attention_softcap", "logit_softcap"):
            if getattr(self, setting) is not None:
                require_positive(self, setting)
        # The halves of a head are rotated against each other, so its width is even.
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise UserError(
                f"{name}.head_dim={self.head_dim} is no even number above 0; the nearest is "
                f"{nearest_multiple(self.head_dim, 2)}"
            )
        if self.head_dim is None and self.embed_dim % (2 * self.num_heads):
            pair = 2 * self.num_heads
            nearest = nearest_multiple(self.embed_dim, pair)
            raise UserError(
                f"{name}.embed_dim={self.embed_dim} does not divide by twice {name}.num_heads="
                f"{self.num_heads}; the nearest embed_dim is {nearest}"
            )
        if self.num_heads % self.num_kv_heads:
            nearest = nearest_divisor(self.num_heads, self.num_kv_heads)
            raise UserError(
                f"{name}.num_kv_heads={self.num_kv_heads} does not divide {name}.num_heads="
                f"{self.num_heads}; the nearest num_kv_heads is {nearest}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError(
                f"{name}.sliding_window={self.sliding_window}; use None or at least 1 token"
            )
        if self.sliding_window is not None and self.attention_pattern is not None:
            raise UserError(
                f"{name}.sliding_window={self.sliding_window} with {name}.attention_pattern=@"
                f"{type(self.attention_pattern).__name__}(): use one of them; @LongformerPattern() "
                "has a window"
            )
        for said in patterns.validate(self.attention_pattern, num_heads=self.num_heads, model=name):
            raise UserError(said)
        if self.rope_scaling < 1:
            raise UserError(f"{name}.rope_scaling={self.rope_scaling}; use 1.0 (none) or more")
        turned = int(self.key_dim * self.rope_fraction)
        if not 0 < self.rope_fraction <= 1 or turned < 2 or turned % 2:
            raise UserError(
                f"{name}.rope_fraction={self.rope_fraction} turns {turned} of the {self.key_dim} "
                "dimensions of a head; use 1.0 (all) or what leaves an even number above 0"
            )
        if self.rope_type != "llama3" and self.rope_scaling == 1:
            raise UserError(
                f"{name}.rope_type={self.rope_type!r} does nothing with {name}.rope_scaling=1.0; "
                "use the longer context over the original one, such as 4.0, or 'llama3'"
            )
        if not 0 < self.rope_low_frequency_factor < self.rope_high_frequency_factor:
            raise UserError(
                f"{name}.rope_low_frequency_factor={self.rope_low_frequency_factor} is not below "
                f"{name}.rope_high_frequency_factor={self.rope_high_frequency_factor} and above 0; "
                "Llama 3.1 has 1.0 and 4.0, YaRN 1.0 and 32.0"
            )

    @property
    def key_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention(self) -> AttentionFacts:
        """Grouped-query attention, of every layer."""
        return self.grouped_query.facts

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values."""
        return self.attention.keys_and_values

    @property
    def rotary(self) -> Rotations:
        """How positions turn queries and keys."""
        if self.rope_type == "linear":
            return Linear(theta=self.rope_theta, scaling=self.rope_scaling)
        settings: dict[str, Any] = {
            "theta": self.rope_theta,
            "scaling": self.rope_scaling,
            "low_frequency_factor": self.rope_low_frequency_factor,
            "high_frequency_factor": self.rope_high_frequency_factor,
            "original_context_length": self.rope_original_context_length,
        }
        if self.rope_type == "yarn":
            return Yarn(**settings, whole_pairs=self.rope_whole_pairs)
        return Rotary(**settings)

    @property
    def grouped_query(self) -> GroupedQuery:
        """The block's attention."""
        return GroupedQuery(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_dim,
            rotary=self.rotary,
            window=self.sliding_window if self.local is None else None,
            residual_stddev=self.residual_stddev,
            biases=self.qkv_bias,
            norm=dataclasses.replace(self.norm, dim=self.key_dim) if self.qk_norm else None,
            turned=None if self.rope_fraction == 1 else int(self.key_dim * self.rope_fraction),
            query_scale=self.query_scale,
            local=self.local,
            pattern=self.attention_pattern,
            softcap=self.attention_softcap,
            sinks=self.sinks,
            out_bias=self.out_bias,
        )
