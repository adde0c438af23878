"""What models with one answer to an example have in common: inputs go in, and come out as numbers.

Letters: B batch, C classes, or the numbers that are told.
"""

from typing import Any, Protocol

import jax

from jaxtrain.nn.execution import Execution


class Predictor(Protocol):
    """A model that tells images or vectors apart, or numbers from them."""

    def __call__(
        self, inputs: jax.Array, statistics: Any, execution: Execution, *, train: bool
    ) -> tuple[Any, Any]:
        """Logits or numbers [B, C], and the running statistics after this batch.

        Where the objective asks for more than one head's, a tuple of them.

        Args:
          inputs: float images [B, H, W, C], or vectors [B, D].
          statistics: the running statistics, as `nnx.split` gives them.
          execution: how the mathematics is run, and what dropout draws from.
          train: normalise with the batch's own statistics and update the running ones.
        """
        ...
