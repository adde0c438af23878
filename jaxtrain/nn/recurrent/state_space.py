"""State space models: the layer, the selective scan (Mamba), state space duality (SSD, Mamba 2).

Letters: B batch, T length, D embed, V vocab, K kernel size of the convolution.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

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


# -- selective scan, and causal convolution --------------------------------------------------------
# Letters: B batch, T length, F inner width, S states of a channel, K kernel size of the
# convolution, C positions of a chunk.

# Positions whose states are live at once: the backward pass recomputes those of each chunk.
CHUNK = 64

LEAST_STEP, MOST_STEP = 1e-3, 1e-1  # of a new layer's channels

STATE = ("inner_batch", "mlp", "state")


def _documents(mask: Mask, before: int) -> jax.Array | None:
    """Return the document of every position [B, before + T]; cached positions belong to the first
    token's own."""
    ids_BT = mask.segment_ids_BT
    return None if ids_BT is None else jnp.concatenate([ids_BT[:, :1]] * before + [ids_BT], axis=1)


def goes_on(mask: Mask) -> jax.Array | None:
    """Whether each position [B, T, 1] is in the document of the previous one; None: all of them
    are."""
    ids_BP = _documents(mask, 1)
    return None if ids_BP is None else (ids_BP[:, 1:] == ids_BP[:, :-1])[..., None]


