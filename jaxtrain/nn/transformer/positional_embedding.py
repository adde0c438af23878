"""Positional embeddings: learned, sinusoidal, or a bias of attention scores.

Letters: B batch, T query length, S key length, D embed, N heads, P positions, R buckets, C copies.
"""

import dataclasses
import math
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.parameters import Weights, normal, param
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import current_layout

WAVELENGTH = 10_000.0


class PositionalEmbedding(Protocol):
    """Positional embedding of a stack of layers.

    Attributes:
      adds_to_scores: whether it is a bias in every layer instead of an input of the first.
    """

    adds_to_scores: ClassVar[bool]

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters."""
        ...

    def into_stream(self, own: Weights, x_BTD: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        """Add positions to the embedded tokens, the first of which is at position `start`."""
        ...

    def into_scores(
        self, own: Weights, queries: int, keys: int, start: jax.Array | int = 0
    ) -> jax.Array | None:
        """Bias of the scores of queries from position `start` on, as `Mask.bias_CNTS`; None:
        nothing."""
        ...


class InStream:
    """Base of positional embeddings that are added to the stream."""

    adds_to_scores: ClassVar[bool] = False

    def into_scores(
        self, own: Weights, queries: int, keys: int, start: jax.Array | int = 0
    ) -> None:
        """Nothing."""
        del own, queries, keys, start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoidal(InStream):
    """Sines and cosines of wavelengths from 2 pi to 10000 x 2 pi, without parameters.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5: sin(t / 10000^(2i/D)) in number 2i
    of the stream, the cosine in number 2i + 1.
    """

    dim: int

    def weights(self, key: jax.Array) -> Weights:
        """None."""
        del key
        return {}

    def into_stream(self, own: Weights, x_BTD: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        """As in `PositionalEmbedding`."""
        del own
        rates = WAVELENGTH ** (-np.arange(0, self.dim, 2) / self.dim)
        position_T = (start + jnp.arange(x_BTD.shape[1])).astype(jnp.float32)
        angle_T = position_T[:, None] * rates.astype(np.float32)
        both = jnp.stack([jnp.sin(angle_T), jnp.cos(angle_T)], -1)
        embedding_TD = both.reshape(len(position_T), -1)[:, : self.dim]
        return x_BTD + embedding_TD.astype(x_BTD.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned(InStream):
    """A learned vector per position.

    Attributes:
      dim: width of the stream.
      num_positions: number of positions.
      stddev: standard deviation at initialization.
    """

    dim: int
    num_positions: int
    stddev: float = 0.02

    def weights(self, key: jax.Array) -> Weights:
        """Return the table [P, D]."""
        shape, axes = (self.num_positions, self.dim), ("positions", "vocab_embed")
        return {"embedding": param(key, shape, axes, normal(self.stddev), role="position")}

    def into_stream(self, own: Weights, x_BTD: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        """As in `PositionalEmbedding`."""
        embedding_PD = gather(own["embedding"])
        embedding_TD = jax.lax.dynamic_slice_in_dim(embedding_PD, start, x_BTD.shape[1])
        return x_BTD + embedding_TD.astype(x_BTD.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative:
    """A learned bias per head and bucketed distance between query and key.

    Source: Raffel et al. 2019 (arXiv 1910.10683), section 2.1. Half of the distances' buckets hold
    one distance each, the others grow with the logarithm.

    Attributes:
      num_heads: number of heads.
      buckets: number of biases per head.
      distance: all keys from this distance on share the last bucket.
      both_ways: whether keys after the query have separate buckets, which halves them; if
        not, they are treated as at distance 0.
      stddev: standard deviation at initialization.
    """

    num_heads: int
    buckets: int
    distance: int
    both_ways: bool
    stddev: float

    adds_to_scores: ClassVar[bool] = True

    def weights(self, key: jax.Array) -> Weights:
        """Return the table [R, N]."""
        shape, axes = (self.buckets, self.num_heads), ("narrow", "heads")
        return {"distances": param(key, shape, axes, normal(self.stddev), role="position")}

    def into_stream(self, own: Weights, x_BTD: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        """Return the stream, unchanged."""
        del own, start
        return x_BTD

    def into_scores(
        self, own: Weights, queries: int, keys: int, start: jax.Array | int = 0
    ) -> jax.Array:
        """As in `PositionalEmbedding`, float32."""
        query_T1 = start + jnp.arange(queries)[:, None]
        bucket_TS = self.bucket(jnp.arange(keys)[None, :] - query_T1)
        bias_CRN = _for_each_device(gather(own["distances"]).astype(jnp.float32))
        return jnp.moveaxis(jnp.take(bias_CRN, bucket_TS, axis=1), -1, 1)

    def bucket(self, ahead_TS: jax.Array) -> jax.Array:
        """Return the bucket of keys `ahead_TS` positions ahead of the query (behind it: < 0)."""
        of_distance = jnp.asarray(self._of_distance())
        if not self.both_ways:
            return of_distance[jnp.clip(-ahead_TS, 0, self.distance)]
        after = jnp.where(ahead_TS > 0, self.buckets // 2, 0)
        return of_distance[jnp.clip(jnp.abs(ahead_TS), 0, self.distance)] + after

    def _of_distance(self) -> np.ndarray:
        """Return the bucket of every distance up to the last one with a separate bucket, int32."""
        count = self.buckets // 2 if self.both_ways else self.buckets
        single = count // 2
        far = np.arange(self.distance + 1)
        with np.errstate(divide="ignore"):
            # In float32, like published weights: a boundary must not move.
            share = np.log(far.astype(np.float32) / np.float32(single))
        share /= np.float32(math.log(self.distance / single))
        grown = single + np.nan_to_num(share * np.float32(count - single), neginf=0).astype(
            np.int32
        )
        return np.where(far < single, far, np.minimum(grown, count - 1)).astype(np.int32)


def _for_each_device(bias_RN: jax.Array) -> jax.Array:
    """Copy [C, R, N], one per device along the rows' mesh axes.

    Each device then sums its own rows' gradients of the table, and R N values are reduced
    once; with one copy N T S values would be reduced in every layer.
    """
    layout = current_layout()
    if layout is None:
        return bias_RN[None]
    rows = layout.activation(("batch",))[0]
    spec = P(rows, *jax.typeof(bias_RN).sharding.spec)
    shape = (layout.size(rows), *bias_RN.shape)
    return jax.lax.broadcast_in_dim(bias_RN, shape, (1, 2), out_sharding=spec)
