"""Gradual unfreezing: parameters that are frozen until a step.

Equivalent to PyTorch's `requires_grad = False` until then: no gradient in any norm, no decay,
no moment; and a rule's counts, such as for Adam's debiasing, start then. Layers of one
array may be unfrozen at different steps. Source: Howard & Ruder 2018 (arXiv 1801.06146), section
3.3.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.parallel.sharding import by_name, logical_axes
from jaxtrain.training.finetune.tuning import join, over_states, part
from jaxtrain.training.optimizers import groups
from jaxtrain.training.optimizers.groups import LAYERS, Part, by_layer, each_named, factors_of

_NONE = frozenset[str]()


class Waiting(NamedTuple):
    """Optimizer state of a rule whose parameters do not all start with the first step.

    Attributes:
      rule: the rule's own, with the counts of parameters that are trained from the start.
      later: for each later step in order, the counts from there on.
    """

    rule: Any
    later: tuple[list[jax.Array], ...]


@dataclasses.dataclass(frozen=True)
class Unfreezing:
    """Steps at which frozen parameters start to be trained.

    Attributes:
      steps: pattern, as in `Optimizer.learning_rates` -> number of frozen steps;
        the first match counts, and others are trained from the start.
    """

    steps: tuple[tuple[str, int], ...] = ()

    def mask_gradients(self, grads: Any, step: jax.Array, layers: Sequence[int] | None) -> Any:
        """Return gradients, or updates, with zeros for parameters that are still frozen.

        Args:
          grads: named arrays.
          step: int32 scalar, optimizer steps taken.
          layers: as in `moments.keep_moments`.
        """
        if not self.steps:
            return grads

        def one(name: str, grad: Any) -> Any:
            if self.starts(name, grad) == {0}:
                return grad
            open_now = step >= self._start(name, grad, layers)
            return jax.tree.map(lambda g: jnp.where(_along(open_now, g), g, 0), grad)

        return each_named(one, grads)

    def holding_back(self) -> optax.GradientTransformationExtraArgs:
        """Return `mask_gradients` as a transformation of updates; its update takes `step` and
        `layers`.
        """

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            del params
            return self.mask_gradients(updates, extra["step"], extra.get("layers")), state

        return optax.GradientTransformationExtraArgs(optax.identity().init, update)

    def waiting(self, rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Return the rule without the parameters that are still frozen; its update takes `step` and
        `layers`.

        The rule must update each parameter and each of its layers on its own.

        It is computed once per step value, over the arrays with a layer of that value.
        """
        of_rule = optax.with_extra_args_support(rule)
        steps = sorted({0, *dict(self.steps).values()})

        def init(params: Any) -> Waiting:
            state = of_rule.init(params)
            counts = jax.tree.leaves(part(state, _NONE))
            # Copies: a step donates its state's buffers, which must be distinct.
            return Waiting(
                state, tuple([jnp.array(x, copy=True) for x in counts] for _ in steps[1:])
            )

        def update(
            updates: Any, state: Any, params: Any = None, **extra: Any
        ) -> tuple[Any, Waiting]:
            step = extra.pop("step")
            form = jax.tree.structure(part(state.rule, _NONE))
            given = [part(state.rule, _NONE), *map(form.unflatten, state.later)]
            found = jax.tree.map(jnp.zeros_like, updates), state.rule
            counted = []
            for start, counts in zip(steps, given, strict=True):
                names = frozenset(
                    name for name, param in by_name(params).items() if start in
                    self.starts(name, param)
                )  # fmt: skip
                mine, kept, own, more = (
                    part(tree, names) for tree in (updates, state.rule, params, extra)
                )
                moved, after = of_rule.update(mine, join([counts, kept]), own, **more)
                counted.append(_restart_counts(step >= start, part(after, _NONE), counts))
                opened = {
                    name: self._unfrozen_mask(name, param, start, step, extra.get("layers"))
                    for name, param in by_name(own).items()
                }
                found = _take_opened(opened, (moved, after), found)
            updates, after = found
            later = tuple(jax.tree.leaves(counts) for counts in counted[1:])
            return updates, Waiting(join([counted[0], after]), later)

        return optax.GradientTransformationExtraArgs(init, update)

    def starts(self, name: str, param: Any) -> set[int]:
        """Return the steps at which parts of a parameter are unfrozen; 0 is from the start."""
        parts = self.parts(name, param)
        last = {0} if not (parts and parts[-1][0].is_whole) else set()
        return {int(start) for _, start in parts} | last

    def _start(self, name: str, param: Any, layers: Sequence[int] | None) -> int | jax.Array:
        """Return the step at which a parameter is unfrozen, or that of each layer of a
        stacked one.
        """
        parts, starts = self.parts(name, param), self.starts(name, param)
        if len(starts) == 1:
            return starts.pop()
        assert logical_axes(param)[0] == LAYERS, "what is stacked is so first"
        num_layers = jax.tree.leaves(param)[0].shape[0]
        return by_layer(parts, jnp.zeros(num_layers, jnp.int32), layers)

    def _unfrozen_mask(
        self, name: str, param: Any, start: int, step: jax.Array, layers: Sequence[int] | None
    ) -> bool | jax.Array:
        """Return whether each index of an array is unfrozen from this `start` on, by this step."""
        own = self._start(name, param, layers)
        if isinstance(own, int):
            return True if own == 0 else step >= start
        return (own == start) & (step >= start)

    def parts(self, name: str, param: Any) -> list[tuple[Part, float]]:
        """Return the parts of a parameter that are named with a step, as `factors_of` does."""
        return factors_of(dict(self.steps), name, param)