def causal_convolution(
    x_BTF: jax.Array, kernel_KF: jax.Array, mask: Mask, before_BKF: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Causal convolution of each channel over K positions, and the state for the next ones.

    Args:
      x_BTF: the channels.
      kernel_KF: their weights, the last of its own position.
      mask: documents, which sums do not cross.
      before_BKF: the K - 1 positions before the first; None: zeros.

    Returns:
      The sums, and the last K - 1 positions of x and what was before it, zeros where these are not
      of the last position's document.
    """
    K, T = kernel_KF.shape[0], x_BTF.shape[1]
    if before_BKF is None:
        # Derived from x, so that it has x's sharding.
        before_BKF = jnp.concatenate([jnp.zeros_like(x_BTF[:, :1])] * (K - 1), axis=1)
    x_BPF = jnp.concatenate([before_BKF.astype(x_BTF.dtype), x_BTF], axis=1)
    ids_BP = _documents(mask, K - 1)

    def own(first: int, last: int, whose: slice) -> jax.Array:
        """x at these positions, zeros where they are of another document than the reference."""
        if ids_BP is None:
            return x_BPF[:, first:last]
        same = ids_BP[:, first:last] == ids_BP[:, whose]
        return jnp.where(same[..., None], x_BPF[:, first:last], 0)

    y_BTF = x_BTF * kernel_KF[-1]
    for shift in range(K - 1):
        y_BTF += own(shift, shift + T, slice(K - 1, None)) * kernel_KF[shift]
    return y_BTF, own(T, T + K - 1, slice(-1, None))


def selective_scan(
    x_BTF: jax.Array,
    step_BTF: jax.Array,
    decay_FS: jax.Array,
    into_BTS: jax.Array,
    out_BTS: jax.Array,
    goes_on_BT1: jax.Array | None,
    state_BFS: jax.Array | None,
    *,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """y = out . h with h = exp(step decay) h + step into x at every position, and the last h.

    Source: Gu and Dao 2023 (arXiv 2312.00752), algorithm 2, in chunks: within one an associative
    scan, from one to the next its last state. With a chunk of all positions it is that scan alone.

    Args:
      x_BTF: the input; everything is float32.
      step_BTF: the step of every channel, Delta.
      decay_FS: the rates of its states, A, below 0.
      into_BTS, out_BTS: input and output projections of the states: B and C.
      goes_on_BT1: False where a document begins and the states are reset; None: nowhere.
      state_BFS: before the first position; None: zeros.
      chunk: positions that are scanned at once.
    """
    B, T, F = x_BTF.shape
    if state_BFS is None:
        state_BFS = shard(jnp.zeros((B, F, decay_FS.shape[-1]), jnp.float32), STATE)
    if goes_on_BT1 is None:
        goes_on_BT1 = jnp.ones_like(into_BTS[..., :1], bool)
    C = min(chunk, T)
    count = math.ceil(T / C)

    def split_chunks(x: jax.Array) -> jax.Array:
        """[chunks, B, C, ...]; positions after the last have a step of 0, which changes no
        state."""
        rest = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, ((0, 0), (0, count * C - T), *rest))
        return jnp.moveaxis(x.reshape(B, count, C, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def run(state_BFS: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_BCF, step_BCF, into_BCS, out_BCS, goes_on_BC1 = tokens
        kept_BCFS = jnp.exp(step_BCF[..., None] * decay_FS)
        kept_BCFS = jnp.where(goes_on_BC1[..., None], kept_BCFS, 0)
        added_BCFS = (step_BCF * x_BCF)[..., None] * into_BCS[:, :, None]
        kept_BCFS, states_BCFS = jax.lax.associative_scan(_then, (kept_BCFS, added_BCFS), axis=1)
        states_BCFS += kept_BCFS * state_BFS[:, None]
        return states_BCFS[:, -1], (states_BCFS * out_BCS[:, :, None]).sum(-1)

    inputs = tuple(map(split_chunks, (x_BTF, step_BTF, into_BTS, out_BTS)))
    goes_on = jnp.pad(goes_on_BT1, ((0, 0), (0, count * C - T), (0, 0)), constant_values=True)
    goes_on = jnp.moveaxis(goes_on.reshape(B, count, C, 1), 1, 0)
    state_BFS, y = jax.lax.scan(run, state_BFS, (*inputs, goes_on))
    return jnp.moveaxis(y, 0, 1).reshape(B, count * C, F)[:, :T], state_BFS


def _then(first: Any, second: Any) -> Any:
    """Compose two ranges of positions: decay of the state before them, and their contribution."""
    (kept, added), (kept_after, added_after) = first, second
    return kept * kept_after, added * kept_after + added_after


def steps(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Biases that softplus maps to log-uniform steps."""
    low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return step + jnp.log(-jnp.expm1(-step))


# -- state space duality: attention within chunks, a scan between them -----------------------------
# Source: Dao and Gu 2024 (arXiv 2405.21060), listing 1. Letters: B batch, T length, N heads, P
# channels of a head, S states of a channel, C positions of a chunk.

DUAL_CHUNK = 64  # positions whose mutual scores are live at once

DUAL_STATE = ("inner_batch", "mlp", "head_dim", "state")


def state_space_dual(
    x_BTNP: jax.Array,
    step_BTN: jax.Array,
    rate_N: jax.Array,
    into_BTS: jax.Array,
    out_BTS: jax.Array,
    goes_on_BT1: jax.Array | None,
    state_BNPS: jax.Array | None,
    *,
    chunk: int = DUAL_CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """y = h out with h = exp(step rate) h + step x into at every position, and the last h.

    Args:
      x_BTNP: the input; everything is float32.
      step_BTN: the step of every head.
      rate_N: of its states, A, below 0.
      into_BTS, out_BTS: input and output projections of the states: B and C.
      goes_on_BT1: False where a document begins and the states are reset; None: nowhere.
      state_BNPS: before the first position; None: zeros.
      chunk: positions per chunk.
    """
    B, T, N, P = x_BTNP.shape
    if state_BNPS is None:
        state_BNPS = shard(jnp.zeros((B, N, P, into_BTS.shape[-1]), jnp.float32), DUAL_STATE)
    if goes_on_BT1 is None:
        goes_on_BT1 = jnp.ones_like(into_BTS[..., :1], bool)
    C = min(chunk, T)
    count = math.ceil(T / C)

    def split_chunks(x: jax.Array, *, last: float = 0.0) -> jax.Array:
        """[chunks, B, C, ...]; positions after the last have a step of 0, which changes no
        state."""
        rest = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, ((0, 0), (0, count * C - T), *rest), constant_values=last)
        return jnp.moveaxis(x.reshape(B, count, C, *x.shape[2:]), 1, 0)

    before_CC = jnp.tril(jnp.ones((C, C), bool))

    @jax.checkpoint
    def run(state_BNPS: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_BCNP, step_BCN, into_BCS, out_BCS, goes_on_BC1 = tokens
        # Cumulative log decay since the chunk's start, and the documents that start in
        # it.
        left_BCN = jnp.cumsum(step_BCN * rate_N, axis=1)
        begun_BC = jnp.cumsum(~goes_on_BC1[..., 0], axis=1, dtype=jnp.int32)
        given_BCNP = step_BCN[..., None] * x_BCNP
        same_BCC = (begun_BC[:, :, None] == begun_BC[:, None, :]) & before_CC
        left_BNC = jnp.swapaxes(left_BCN, 1, 2)
        between_BNCC = left_BNC[..., :, None] - left_BNC[..., None, :]
        # Masked positions have positive exponents: exp may be infinite, and its gradient NaN.
        kept_BNCC = jnp.exp(jnp.where(same_BCC[:, None], between_BNCC, -jnp.inf))
        scores_BCC = jnp.einsum("bts,bus->btu", out_BCS, into_BCS)
        y_BCNP = jnp.einsum("bntu,bunp->btnp", scores_BCC[:, None] * kept_BNCC, given_BCNP)
        # Decay of the states before the chunk, and of each position to the chunk's end.
        since_BCN = jnp.where((begun_BC == 0)[..., None], jnp.exp(left_BCN), 0)
        y_BCNP += jnp.einsum("bts,bnps->btnp", out_BCS, state_BNPS) * since_BCN[..., None]
        last_BC = begun_BC == begun_BC[:, -1:]
        to_end_BCN = jnp.where(last_BC[..., None], left_BCN[:, -1:] - left_BCN, -jnp.inf)
        given_BCNP *= jnp.exp(to_end_BCN)[..., None]
        state_BNPS *= since_BCN[:, -1, :, None, None]
        state_BNPS += jnp.einsum("btnp,bts->bnps", given_BCNP, into_BCS)
        return state_BNPS, y_BCNP

    inputs = tuple(map(split_chunks, (x_BTNP, step_BTN, into_BTS, out_BTS)))
    goes_on = split_chunks(goes_on_BT1, last=True)
    state_BNPS, y = jax.lax.scan(run, state_BNPS, (*inputs, goes_on))
    return jnp.moveaxis(y, 0, 1).reshape(B, count * C, N, P)[:, :T], state_BNPS
