"""Pipeline parts of a model: first, middle and last stage.

Stages pass an activation on that may be of several arrays, each with a name. A microbatch may go
around the ring of ranks several times, each time through layers of another kind.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.execution import Execution
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.pipeline.stages import is_layer

# Named arrays: a tree of them, or what is trained and what is frozen.
Variables = Any

# What goes from stage to stage: arrays, or their shapes, by name.
Stream = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parts(abc.ABC):
    """A model cut into what the first, every and the last stage of each pass compute.

    Attributes:
      graphdef: the model's structure.
      objective: what it is trained to do.
      execution: how its mathematics is run.
      loss: the loss's settings.
      train: whether losses carry their training terms.
      padded: whether places of a stage hold no layer.
      seed: of what training draws.
      step: optimizer steps taken, whose random numbers are drawn; None draws none.
      travels: what goes from stage to stage, and the first pass between whose stages it does.
      passes: how often a microbatch goes around the ring.
    """

    graphdef: Any
    objective: Objective[Any]
    execution: Execution
    loss: Loss
    train: bool
    padded: bool
    seed: int = 0
    step: jax.Array | None = None

    travels: ClassVar[Mapping[str, int]]
    passes: ClassVar[int] = 1

    @abc.abstractmethod
    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """What goes into the first layer of a pass, of what the passes before it have made."""

    @abc.abstractmethod
    def run_layers(
        self,
        number: int,
        layers: Variables,
        outer: Variables,
        x: Stream,
        micro: Batch,
        numbers: jax.Array,
    ) -> tuple[Stream, Sums]:
        """One stage's layers: what comes out of the last, and their auxiliary sums.

        Args:
          number: of the pass.
          layers: the stage's parameters, their leading dimension padded to the longest stage.
          outer: the parameters around the layers.
          x: what goes into the stage.
          micro: the microbatch.
          numbers: the layer at each of the stage's places, -1 where there is none; int32 [places].
        """

    @abc.abstractmethod
    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """The objective's own sums of what comes out of the last layer of the last pass."""

    @property
    def enter_has_layers(self) -> bool:
        """Whether `enter` runs layers, which may have permutes."""
        return False

    @property
    def head_has_layers(self) -> bool:
        """Whether `head` runs layers of its own, which may have permutes."""
        return False

    def in_pass(self, number: int, name: str) -> bool:
        """Whether parameters of the layers belong to this pass."""
        del number, name
        return True

    def is_shared(self, name: str) -> bool:
        """Whether every layer reads a parameter that stands around them."""
        del name
        return False

    @property
    def draws(self) -> bool:
        """Whether anything is drawn."""
        return self.train and self.objective.draws

    def split(self, params: Any) -> tuple[Variables, Variables]:
        """The parameters of the layers, and those around them.

        Args:
          params: a tree of named arrays, or a tuple of such.
        """
        return _split(params, lambda _, variable: is_layer(variable))

    def of_pass(self, number: int, layers: Any) -> tuple[Variables, Variables]:
        """The layers of a pass, and those of the others."""
        return _split(layers, lambda name, _: self.in_pass(number, name))

    def split_shared(self, outer: Any) -> tuple[Variables, Variables]:
        """Of the parameters around the layers those that every layer reads, and the others."""
        return _split(outer, lambda name, _: self.is_shared(name))

    def join(self, one: nnx.State, other: nnx.State) -> nnx.State:
        """The inverse of all three."""
        return nnx.merge_state(one, other)

    def model(self, layers: Variables, outer: Variables) -> Any:
        """The module of these parameters."""
        return nnx.merge(self.graphdef, self.join(layers, outer))

    def of_micro(self, micro: Batch) -> Execution:
        """How the mathematics of a microbatch is run: with the draws of its rows."""
        if self.step is None or micro.rows is None:
            return self.execution
        draws = Draws.of_step(self.seed, self.step, micro.rows)
        return dataclasses.replace(self.execution, draws=draws)

    def over_places(
        self,
        run_layer: Callable[[Any, jax.Array, Execution], tuple[jax.Array, Sums]],
        x: jax.Array,
        stacked: Any,
        numbers: jax.Array,
        execution: Execution,
    ) -> tuple[jax.Array, Sums]:
        """The layers at a stage's places, one after the other, and their sums.

        Args:
          run_layer: one layer: its parameters, what goes in, and how it is run.
          x: what goes into the first.
          stacked: the parameters of all.
          numbers: as of `run_layers`.
          execution: how they are run.
        """

        def one(layer: Any, x: jax.Array, number: jax.Array) -> tuple[jax.Array, Sums]:
            y, auxiliary = run_layer(layer, x, execution.of_layer(number))
            if not self.padded:
                return y, auxiliary
            valid = number >= 0
            # Computed and dropped, not skipped: a tick lasts as long as the longest stage anyway.
            return jnp.where(valid, y, x), jax.tree.map(lambda a: a * valid, auxiliary)

        x, auxiliary = execution.over_layers(one, x, stacked, numbers)
        return x, jax.tree.map(lambda x: x.sum(0), auxiliary)


def crossing(way: str, name: str, first_pass: int) -> str:
    """What the exchange of a part of the stream is called in tables and programs: by its way, where
    it crosses every boundary of stages."""
    return f"{way}_{name}" if first_pass else way


def _split(params: Any, first: Callable[[str, Any], bool]) -> tuple[Variables, Variables]:
    if isinstance(params, tuple):
        one, other = zip(*(_split(part, first) for part in params), strict=True)
        return one, other
    return partition(params, first)
