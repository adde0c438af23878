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
        """Logits or regression outputs [B, C], and the running statistics after this batch.

        A tuple of them if the objective uses several heads.

        Args:
          inputs: float images [B, H, W, C], or vectors [B, D].
          statistics: the running statistics, from `nnx.split`.
          execution: kernels, precision and dropout.
          train: normalize with the batch's own statistics and update the running ones.
        """
        ...


@runtime_checkable
class StackedPredictor(Predictor, Protocol):
    """A predictor of stacked layers, for the layer loop and pipelines; it has no running
    statistics.

    Attributes:
      layers: the parameters of all layers, from `parameters.stack`.
    """

    layers: Any

    def embed(self, inputs: jax.Array, execution: Execution, /) -> jax.Array:
        """Input of the first layer: [B, T, D]."""
        ...

    def run_layer(self, layer: Any, x_BTD: jax.Array, execution: Execution) -> jax.Array:
        """Run one layer with these parameters."""
        ...

    def finish(self, x_BTD: jax.Array, execution: Execution) -> Any:
        """Logits or regression outputs [B, C] from the last layer's output."""
        ...


def through_layers(model: StackedPredictor, inputs: jax.Array, execution: Execution) -> Any:
    """Logits or regression outputs [B, C] of all layers."""

    def run_layer(layer: Any, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        return model.run_layer(layer, x_BTD, execution), None

    x_BTD = model.embed(inputs, execution)
    x_BTD, _ = execution.over_layers(run_layer, x_BTD, model.layers)
    return model.finish(x_BTD, execution)