def _along(mask: bool | jax.Array, x: jax.Array) -> jax.Array:
    """Return a mask of layers, broadcast to an array's elements."""
    mask = jnp.asarray(mask)
    return mask.reshape(-1, *[1] * (x.ndim - 1)) if mask.ndim else mask


def _take_opened(opened: Mapping[str, bool | jax.Array], new: Any, old: Any) -> Any:
    """Return `old` with the elements that `opened` selects by name taken from `new`, which may lack
    some.
    """

    def of_states(old: Any, new: Any) -> Any:
        found = dict(nnx.to_flat_state(new))
        after = {}
        for path, was in nnx.to_flat_state(old):
            mask = opened.get("/".join(map(str, path)), False)
            after[path] = was if mask is False else found[path]
            if not isinstance(mask, bool):
                after[path] = jax.tree.map(
                    lambda a, b, mask=mask: jnp.where(_along(mask, a), a, b), found[path], was
                )
        return nnx.from_flat_state(after)

    return over_states(of_states, old, new)


def _restart_counts(is_open: jax.Array, new: Any, old: Any) -> Any:
    """Return counts from the unfreezing step on, except the learning rate's, which is the run's."""

    def one(new: Any, old: Any) -> Any:
        return new if _of_schedule(new) else jnp.where(is_open, new, old)

    return jax.tree.map(one, new, old, is_leaf=_of_schedule)


def _of_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)


def validate(steps: Mapping[str, int], params: Any, *, last: int, trains: bool) -> Iterator[str]:
    """Yield an error message for each reason why these settings cannot be used.

    Args:
      steps: `Finetune.unfreeze`.
      params: the trained parameters; shapes suffice.
      last: the run's last step.
      trains: whether the run trains.
    """
    if not steps:
        return
    yield from groups.validate("Finetune.unfreeze", steps, params)
    for pattern, start in steps.items():
        if trains and start >= last:
            yield (
                f"Finetune.unfreeze: {pattern!r} starts after {start} steps, but the run ends "
                f"after Train.steps={last}; use at most {last - 1}, or Finetune.freeze, which "
                "stores no moments"
            )
    waits = Unfreezing(tuple(steps.items()))
    if not any(0 in waits.starts(name, param) for name, param in by_name(params).items()):
        yield (
            f"Finetune.unfreeze={dict(steps)!r} leaves no parameter to train at the first step; "
            "give those that train first the step 0, or no pattern"
        )
