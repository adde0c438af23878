"""Sparse attention patterns: Longformer, strided, fixed, dilated.

A pattern is the definition: `times` is its dense mask, used by kernels of all pairs, and
`nn.attention.sparse` computes its scores alone. Positions count from each document's first token,
so packing does not change a document.
Letters: T query positions, S key positions, N heads.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError, nearest_divisor, nearest_multiple, require_at_least
from jaxtrain.config.reader import configurable


class Pattern(abc.ABC):
    """Interface of a model's `attention_pattern`.

    Attributes:
      both_ways: whether it supports bidirectional attention too.
    """

    both_ways: ClassVar[bool] = False

    @abc.abstractmethod
    def times(self, query: jax.Array, key: jax.Array, heads: int) -> jax.Array:
        """Multiplicity of each key in a query's softmax, 0 if masked; [..., 1 or N, T, S].

        Args:
          query: positions [..., T] of the queries in their documents.
          key: positions [..., S] of the keys in theirs.
          heads: number of heads.
        """

    @abc.abstractmethod
    def mean_keys(self, length: int) -> float:
        """Mean number of keys that a causal query sees, over positions and heads of one
        document."""

    @abc.abstractmethod
    def rescale(self, factor: float) -> "Pattern":
        """Return the same for sequences that are `factor` times as long, of at most 2 kinds of
        heads."""

    @property
    def kinds_of_heads(self) -> int:
        """Period of the pattern over heads; each device needs a multiple of it."""
        return 1


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LongformerPattern(Pattern):
    """Sliding window with global tokens (arXiv 2004.05150, section 3.1).

    Attributes:
      window: a query attends to keys at a distance below this.
      global_tokens: number of global tokens at the beginning of each document.
    """

    window: int = 512
    global_tokens: int = 1

    both_ways: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "window")
        require_at_least(0, self, "global_tokens")

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the query sees the key, by their positions."""
        near = jnp.abs(query - key) < self.window
        return near | (key < self.global_tokens) | (query < self.global_tokens)

    def times(self, query: jax.Array, key: jax.Array, heads: int) -> jax.Array:
        """As in Pattern."""
        del heads
        return _of_pairs(self.sees(query[..., :, None], key[..., None, :]))

    def mean_keys(self, length: int) -> float:
        """As in Pattern: at most window + global_tokens."""
        position = np.arange(length)
        further = np.minimum(np.maximum(position + 1 - self.window, 0), self.global_tokens)
        return float((np.minimum(position + 1, self.window) + further).mean())

    def rescale(self, factor: float) -> "LongformerPattern":
        """As in Pattern."""
        return dataclasses.replace(
            self,
            window=_scale(self.window, factor),
            global_tokens=min(self.global_tokens, 2),
        )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class StridedPattern(Pattern):
    """The last `stride` tokens, and every stride-th before them (arXiv 1904.10509, section 4.3).

    Each head sees both (the paper's merged head). sqrt(length) is the stride of n sqrt(n) FLOPs.

    Attributes:
      stride: distance between these.
    """

    stride: int = 128

    def __post_init__(self) -> None:
        require_at_least(1, self, "stride")

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the query sees the key, which is not after it."""
        distance = query - key
        return (distance < self.stride) | (distance % self.stride == 0)

    def times(self, query: jax.Array, key: jax.Array, heads: int) -> jax.Array:
        """As in Pattern."""
        del heads
        return _of_pairs(self.sees(query[..., :, None], key[..., None, :]))

    def mean_keys(self, length: int) -> float:
        """As in Pattern: at most stride + length / stride."""
        position = np.arange(length)
        return float((np.minimum(position + 1, self.stride) + position // self.stride).mean())

    def rescale(self, factor: float) -> "StridedPattern":
        """As in Pattern."""
        return dataclasses.replace(self, stride=_scale(self.stride, factor))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedPattern(Pattern):
    """A token's own block, and the last tokens of each before it (arXiv 1904.10509, section 4.3).

    Each head sees both (the paper's merged head). sqrt(length) is the stride of n sqrt(n) FLOPs.

    Attributes:
      stride: tokens of a block.
      summary_tokens: how many of its last ones all later blocks see: the paper's c.
    """

    stride: int = 128
    summary_tokens: int = 8

    def __post_init__(self) -> None:
        require_at_least(1, self, "stride", "summary_tokens")
        if self.summary_tokens > self.stride:
            raise UserError(
                f"FixedPattern.summary_tokens={self.summary_tokens} are more than a block has "
                f"(FixedPattern.stride={self.stride}); use at most {self.stride}"
            )

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the query sees the key, which is not after it."""
        own = query // self.stride == key // self.stride
        return own | (key % self.stride >= self.stride - self.summary_tokens)

    def times(self, query: jax.Array, key: jax.Array, heads: int) -> jax.Array:
        """As in Pattern."""
        del heads
        return _of_pairs(self.sees(query[..., :, None], key[..., None, :]))

    def mean_keys(self, length: int) -> float:
        """As in Pattern: at most stride + summary_tokens length / stride."""
        position = np.arange(length)
        before = position // self.stride * self.summary_tokens
        return float((position % self.stride + 1 + before).mean())

    def rescale(self, factor: float) -> "FixedPattern":
        """As in Pattern."""
        stride = _scale(self.stride, factor)
        return FixedPattern(stride=stride, summary_tokens=min(self.summary_tokens, stride // 2))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DilatedPattern(Pattern):
    """LongNet: segments of every length, the longer the sparser (arXiv 2307.02486, section 3).

    Of a segment head j has the tokens at positions j, j + r, j + 2 r, ...: they see each other.
    Results of several pairs of a length and a ratio are summed in proportion to their softmax
    denominators (equation 10), so a key that is visible by two of them counts twice.

    Attributes:
      segment_lengths: tokens of a segment.
      dilated_ratios: r for the segments of each length; one of them is 1, so that each token is in
        one for every head.
    """

    segment_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    dilated_ratios: tuple[int, ...] = (1, 2, 4, 6, 12)

    def __post_init__(self) -> None:
        lengths, ratios = self.segment_lengths, self.dilated_ratios
        if len(lengths) != len(ratios):
            raise UserError(
                f"DilatedPattern.segment_lengths={lengths} and DilatedPattern.dilated_ratios="
                f"{ratios} are {len(lengths)} and {len(ratios)}; give one ratio for each length"
            )
        if min(lengths, default=1) < 1 or min(ratios, default=1) < 1:
            raise UserError(
                f"DilatedPattern.segment_lengths={lengths}, DilatedPattern.dilated_ratios={ratios};"
                " use at least 1 for each"
            )
        if 1 not in ratios:
            raise UserError(
                f"DilatedPattern.dilated_ratios={ratios} leaves tokens that attend to nothing, not "
                f"even themselves; one ratio must be 1, for example {(1, *ratios[1:])}"
            )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Each length with its ratio."""
        return tuple(zip(self.segment_lengths, self.dilated_ratios, strict=True))

    def times(self, query: jax.Array, key: jax.Array, heads: int) -> jax.Array:
        """As in Pattern: the number of pairs that include it."""
        head = jnp.arange(heads)[:, None, None]
        query, key = query[..., None, :, None], key[..., None, None, :]
        count = jnp.zeros((), jnp.int32)
        for length, ratio in self.pairs:
            has = (query % length % ratio == head % ratio) & (key % length % ratio == head % ratio)
            count += (query // length == key // length) & has
        return count

    def mean_keys(self, length: int) -> float:
        """As in Pattern, with multiplicity: less than the sum of lengths / ratios^2."""
        position = np.arange(length)
        return sum(
            float((position % segment // ratio + 1).mean()) / ratio for segment, ratio in self.pairs
        )

    def rescale(self, factor: float) -> "DilatedPattern":
        """As in Pattern."""
        return DilatedPattern(
            segment_lengths=tuple(_scale(length, factor) for length in self.segment_lengths),
            dilated_ratios=tuple(min(ratio, 2) for ratio in self.dilated_ratios),
        )

    @property
    def kinds_of_heads(self) -> int:
        """As in Pattern."""
        return math.lcm(*self.dilated_ratios)


def validate(
    pattern: Pattern | None, *, num_heads: int, parts: int = 1, model: str = "Model"
) -> Iterator[str]:
    """Yield an error message if a device's heads are not whole periods of the pattern.

    Args:
      pattern: the model's; None: it has none.
      num_heads: query heads of the model.
      parts: devices that they are split over: Mesh.tensor, and Mesh.context with Ulysses.
      model: the model's name, for the message.
    """
    if pattern is None or num_heads % (parts * pattern.kinds_of_heads) == 0:
        return
    kinds = pattern.kinds_of_heads
    over = f" over {parts} devices (Mesh.tensor, and Mesh.context with 'ulysses')"
    fewer = nearest_divisor(num_heads // kinds, parts) if num_heads % kinds == 0 else None
    yield (
        f"{model}.num_heads={num_heads}{over if parts > 1 else ''}: {type(pattern).__name__} has "
        f"{kinds} kinds of heads, which a device needs a multiple of; the nearest is "
        f"{nearest_multiple(num_heads, parts * kinds)}"
        + (f", or split them over {fewer}" if fewer is not None else "")
    )


def segment_positions(segment_ids_BT: jax.Array | None, length: int) -> jax.Array:
    """Position of each token in its document [1 or B, T]; a row is one document if there are no
    ids."""
    position = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids_BT is None:
        return position
    changed = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    first_BT = jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)
    return position - jax.lax.cummax(jnp.where(first_BT, position, 0), axis=1)


def _of_pairs(seen: jax.Array) -> jax.Array:
    return seen[..., None, :, :].astype(jnp.int32)


def _scale(size: int, factor: float) -> int:
    return max(round(size * factor), 2)
