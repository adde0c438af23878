"""Prefix cache: KV cache and recurrent states of a chat, kept so that only new tokens are read.

Letters: B rows, of which the first is the text, T length, S slots, V vocab.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.model import TokenModel
from jaxtrain.nn.kv_cache import Cache
from jaxtrain.run.generation.decoding import (
    LEAST_LENGTH,
    Prefix,
    counts_slots,
    next_logits,
    pad_prompts,
    prefill,
    round_up,
)
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


class PrefixCache:
    """The tokens of a text and the layers' cache of them.

    A cache of positions is cut back to the common prefix; a recurrent state, which cannot be, is
    reused only if the new text begins with the whole old one. Experts with a capacity count the
    tokens of a pass: with them everything is read again.

    Attributes:
      read: tokens of the last text that were not cached.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._kept: Prefix | None = None
        self.read = 0

    def begin(
        self, setup: Setup, sizes: TokenModel, state: TrainState, text: list[int], *, new: int
    ) -> Prefix:
        """Return a text with its cache.

        Args:
          setup: from `for_texts`.
          sizes: the model's.
          state: the trained state.
          text: its tokens, at least one.
          new: maximum number of new tokens.
        """
        # Removed at once: the following calls donate its arrays, even if they fail.
        kept, self._kept = self._kept, None
        shared = 0 if kept is None else self._count_shared(sizes, text)
        self._tokens, self.read = list(text), len(text) - shared
        if kept is None or not shared:
            tokens_BT, padding_B = pad_prompts(setup, sizes, [text])
            room = round_up(tokens_BT.shape[1] + new)
            logits_BV, cache = prefill(setup, sizes, state, tokens_BT, padding_B, room=room)
            return Prefix(logits_BV, cache, padding_B, room)
        *most, last = text[shared:]
        length = len(most)
        if _is_recurrent(sizes) and most:  # slots after the last are masked until overwritten
            context = sizes.context_length - shared
            length = round_up(len(most), least=LEAST_LENGTH, most=context)
        cache, logits_BV, rows = kept.cache, kept.logits_BV, len(kept.padding_B)
        start = int(kept.padding_B[0]) + shared
        room = round_up(max(kept.room, start + length + 1 + new))
        if room > kept.room:
            cache = _grow(sizes, cache, room=room)
        for some, width in (most, length), ([last], 1):
            if some:
                tokens_BT = np.zeros((rows, width), np.int32)
                tokens_BT[0, : len(some)] = some
                logits_BV, cache = _extend(
                    setup, state, cache, tokens_BT, kept.padding_B, start, room=room
                )
                start += len(some)
        return Prefix(logits_BV, cache, kept.padding_B, room)

    def keep(self, prefix: Prefix, cache: Cache, drawn: list[int]) -> None:
        """Store a continued text.

        Args:
          prefix: from `begin`.
          cache: of all tokens read and generated.
          drawn: the generated tokens, including those after an answer's end.
        """
        self._tokens = self._tokens + drawn
        self._kept = dataclasses.replace(prefix, cache=cache)

    def _count_shared(self, sizes: TokenModel, text: list[int]) -> int:
        """Return the number of cached tokens: never the last, whose logits are needed."""
        if counts_slots(sizes):
            return 0
        pairs = zip(self._tokens, text[:-1], strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:
            shared = min(len(self._tokens), len(text) - 1)
        return shared if _is_recurrent(sizes) or shared == len(self._tokens) else 0


def _is_recurrent(sizes: TokenModel) -> bool:
    """Whether the model has state that cannot be truncated to fewer tokens."""
    return all(one.every_token for one in sizes.cached)


@functools.partial(jax.jit, static_argnames=("setup", "room"), donate_argnames="cache")
def _extend(
    setup: Setup,
    state: TrainState,
    cache: Cache,
    tokens_BT: jax.Array,
    padding_B: jax.Array,
    start: jax.Array | int,
    *,
    room: int,
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after the last of these tokens, and the cache with them from `start` on."""
    cache = dataclasses.replace(cache, length=jnp.asarray(start, jnp.int32))
    logits_BTV, cache = next_logits(
        setup.model(state), tokens_BT, cache, padding_B, setup.execution, room=room, last=1
    )
    return logits_BTV[:, 0], cache


@functools.partial(jax.jit, static_argnames=("sizes", "room"))
def _grow(sizes: TokenModel, cache: Cache, *, room: int) -> Cache:
    """Return the cache with more slots [L, B, S, ...]."""

    def longer(x: jax.Array) -> jax.Array:
        more = [(0, 0)] * x.ndim
        more[2] = (0, room - x.shape[2])
        return jnp.pad(x, more)

    layers = tuple(
        longer(x) if one.every_token else x
        for one, x in zip(sizes.cached, cache.layers, strict=True)
    )
    return dataclasses.replace(cache, layers=layers)
