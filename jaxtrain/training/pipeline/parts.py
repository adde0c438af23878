"""A transformer cut into what the first, every and the last stage of a pipeline compute.

Letters: B batch, T length, D embed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer import enter
from jaxtrain.training.finetune.tuning import told_apart
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.pipeline.stages import is_layer

# Named arrays: a tree of them, or what is trained and what is frozen.
Variables = Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """A transformer cut into what the first, every and the last stage compute.

    Attributes:
      graphdef: the model's structure.
      objective: what it is trained to do.
      execution: how its mathematics is run.
      loss: the loss's settings.
      train: whether losses carry their training terms.
      padded: whether places of a stage hold no layer.
    """

    graphdef: Any
    objective: TokenObjective
    execution: Execution
    loss: Loss
    train: bool
    padded: bool

    def split(self, params: Any) -> tuple[Variables, Variables]:
        """The parameters of the layers, and those around them.

        Args:
          params: a tree of named arrays, or a tuple of such.
        """
        if isinstance(params, tuple):
            layers, outer = zip(*map(self.split, params), strict=True)
            return layers, outer
        return told_apart(params, lambda _, variable: is_layer(variable))

    def join(self, layers: nnx.State, outer: nnx.State) -> nnx.State:
        """The inverse of `split`."""
        return nnx.merge_state(layers, outer)

    def embed(self, layers: Variables, outer: Variables, micro: Batch) -> jax.Array:
        """What goes into the first of the equal layers [B, T, D]."""
        model, mask = self._model(layers, outer), self.objective.mask(micro)
        assert micro.positions is not None, "a batch of text has positions"
        return enter(model, micro.inputs, micro.positions, mask, self.execution)[0]

    def run_layers(
        self,
        layers: Variables,
        outer: Variables,
        x_BTD: jax.Array,
        micro: Batch,
        numbers: jax.Array,
    ) -> tuple[jax.Array, Sums]:
        """One stage's layers: what comes out of the last, and their auxiliary sums.

        Args:
          layers: the stage's parameters, their leading dimension padded to the longest stage.
          outer: the parameters around the layers.
          x_BTD: what goes into the stage.
          micro: the microbatch.
          numbers: the layer at each of the stage's places, -1 where there is none; int32 [places].
        """
        model, mask = self._model(layers, outer), self.objective.mask(micro)

        def run_layer(layer: Any, x_BTD: jax.Array, number: jax.Array) -> tuple[jax.Array, Sums]:
            y_BTD, _, auxiliary = model.run_layer(
                layer, x_BTD, micro.positions, mask, self.execution.of_layer(number)
            )
            if not self.padded:
                return y_BTD, auxiliary
            valid = number >= 0
            # Computed and dropped, not skipped: a tick lasts as long as the longest stage anyway.
            return jnp.where(valid, y_BTD, x_BTD), jax.tree.map(lambda a: a * valid, auxiliary)

        x_BTD, auxiliary = self.execution.over_layers(run_layer, x_BTD, model.layers, numbers)
        return x_BTD, jax.tree.map(lambda x: x.sum(0), auxiliary)

    def head(self, layers: Variables, outer: Variables, x_BTD: jax.Array, micro: Batch) -> Sums:
        """The objective's sums of what comes out of the last layer."""
        model = self._model(layers, outer)
        h_BTD = model.finish(x_BTD)
        return self.objective.of_finished(
            model, h_BTD, micro, self.execution, self.loss, train=self.train
        )

    def _model(self, layers: Variables, outer: Variables) -> Any:
        return nnx.merge(self.graphdef, self.join(layers, outer))
