"""What classifiers have in common: images go in, and come out as logits.

Letters: B batch, H height, W width, C channels or classes.
"""

from typing import Any, Protocol

import jax


class Classifier(Protocol):
    """A model that tells images apart."""

    def __call__(
        self, images_BHWC: jax.Array, statistics: Any, *, train: bool
    ) -> tuple[jax.Array, Any]:
        """Logits [B, C] and the running statistics after this batch.

        Args:
          images_BHWC: float images.
          statistics: the running statistics, as `nnx.split` gives them.
          train: normalise with the batch's own statistics and update the running ones.
        """
        ...
