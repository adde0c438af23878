"""Base of classifiers and regressors: one output per example.

Letters: B batch, C classes or regression outputs, T patches or other positions, D embed.
"""

from typing import Any, Protocol, runtime_checkable

import jax

from jaxtrain.nn.execution import Execution


class Predictor(Protocol):
    """A classifier or regressor of images or vectors."""

    def __call__(
        self, inputs: jax.Array, statistics: Any, execution: Execution, /, *, train: bool
    ) -> tuple[Any, Any]:
        """Logits or numbers [B, C], and the running statistics after this batch.

        Where the objective asks for more than one head's, a tuple of them.

        Args:
          inputs: float images [B, H, W, C], or vectors [B, D].
          statistics: the running statistics, as `nnx.split` gives them.
          execution: how the mathematics is run, and what dropout draws from.
          train: normalize with the batch's own statistics and update the running ones.
        """
        ...


@runtime_checkable
class StackedPredictor(Predictor, Protocol):
    """One in the parts that a loop over equal layers and a pipeline put together; it has no running
    statistics.

    Attributes:
      layers: the parameters of all layers, from `parameters.stack`.
    """

    layers: Any

    def embed(self, inputs: jax.Array, execution: Execution, /) -> jax.Array:
        """What goes into the first layer: [B, T, D]."""
        ...

    def run_layer(self, layer: Any, x_BTD: jax.Array, execution: Execution) -> jax.Array:
        """One layer, of these parameters."""
        ...

    def finish(self, x_BTD: jax.Array, execution: Execution) -> Any:
        """Of what comes out of the last layer logits or numbers [B, C], as of a call."""
        ...


def through_layers(model: StackedPredictor, inputs: jax.Array, execution: Execution) -> Any:
    """Logits or numbers [B, C], of all layers one after the other."""

    def run_layer(layer: Any, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        return model.run_layer(layer, x_BTD, execution), None

    x_BTD = model.embed(inputs, execution)
    x_BTD, _ = execution.over_layers(run_layer, x_BTD, model.layers)
    return model.finish(x_BTD, execution)
