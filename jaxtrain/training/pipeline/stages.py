"""Layer-to-stage assignment."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.parameters import is_layer
from jaxtrain.parallel.sharding import is_variable, logical_axes
from jaxtrain.training.pipeline.schedules import cut_layers


@dataclasses.dataclass(frozen=True)
class Stages:
    """Assignment of a model's layers to pipeline stages.

    They are placed on the ranks by `table.stage_on`. The stacked parameters are kept in
    stage order: rank after rank, chunk after chunk, each chunk padded to the longest stage, so that
    sharding the "layers" dimension over `pipe` gives every rank its own layers.

    Attributes:
      ranks: devices along `pipe`.
      cut: layers of each stage, the first stage first.
      folded: whether the stages go down the ranks and back up, as a V.
    """

    ranks: int
    cut: tuple[int, ...]
    folded: bool = False

    @property
    def longest(self) -> int:
        """Number of layers in the longest stage, to which chunks are padded."""
        return max(self.cut)

    @property
    def chunks(self) -> int:
        """Number of stages on each rank (virtual stages)."""
        return len(self.cut) // self.ranks

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Layer at each index of the stage order, -1 for padding; int32 [slots]."""
        # Imported here: most runs have no stages.
        from jaxtrain.training.pipeline.table import stage_on

        first = np.cumsum((0, *self.cut))
        slots = []
        for rank in range(self.ranks):
            for chunk in range(self.chunks):
                stage = stage_on(rank, chunk, self.ranks, folded=self.folded)
                layers = range(first[stage], first[stage + 1])
                slots += [*layers, *[-1] * (self.longest - len(layers))]
        return np.array(slots, np.int32)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """Whether each index holds a layer; bool [slots]."""
        return self.order >= 0

    def to_stages(self, tree: Any) -> Any:
        """Return named arrays with their layers in stage order, zeros as padding."""
        return rearrange(tree, range(sum(self.cut)), self.order.tolist())

    def to_layers(self, tree: Any) -> Any:
        """Return named arrays with their layers in the model's order."""
        return rearrange(tree, self.order.tolist(), range(sum(self.cut)))


def deal(params: nnx.State, ranks: int, chunks: int, *, folded: bool = False) -> Stages:
    """Return a model's stages: contiguous runs of layers, balanced by cost.

    The longest stage has ceil(layers / stages) layers, so that no rank keeps more than it must;
    within that, the stage with the output matrix gets fewer.

    Args:
      params: the parameters' shapes, in the model's order.
      ranks: devices along `pipe`.
      chunks: stages on each of them.
      folded: as in `Stages`.
    """
    sizes = {True: 0, False: 0}
    count, output = 0, 0
    for variable in jax.tree.leaves(params, is_leaf=is_variable):
        shape, axes = variable.get_value().shape, logical_axes(variable)
        if is_layer(variable):
            count = shape[0]
        sizes[is_layer(variable)] += math.prod(shape)
        if axes[0] == "vocab":
            output = math.prod(shape)  # tied or not, the output matrix is one [V, D]
    last_cost = output / (sizes[True] / count)
    stages = ranks * chunks
    longest = math.ceil(count / stages)
    return Stages(ranks, cut_layers(count, stages, last_cost=last_cost, longest=longest), folded)


def rearrange(tree: Any, present: Sequence[int], wanted: Sequence[int]) -> Any:
    """Reorder the layers of named arrays from the order `present` to the order `wanted`.

    Args:
      tree: parameters, or optimizer state; what has no layers is unchanged.
      present: the layer in each slot, -1 for padding.
      wanted: likewise; padding becomes zeros.
    """
    slots = {layer: slot for slot, layer in enumerate(present)}
    # A slot beyond the last is filled with zeros.
    index = np.array([len(present) if n < 0 else slots[n] for n in wanted], np.int32)

    def one(variable: Any) -> Any:
        if not (is_variable(variable) and is_layer(variable)) or list(present) == list(wanted):
            return variable
        value = variable.get_value()
        return variable.replace(jnp.take(value, index, axis=0, mode="fill", fill_value=0))

    return jax.tree.map(one, tree, is_leaf=is_variable)
