"""Interface of encoder-decoder modules.

Letters: B batch, S source length, T target length, D embed.
"""

from typing import Any, Protocol

import jax

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.cache import Cache
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer.language_model import TellsTokens


class PairModule(TellsTokens, Protocol):
    """Sources to a memory, of which each module has its own form, and targets out of it."""

    def encode(self, source_BS: jax.Array, mask: Mask, execution: Execution, /) -> Any:
        """What was read of the sources; the mask has their segment ids, and is not causal."""
        ...

    def decode(
        self,
        tokens_BT: jax.Array,
        memory: Any,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
        /,
    ) -> jax.Array:
        """Finished hidden states [B, T, D] of targets from their beginning on.

        Args:
          tokens_BT: the targets' tokens so far, each row from its first.
          memory: what `encode` gave.
          mask: which of the targets' tokens a token sees.
          of_memory: which of the memory's it sees.
          execution: how the mathematics is run.
        """
        ...

    def remember(self, memory: Any, execution: Execution, /) -> Any:
        """What generation keeps of the memory: made once, and read for every token. The second
        dimension of each array is the row, as of a cache, so that beams can be distinguished."""
        ...

    def go_on(
        self,
        tokens_BT: jax.Array,
        remembered: Any,
        of_memory: Mask,
        execution: Execution,
        cache: Cache,
        /,
    ) -> tuple[jax.Array, Cache]:
        """Finished hidden states [B, T, D] of what follows the targets' tokens of a cache, and the
        cache with it; the other arguments are as of `decode`."""
        ...
