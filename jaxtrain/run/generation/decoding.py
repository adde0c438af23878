"""Batched decoding: sampling (top-k, top-p, min-p), a compiled prefill and decode loop, a KV cache.

Rows are padded on the left, so that all end at the same position; padding is a separate document,
which no token of the text sees, and positions count from the text's first token. Numbers of rows,
lengths of prompts and of answers are rounded up, so that few programs are compiled.
Letters: B rows, T length, S longest sequence, N new tokens, V vocab.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model, TokenModel, reads_tokens
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import Cache, empty_cache
from jaxtrain.nn.parameters import unstack
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.language_model import Transformer, hidden_states, logits
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import Layout, shard
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

# The active settings, by name, as scalars of a compiled program: other values of the
# same ones need no compilation. Without a temperature decoding is greedy.
Drawing = dict[str, jax.Array | float | int]
_FLOAT32 = jnp.finfo(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings, applied in this order.

    Attributes:
      repetition_penalty: logits of tokens that occur in the text so far are divided by it where
        they are positive, and multiplied where they are negative (arXiv 1909.05858); above 1
        there is less repetition. Also for greedy decoding.
      temperature: logits are divided by it; 0 is greedy decoding.
      top_k: only the k likeliest tokens, including ties; None is no limit.
      top_p: only the likeliest tokens that together have this probability (arXiv 1904.09751).
      min_p: only tokens at least this probable, relative to the likeliest (arXiv 2407.01082).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"--temperature {self.temperature}: use a finite number, 0 (greedy) or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k}: use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: use a probability above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"--min-p {self.min_p}: use a share of 0 to 1")
        validate_penalty(self.repetition_penalty)

    def drawing(self) -> Drawing:
        """Return the settings that change anything."""
        top_p, penalty = self.top_p, self.repetition_penalty
        values: dict[str, float | int | None] = {"repetition_penalty": clip_float32(penalty)}
        if self.temperature > 0:
            values["temperature"] = clip_float32(self.temperature)
            values |= {"top_k": self.top_k, "min_p": self.min_p}
            # Subtracted here, in float64: a float32 1 - top_p loses precision near 1.
            values["tail"] = None if top_p is None or top_p == 1 else 1 - top_p
        return {name: value for name, value in values.items() if value is not None}


def clip_float32(value: float | None) -> float | None:
    """Return the nearest positive float32 that is neither infinite nor below `tiny`, which XLA
    reads as 0: 0 / 0 is no number."""
    return None if value is None else min(max(value, float(_FLOAT32.tiny)), float(_FLOAT32.max))


def validate_penalty(penalty: float | None) -> None:
    """Raise UserError for an invalid repetition penalty."""
    if penalty is not None and not penalty > 0:
        raise UserError(
            f"--repetition-penalty {penalty}: use a number above 0, such as 1.2; 1 is none"
        )


def adjust_logits(logits_BV: jax.Array, seen_BV: jax.Array | None, drawing: Drawing) -> jax.Array:
    """Return the logits to sample from, float32, -inf for excluded tokens.

    Args:
      logits_BV: the model's.
      seen_BV: whether a token occurs in the text so far; None where nothing is penalized.
      drawing: from `Sampling.drawing`.
    """
    logits_BV = jnp.asarray(logits_BV, jnp.float32)
    if "repetition_penalty" in drawing:
        assert seen_BV is not None, "a penalty needs to know what there was"
        penalty = drawing["repetition_penalty"]
        penalised_BV = jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        penalised_BV = jnp.clip(penalised_BV, _FLOAT32.min, _FLOAT32.max)
        logits_BV = jnp.where(seen_BV, penalised_BV, logits_BV)
    if "temperature" not in drawing:
        return logits_BV
    # Relative to the maximum: a small temperature then gives -inf for others, never inf.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / drawing["temperature"]
    if "top_k" in drawing or "tail" in drawing:
        logits_BV = jnp.where(_keep_likeliest(logits_BV, drawing), logits_BV, -jnp.inf)
    if "min_p" in drawing:
        far = jnp.log(jnp.asarray(drawing["min_p"], jnp.float32))
        near_BV = logits_BV - logits_BV.max(-1, keepdims=True) >= far
        logits_BV = jnp.where(near_BV, logits_BV, -jnp.inf)
    return logits_BV


def _keep_likeliest(logits_BV: jax.Array, drawing: Drawing) -> jax.Array:
    """Return which tokens are within top_k and top_p.

    Ties are resolved as by transformers' TopKLogitsWarper and TopPLogitsWarper.
    """
    order_BV = jnp.argsort(logits_BV, axis=-1)
    ranked_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    keep_BV = jnp.ones(ranked_BV.shape, bool)
    if "top_k" in drawing:
        last = jnp.maximum(ranked_BV.shape[-1] - drawing["top_k"], 0)
        keep_BV = ranked_BV >= jax.lax.dynamic_index_in_dim(ranked_BV, last, axis=-1)
    if "tail" in drawing:
        # Summed from the least likely on: tokens within the tail are excluded.
        probability_BV = jax.nn.softmax(jnp.where(keep_BV, ranked_BV, -jnp.inf), axis=-1)
        keep_BV &= jnp.cumsum(probability_BV, axis=-1) > drawing["tail"]
        keep_BV |= jnp.arange(ranked_BV.shape[-1]) == ranked_BV.shape[-1] - 1
    return jnp.take_along_axis(keep_BV, jnp.argsort(order_BV, axis=-1), axis=-1)


def draw(adjusted_BV: jax.Array, keys_B: jax.Array, drawing: Drawing) -> jax.Array:
    """Return a token a row, int32 [B]: the likeliest, or by the row's own key from their
    softmax."""
    if "temperature" not in drawing:
        return adjusted_BV.argmax(-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, adjusted_BV).astype(jnp.int32)


LEAST_LENGTH = 16  # to which lengths are rounded up
# Maximum number of layers that are decoded without a loop; each adds compile time.
MOST_UNSTACKED = 16
ROWS = ("batch", "length")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts that are being generated.

    Attributes:
      cache: the layers' cache of the tokens so far, padding too; a `Cache` for `next_logits`,
        else of the function that replaces it.
      logits_BV: of the next token, float32.
      padding_B: padding before a row's text.
      seen_BV: tokens that occur in the text so far; None if no setting needs it.
      finished_B: rows that are finished.
      limit_B: maximum number of tokens of each row.
      drawn_BN: the tokens, int32.
      log_p_BN: the model's log-probability of each, before any adjustment.
      count: number of sampled tokens.
    """

    cache: Any
    logits_BV: jax.Array
    padding_B: jax.Array
    seen_BV: jax.Array | None
    finished_B: jax.Array
    limit_B: jax.Array
    drawn_BN: jax.Array
    log_p_BN: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A text that has been read.

    Attributes:
      logits_BV: of the next token.
      cache: the layers' cache of it.
      padding_B: padding before each row's text.
      room: slots of the cache.
    """

    logits_BV: jax.Array
    cache: Cache
    padding_B: np.ndarray
    room: int


def round_up(size: int, *, least: int = 1, most: int | None = None) -> int:
    """Return the power of two that is at least `size` and `least`, or `most`."""
    up = max(least, 1 << (size - 1).bit_length())
    return up if most is None else min(up, most)


def for_one_text(layout: Layout) -> Layout:
    """Return the layout with rows replicated on every device, and layers in the model's order."""
    layout = layout.with_manual("pipe")
    return dataclasses.replace(layout, split_batch=False, sequence_parallel=False)


