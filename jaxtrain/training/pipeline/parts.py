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
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.pipeline.stages import is_layer

Variables = list[Any]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A transformer cut into what the first, every and the last stage compute.

    Attributes:
      graphdef: the model's structure.
      structure: the tree of its parameters, and which leaves of it belong to layers.
      objective: what it is trained to do.
      execution: how its mathematics is run.
      loss: the loss's settings.
      train: whether losses carry their training terms.
    """

    graphdef: Any
    structure: tuple[Any, tuple[bool, ...]]
    objective: TokenObjective
    execution: Execution
    loss: Loss
    train: bool

    @classmethod
    def of(
        cls,
        graphdef: Any,
        params: nnx.State,
        objective: TokenObjective,
        execution: Execution,
        loss: Loss,
        *,
        train: bool,
    ) -> "Parts":
        """The parts of a model with parameters like `params`."""
        leaves, tree = jax.tree.flatten(params, is_leaf=is_variable)
        structure = tree, tuple(map(is_layer, leaves))
        return cls(graphdef, structure, objective, execution, loss, train)

    def split(self, params: nnx.State) -> tuple[Variables, Variables]:
        """The parameters of the layers, and those around them."""
        leaves = jax.tree.leaves(params, is_leaf=is_variable)
        flags = self.structure[1]
        layers = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
        return layers, [leaf for leaf, flag in zip(leaves, flags, strict=True) if not flag]

    def join(self, layers: Variables, outer: Variables) -> nnx.State:
        """The inverse of `split`."""
        tree, flags = self.structure
        layers_left, outer_left = iter(layers), iter(outer)
        return jax.tree.unflatten(
            tree, [next(layers_left) if flag else next(outer_left) for flag in flags]
        )

    def embed(self, layers: Variables, outer: Variables, micro: Batch) -> jax.Array:
        """What goes into the first layer [B, T, D]."""
        return self._model(layers, outer).embed(micro.inputs, micro.positions)

    def run_layers(
        self, layers: Variables, outer: Variables, x_BTD: jax.Array, micro: Batch, valid: Any
    ) -> tuple[jax.Array, Sums]:
        """One stage's layers: what comes out of the last, and their auxiliary sums.

        Args:
          layers: the stage's parameters, their leading dimension padded to the longest stage.
          outer: the parameters around the layers.
          x_BTD: what goes into the stage.
          micro: the microbatch.
          valid: which of the stage's places hold a layer, bool [places]; None: all do.
        """
        model, mask = self._model(layers, outer), self.objective.mask(micro)

        def run_layer(layer: Any, x_BTD: jax.Array, valid: Any) -> tuple[jax.Array, Sums]:
            y_BTD, _, auxiliary = model.run_layer(
                layer, x_BTD, micro.positions, mask, self.execution
            )
            if valid is None:
                return y_BTD, auxiliary
            # Computed and dropped, not skipped: a tick lasts as long as the longest stage anyway.
            return jnp.where(valid, y_BTD, x_BTD), jax.tree.map(lambda a: a * valid, auxiliary)

        x_BTD, auxiliary = self.execution.over_layers(run_layer, x_BTD, model.layers, valid)
        return x_BTD, jax.tree.map(lambda x: x.sum(0), auxiliary)

    def head(self, layers: Variables, outer: Variables, x_BTD: jax.Array, micro: Batch) -> Sums:
        """The objective's own sums of what comes out of the last layer."""
        model = self._model(layers, outer)
        h_BTD = model.finish(x_BTD)
        return self.objective.of_hidden(model, h_BTD, micro, self.loss, train=self.train)

    def _model(self, layers: Variables, outer: Variables) -> Any:
        return nnx.merge(self.graphdef, self.join(layers, outer))
