"""Trainable/frozen partition of a model's parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxtrain.parallel.sharding import Layout, shardings

# Trained and frozen parameters: each a tree of named arrays.
Weights = tuple[nnx.State, nnx.State]

TEACHER = "teacher"  # name of the teacher in a student model


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Partition of a model's parameters into trained and frozen ones, and its inverse.

    Attributes:
      frozen: names of the frozen parameters, such as `layers/up`.
      teacher_zero: as in `Layout.zero`, for a teacher's parameters; None: the layout's.
    """

    frozen: frozenset[str] = frozenset()
    teacher_zero: int | None = dataclasses.field(default=None, kw_only=True)

    def frozen_shardings(self, frozen: nnx.State, layout: Layout) -> nnx.State:
        """Return a NamedSharding for each frozen array of a state."""
        teacher, others = partition(frozen, lambda name, _: name.startswith(f"{TEACHER}/"))
        theirs = self.teacher_layout(layout)
        return nnx.merge_state(
            shardings(others, layout.parameter, layout),
            shardings(teacher, theirs.parameter, theirs),
        )

    def teacher_layout(self, layout: Layout) -> Layout:
        """Return the layout of a teacher's parameters next to a model in this layout."""
        zero = layout.zero if self.teacher_zero is None else self.teacher_zero
        return dataclasses.replace(layout, zero=zero)

    @property
    def draws(self) -> bool:
        """Whether training uses random numbers, for which rows are numbered."""
        return False

    def splits_more(self, layout: Layout) -> bool:
        """Whether a teacher is sharded over fsdp while gradients are summed over it once per step:
        each device then has all parameters, so sums have the same order."""
        return layout.zero < 2 and self.teacher_layout(layout).zero == 3

    def draw(self, shapes: nnx.State, key: jax.Array) -> nnx.State:
        """Initialize parameters that are trained in addition to the model's own: none
        here.

        Args:
          shapes: of the model's parameters, its layers in their order.
          key: the random key.
        """
        del shapes, key
        return nnx.State({})

    def begin(self, params: nnx.State, adapters: nnx.State) -> Weights:
        """Partition a model's parameters into trained and frozen ones.

        Args:
          params: the model's.
          adapters: from `draw`, sharded and ordered like the parameters.
        """
        del adapters
        return partition(params, lambda name, _: name not in self.frozen)

    def join(self, weights: Weights) -> nnx.State:
        """Merge trained and frozen parameters into those of the model, or of any part such as its
        layers.
        """
        trained, frozen = weights
        return nnx.merge_state(trained, frozen) if self.frozen else trained

    def merge(self, weights: Weights) -> nnx.State:
        """Return the model's parameters in the form of a run that trains them all."""
        return self.join(weights)


def partition(state: nnx.State, first: Callable[[str, Any], bool]) -> Weights:
    """Partition a state by `first(name, variable)`: where it holds, and the rest."""
    parts: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    for path, variable in nnx.to_flat_state(state):
        parts[0 if first("/".join(map(str, path)), variable) else 1][path] = variable
    one, other = map(nnx.from_flat_state, parts)
    return one, other


def part(tree, names: frozenset[str]):  # noqa: ANN001, ANN201 - of any pytree with States in it
    """Return the tree with only the variables of these names in each State."""
    return over_states(lambda state: partition(state, lambda name, _: name in names)[0], tree)


def join(parts: Sequence[Any]) -> Any:
    """Join the States of several trees; other leaves are the first tree's."""
    return over_states(lambda *states: nnx.merge_state(*states), *parts)


def over_states(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `function` to the States of trees; other leaves are the first tree's."""

    def one(first: Any, *others: Any) -> Any:
        return function(first, *others) if isinstance(first, nnx.State) else first

    return jax.tree.map(one, *trees, is_leaf=lambda x: isinstance(x, nnx.State))