def for_texts(setup: Setup) -> Setup:
    """Return the program that writes: rows split over the batch's devices, and nothing along
    length.

    Cached decoding always runs the reference kernel: one query per step is no work for the others.
    """
    layout = setup.layout.with_manual("pipe", "context")
    layout = dataclasses.replace(layout, sequence_parallel=False)
    execution = dataclasses.replace(setup.execution, kernel="reference", remat=POLICIES["none"])
    return dataclasses.replace(setup, layout=layout, execution=execution)


def pad_prompts(
    setup: Setup, sizes: TokenModel, prompts: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as rows int32 [B, T], and the padding before each [B].

    B and T are rounded up, B to a multiple of the batch's devices; padding rows have
    one token. T is not rounded if padding would take an expert's slots.
    """
    longest = max(len(prompt) for prompt in prompts)
    if not counts_slots(sizes):
        longest = round_up(longest, least=LEAST_LENGTH, most=sizes.context_length)
    devices = setup.layout.batch_devices()
    rows = -(-round_up(len(prompts)) // devices) * devices
    tokens_BT = np.zeros((rows, longest), np.int32)
    padding_B = np.full(rows, 0 if counts_slots(sizes) else longest - 1, np.int32)
    for row, prompt in enumerate(prompts):
        padding_B[row] = longest - len(prompt)
        tokens_BT[row, padding_B[row] :] = prompt
    return tokens_BT, padding_B


def batches(lengths: list[int], sizes: TokenModel, batch_size: int) -> Iterator[list[int]]:
    """Yield groups of prompts that are processed together: of similar lengths, or equal ones if
    they must be."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        unlike = batch and counts_slots(sizes) and lengths[number] != lengths[batch[0]]
        if len(batch) == batch_size or unlike:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@functools.cache
def counts_slots(sizes: TokenModel) -> bool:
    """Whether a row's own length determines how many of its tokens an expert takes."""
    return sizes.experts is not None and sizes.experts.capacity_factor is not None


@functools.partial(jax.jit, static_argnames=("setup", "sizes", "room"))
def prefill(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    tokens_BT: jax.Array,
    padding_B: jax.Array,
    *,
    room: int,
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] of the token after each row, and a cache of `room` slots with them in it."""
    model, dtype = setup.model(state), jnp.dtype(setup.precision.compute)
    rows = tokens_BT.shape[0]
    cache = empty_cache(sizes.cached, layers=sizes.layers, rows=rows, room=room, dtype=dtype)
    logits_BTV, cache = next_logits(
        model, tokens_BT, cache, padding_B, setup.execution, room=room, last=1
    )
    return logits_BTV[:, 0], cache


@functools.partial(jax.jit, static_argnames=("setup", "room", "following"), donate_argnames="texts")
def advance(
    setup: Setup,
    state: TrainState,
    texts: Texts,
    drawing: Drawing,
    keys_B: jax.Array,
    ends_E: jax.Array,
    until: jax.Array | int,
    *,
    room: int,
    following: Callable[..., Any] | None = None,
) -> Texts:
    """Return the texts with up to `until` tokens each, fewer if all are finished.

    Args:
      setup: from `for_texts`.
      state: the trained state.
      texts: the texts so far; donated.
      drawing: the sampling parameters.
      keys_B: random keys per row.
      ends_E: tokens that end a text.
      until: number of tokens afterwards.
      room: slots of the cache.
      following: computes the next logits; None: `next_logits`.
    """
    model: Any = setup.model(state)
    unstacks = following is None and unstacks_layers(model, setup.layout)
    if unstacks:
        model.layers = nnx.data(unstack(model.layers))
        texts = dataclasses.replace(texts, cache=texts.cache.unstack())
    following = following or next_logits

    def is_unfinished(texts: Texts) -> jax.Array:
        return (texts.count < until) & ~texts.finished_B.all()

    def step(texts: Texts) -> Texts:
        keys_of_draw_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, texts.count)
        adjusted_BV = adjust_logits(texts.logits_BV, texts.seen_BV, drawing)
        token_B = draw(adjusted_BV, keys_of_draw_B, drawing)
        log_p_BV = jax.nn.log_softmax(texts.logits_BV, axis=-1)
        log_p_B1 = jnp.take_along_axis(log_p_BV, token_B[:, None], axis=-1)
        seen_BV = texts.seen_BV
        if seen_BV is not None:
            seen_BV |= token_B[:, None] == jnp.arange(seen_BV.shape[1])
        count = texts.count + 1
        logits_BTV, cache = following(
            model, token_B[:, None], texts.cache, texts.padding_B, setup.execution,
            room=room, last=1,
        )  # fmt: skip
        return dataclasses.replace(
            texts,
            cache=cache,
            logits_BV=logits_BTV[:, 0],
            seen_BV=seen_BV,
            finished_B=texts.finished_B | jnp.isin(token_B, ends_E) | (count >= texts.limit_B),
            drawn_BN=jax.lax.dynamic_update_slice_in_dim(
                texts.drawn_BN, token_B[:, None], texts.count, axis=1
            ),
            log_p_BN=jax.lax.dynamic_update_slice_in_dim(
                texts.log_p_BN, log_p_B1, texts.count, axis=1
            ),
            count=count,
        )

    texts = jax.lax.while_loop(is_unfinished, step, texts)
    return dataclasses.replace(texts, cache=texts.cache.restack()) if unstacks else texts


def unstacks_layers(model: Transformer, layout: Layout) -> bool:
    """Whether `advance` decodes without a loop over layers.

    XLA's loop for CPUs copies every layer's weights and cache for each token. Elsewhere, and for
    deep models, programs stay unchanged.
    """
    if not isinstance(model, Decoder) or model.leading:
        return False
    is_one_cpu = layout.mesh.size == 1 and platform_of(layout.mesh) == "cpu"
    return is_one_cpu and jax.tree.leaves(model.layers)[0].shape[0] <= MOST_UNSTACKED


def next_logits(
    model: Transformer,
    tokens_BT: jax.Array,
    cache: Cache,
    padding_B: jax.Array,
    execution: Execution,
    *,
    room: int,
    last: int,
) -> tuple[jax.Array, Cache]:
    """Float32 logits after each of the last tokens, whole on every device, and the longer cache.

    Args:
      model: the model.
      tokens_BT: tokens that follow those of the cache.
      cache: of `room` slots.
      padding_B: padding before each row's text.
      execution: kernels, precision and dropout.
      room: slots of the cache.
      last: number of last tokens whose logits [B, last, V] are returned.
    """
    position_T = cache.length + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    before_B1 = padding_B[:, None]
    positions_BT = jnp.maximum(position_T - before_B1, 0)
    mask = Mask(
        query_start=cache.length,
        segment_ids_BT=shard((position_T >= before_B1).astype(jnp.int32), ROWS),
        segment_ids_BS=shard((jnp.arange(room) >= before_B1).astype(jnp.int32), ROWS),
    )
    tokens_BT, positions_BT = shard(tokens_BT, ROWS), shard(positions_BT, ROWS)
    h_BTD, longer, _ = hidden_states(model, tokens_BT, positions_BT, mask, execution, cache)
    assert longer is not None, "a cache went in"
    logits_BTV = logits(model, h_BTD[:, -last:]).astype(jnp.float32)
    if not jax.sharding.get_abstract_mesh().empty:
        # Each device samples for every row: results do not depend on the mesh.
        logits_BTV = jax.sharding.reshard(logits_BTV, P())
    return logits_BTV, longer


@functools.cache  # cached per model: called for each request
def require_text_model(model: Model, *, command: str = "generate") -> TokenModel:
    """Return the same model, one that looks back; UserError for others, in the name of a
    command."""
    if not reads_tokens(model):
        raise UserError(
            f"{command}: Train.model=@{type(model).__name__}() reads {model.inputs}; only models "
            "that read tokens generate"
        )
    if not model.cached:
        raise UserError(
            f"{command}: Train.model=@{type(model).__name__}() keeps no state of earlier tokens: "
            "it reads whole texts, and only causal models generate"
        )
    return model
