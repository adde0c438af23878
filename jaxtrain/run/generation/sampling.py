"""Sampling: temperature, top-k, top-p, min-p, penalties.

Letters: B rows, V vocab.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError

# The settings that are in force, by name, as scalars of a compiled program: other values of the
# same ones compile nothing. Without a temperature the likeliest token is taken.
Drawing = dict[str, jax.Array | float | int]
_FLOAT32 = jnp.finfo(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; what is set holds together, from top to bottom.

    Attributes:
      repetition_penalty: logits of tokens that stand in the text so far are divided by it where
        they are positive, and multiplied where they are negative (arXiv 1909.05858); above 1
        there is less repetition. Also where the likeliest token is taken.
      temperature: logits are divided by it; 0 always takes the likeliest token.
      top_k: only the k likeliest tokens, and those that equal the last of them; None is no limit.
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
        """The settings that change anything."""
        top_p, penalty = self.top_p, self.repetition_penalty
        values: dict[str, float | int | None] = {"repetition_penalty": clip_float32(penalty)}
        if self.temperature > 0:
            values["temperature"] = clip_float32(self.temperature)
            values |= {"top_k": self.top_k, "min_p": self.min_p}
            # Subtracted here, in float64: a float32 1 - top_p loses the digits of one near 1.
            values["tail"] = None if top_p is None or top_p == 1 else 1 - top_p
        return {name: value for name, value in values.items() if value is not None}


def clip_float32(value: float | None) -> float | None:
    """The nearest positive float32 that is neither infinite nor below `tiny`, which XLA reads as 0:
    0 / 0 is no number."""
    return None if value is None else min(max(value, float(_FLOAT32.tiny)), float(_FLOAT32.max))


def validate_penalty(penalty: float | None) -> None:
    """Raises UserError where a repetition penalty is none."""
    if penalty is not None and not penalty > 0:
        raise UserError(
            f"--repetition-penalty {penalty}: use a number above 0, such as 1.2; 1 is none"
        )


def adjust_logits(logits_BV: jax.Array, seen_BV: jax.Array | None, drawing: Drawing) -> jax.Array:
    """The logits to draw from, float32: of what is cut off -inf.

    Args:
      logits_BV: the model's.
      seen_BV: whether a token stands in the text so far; None where nothing is penalised.
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
    # Relative to the largest: a small temperature makes -inf of the others, and no inf of it.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / drawing["temperature"]
    if "top_k" in drawing or "tail" in drawing:
        logits_BV = jnp.where(_likeliest(logits_BV, drawing), logits_BV, -jnp.inf)
    if "min_p" in drawing:
        far = jnp.log(jnp.asarray(drawing["min_p"], jnp.float32))
        near_BV = logits_BV - logits_BV.max(-1, keepdims=True) >= far
        logits_BV = jnp.where(near_BV, logits_BV, -jnp.inf)
    return logits_BV


def _likeliest(logits_BV: jax.Array, drawing: Drawing) -> jax.Array:
    """Which tokens are among the likeliest, by number and by their probability together.

    Ties are resolved as by transformers' TopKLogitsWarper and TopPLogitsWarper.
    """
    order_BV = jnp.argsort(logits_BV, axis=-1)
    ranked_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    keep_BV = jnp.ones(ranked_BV.shape, bool)
    if "top_k" in drawing:
        last = jnp.maximum(ranked_BV.shape[-1] - drawing["top_k"], 0)
        keep_BV = ranked_BV >= jax.lax.dynamic_index_in_dim(ranked_BV, last, axis=-1)
    if "tail" in drawing:
        # Summed from the least likely on: what together stays within the tail is cut off.
        probability_BV = jax.nn.softmax(jnp.where(keep_BV, ranked_BV, -jnp.inf), axis=-1)
        keep_BV &= jnp.cumsum(probability_BV, axis=-1) > drawing["tail"]
        keep_BV |= jnp.arange(ranked_BV.shape[-1]) == ranked_BV.shape[-1] - 1
    return jnp.take_along_axis(keep_BV, jnp.argsort(order_BV, axis=-1), axis=-1)


def draw(adjusted_BV: jax.Array, keys_B: jax.Array, drawing: Drawing) -> jax.Array:
    """A token a row, int32 [B]: the likeliest, or by the row's own key from their softmax."""
    if "temperature" not in drawing:
        return adjusted_BV.argmax(-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, adjusted_BV).astype(jnp.int32)
