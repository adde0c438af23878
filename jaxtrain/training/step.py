"""The train step as a record of pure functions, built from a setup and modified by transforms.

A transform maps the builder of a step to the builder of another one: sharpness takes two
gradients where the inner step takes one, a guard judges the inner step's gradient before
the inner update. `compose.py` has their order.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.nn.parameters import Statistic
from jaxtrain.nn.precision import to_master
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD
from jaxtrain.parallel.compilation import run_once
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import Layout, by_name, reshard, shardings
from jaxtrain.training.finetune.tuning import Tuning, partition
from jaxtrain.training.guard import FIRST_LOSS_SCALE, select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.optimizers.rule import EvaluationParams
from jaxtrain.training.optimizers.schedule import rate_taken
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import Gradient, TrainState, Updated, with_shardings

MOST_BYTES = 2**44  # of a device: larger models are typos, whose creation would not finish
_ADAPTERS = 0x10A  # folded into the key of the parameters: adapters have their own random numbers


class Files(Protocol):
    """Part of a state in files, which compiled programs do not take: offload to disk."""

    def in_memory(self, state: TrainState) -> TrainState:
        """Return the part of the state that is not in files."""
        ...

    def attach(self, state: TrainState, before: TrainState | None = None) -> TrainState:
        """Return the whole state for one in memory.

        Args:
          state: in memory.
          before: its files keep their content, except for arrays of `state`;
            None: they are created, for the optimizer's first state.
        """
        ...

    def restore(self, state: TrainState, read: Callable[[Callable[..., Any]], Any]) -> TrainState:
        """Return the whole state for one in memory, reading the files one parameter at a time.

        Args:
          state: in memory.
          read: reads the part of the whole state that its argument selects of the abstract one.
        """
        ...

    def finisher(
        self, options: Mapping[str, str]
    ) -> Callable[[TrainState, TrainState, Any], TrainState]:
        """Return the function that finishes a step, to be called with the layout active.

        It takes the whole state before the step, the state in memory after it and what the step
        left pending, and returns the whole state.

        Args:
          options: of XLA, by name.
        """
        ...


class Step(NamedTuple):
    """Pure functions of a train step and of its state.

    Attributes:
      setup: its ingredients.
      build: returns the same composition for another setup.
      init: key, parameters to start from or None -> a new state; the same key gives the same bits
        on every mesh. Parameters, and running statistics with them, are in the form of a state of
        `base_step`; missing ones are initialized.
      shardings: state or its shapes -> a NamedSharding for every array.
      gradient: state, batch, counts or None -> Gradient. The counts are what sums are divided by,
        as in `Objective.counts`; None: this batch's.
      update: state, Gradient -> Updated.
      current_state: state -> the base step's, with the parameters that training resumes from; the
        optimizer's state may be left out.
      eval_state: state -> the base step's, with the parameters that are evaluated, generated with
        and exported: averages, if any.
      set_weights: state, parameters, statistics in the form of `current_state`'s -> the state with
        them; moments are kept, averages of the parameters restart.
      files: the part of a state in files; None: all of it is in memory.
    """

    setup: Setup
    build: Callable[[Setup], "Step"]
    init: Callable[..., TrainState]
    shardings: Callable[[TrainState], TrainState]
    gradient: Callable[..., Gradient]
    update: Callable[[TrainState, Gradient], Updated]
    current_state: Callable[[TrainState], TrainState]
    eval_state: Callable[[TrainState], TrainState]
    set_weights: Callable[[TrainState, nnx.State, nnx.State], TrainState]
    files: Files | None = None

    def rebuild(self, **changes: Any) -> "Step":
        """Return the same composition for a setup with other fields."""
        return self.build(self.setup.replace(**changes))

    def train_step(self, state: TrainState, batch: Batch) -> Updated:
        """Run one optimizer step.

        Args:
          state: the part for compiled programs (`in_memory`); donated.
          batch: the global batch.

        Returns:
          The new state and the metrics `loss` (mean over the targets that count), `grad_norm`
          (before clipping), `learning_rate` and the objective's own; all stay on the devices.
        """
        return self.update(state, self.gradient(state, batch))

    def in_memory(self, state: TrainState) -> TrainState:
        """Return the part of a state that compiled programs take."""
        return state if self.files is None else self.files.in_memory(state)

    def attach_files(self, state: TrainState, before: TrainState | None = None) -> TrainState:
        """Return the whole state for one in memory; arguments as in `Files.attach`."""
        return state if self.files is None else self.files.attach(state, before)

    def shapes(self) -> TrainState:
        """Return the state's shapes and dtypes; the key is only traced, so that no device
        is used.
        """
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def abstract_state(self) -> TrainState:
        """Return the state's shapes, dtypes and shardings; no array is made."""
        shapes = self.shapes()
        return with_shardings(shapes, self.shardings(shapes))

    def create(self, seed: int, params: nnx.State | None = None) -> TrainState:
        """Create a new state, sharded from the start: no device ever holds more than its shards.

        Args:
          seed: of initialization.
          params: the parameters to start from, as in `init`; donated.
        """

        def init(key: jax.Array, params: nnx.State | None) -> TrainState:
            return self.in_memory(self.init(key, params))

        shapes = self.in_memory(self.shapes())
        out = self.shardings(shapes)
        _require_possible_size(shapes, out)
        platform = platform_of(self.setup.layout.mesh)
        how = {"out_shardings": out, "donate_argnums": 1}
        # Traced without an ambient mesh: XLA then shards the random number generation itself.
        with contextlib.nullcontext() if params is None else self.setup.layout.active():
            made = run_once(init, platform, jax.random.key(seed), params, **how)
            return self.attach_files(made)


Build = Callable[[Setup], Step]
Transform = Callable[[Build], Build]


def transform(function: Callable[..., Step]) -> Callable[..., Transform]:
    """Turn `function(step, *settings) -> step` into `function(*settings) -> Transform`.

    The resulting step is rebuilt with the transform: otherwise `rebuild` would lose it.
    """

    @functools.wraps(function)
    def with_settings(*settings: Any, **named: Any) -> Transform:
        def wrap(build: Build) -> Build:
            def rebuilt(setup: Setup) -> Step:
                return function(build(setup), *settings, **named)._replace(build=rebuilt)

            return rebuilt

        return functools.update_wrapper(wrap, function)

    return with_settings


def apply_transforms(build: Build, *transforms: Transform) -> Build:
    """Return the builder wrapped in each transform, the first one innermost."""
    for one in transforms:
        build = one(build)
    return build


def base_step(setup: Setup) -> Step:
    """Return the synchronous step: one gradient of the whole batch, one update of the optimizer."""
    layout = setup.layout

    def init(key: jax.Array, params: nnx.State | None = None) -> TrainState:
        _, drawn, statistics = nnx.split(setup.build(key), nnx.Param, Statistic)
        given = {} if params is None else by_name(params)
        missing = partition(drawn, lambda name, _: name not in given)[0]
        missing = _to_stages(setup, to_master(missing, setup.precision.params))
        found = nnx.merge_state(statistics, missing, *([] if params is None else [params]))
        statistics, params = partition(found, lambda _, x: isinstance(x, Statistic))
        adapters = setup.tuning.draw(drawn, jax.random.fold_in(key, _ADAPTERS))
        adapters = jax.tree.map(lambda x: x.astype(setup.precision.params), adapters)
        params, frozen = setup.tuning.begin(params, _to_stages(setup, adapters))
        scale = setup.precision.loss_scale
        first = FIRST_LOSS_SCALE if scale == "dynamic" else 1.0 if scale is None else scale
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=setup.optimizer.init(params),
            statistics=statistics,
            loss_scale=jnp.array([first, 0.0], jnp.float32),
            frozen=frozen,
        )

    def state_shardings(state: TrainState) -> TrainState:
        of: dict[str, Any] = {
            "step": layout.sharding_of(P()),
            "params": setup.storage.shardings(layout, state.params),
            "opt_state": shardings(state.opt_state, layout.moment, layout),
            "statistics": shardings(state.statistics, layout.weight, layout),
            "loss_scale": layout.sharding_of(P()),
            "frozen": setup.tuning.frozen_shardings(state.frozen, layout),
        }
        return TrainState(**of)

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        return Gradient(*setup.gradients(state, batch, counts), exchange=state.exchange)

    @jax.named_scope("optimizer")
    def update(state: TrainState, found: Gradient) -> Updated:
        metrics = dict(found.metrics)
        metrics.pop(EXPERT_LOAD, None)
        # From here each device updates its own shard of everything (ZeRO 1 and up).
        grads = reshard(found.grads, layout.moment, layout)
        old = state.replace(params=reshard(state.params, layout.moment, layout))
        extra: dict[str, Any] = {"value": metrics["loss"], "step": state.step}
        for name, (due, tree) in found.extra.items():
            extra[name] = due, reshard(tree, layout.moment, layout)
        if "grad_norm" not in metrics:  # a guard has judged it
            metrics["grad_norm"] = optax.global_norm(grads)
        if layout.mesh.size == 1 and platform_of(layout.mesh) == "cpu":
            grads = _after_backward(grads, metrics["grad_norm"])
        params, opt_state, pending = setup.apply(setup, old, grads, found.good, extra)
        rate = rate_taken(setup.schedule, old.opt_state, opt_state, old.step)
        new = old.replace(
            step=state.step + 1,
            params=setup.storage.store(layout, params),
            opt_state=opt_state,
            statistics=select(found.good, found.statistics, old.statistics),
            exchange=found.exchange,
        )
        return Updated(new, {**metrics, "learning_rate": rate}, pending)

    def eval_state(state: TrainState) -> TrainState:
        average = averaged_params(state.opt_state, state.params)
        if average is None:
            return state
        average = jax.tree.map(lambda x, like: x.astype(like.dtype), average, state.params)
        if layout.zero in (1, 2):  # else it is there already
            with layout.active():
                average = _to_parameter_sharding(average, layout)
        return state.replace(params=average)

    def set_weights(state: TrainState, params: nnx.State, statistics: nnx.State) -> TrainState:
        opt_state = restart_averages(state.opt_state, reshard(params, layout.moment, layout))
        return state.replace(params=params, opt_state=opt_state, statistics=statistics)

    return Step(
        setup=setup,
        build=base_step,
        init=init,
        shardings=state_shardings,
        gradient=gradient,
        update=update,
        current_state=lambda state: state,
        eval_state=eval_state,
        set_weights=set_weights,
    )


def _after_backward(grads: nnx.State, norm: jax.Array) -> nnx.State:
    """Make each gradient depend on all others, by a factor of 1.

    XLA for CPUs orders programs by what depends on what alone: without a clipped norm it copies
    every parameter first, since another layer's gradient might still read it while it is updated.
    """
    one = jnp.where(norm < 0, 0.0, 1.0)  # XLA does not know that no norm is below 0
    return jax.tree.map(lambda g: g * one.astype(g.dtype), grads)


def averaged_params(opt_state: optax.OptState, params: Any) -> Any | None:
    """Return the parameters for evaluation from an optimizer state, float32; None if it
    has none.
    """
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, EvaluationParams))
    return next((p.eval_params(params) for p in parts if isinstance(p, EvaluationParams)), None)


def restart_averages(opt_state: optax.OptState, params: Any) -> Any:
    """Return the optimizer state after the parameters were replaced; its moments are kept.

    Args:
      opt_state: the state.
      params: the new parameters, sharded like the state.
    """

    def one(part: Any) -> Any:
        return part.restart(params) if isinstance(part, EvaluationParams) else part

    return jax.tree.map(one, opt_state, is_leaf=lambda part: isinstance(part, EvaluationParams))


def train_all(setup: Setup) -> Step:
    """Return the base step of the same model with every parameter trained, whose state has the
    model's parameters.
    """
    return base_step(setup.replace(tuning=Tuning()))


def _to_stages(setup: Setup, params: nnx.State) -> nnx.State:
    return params if setup.stages is None else setup.stages.to_stages(params)


@functools.partial(jax.jit, static_argnums=1)
def _to_parameter_sharding(moments: nnx.State, layout: Layout) -> nnx.State:
    """Reshard in one program: with several gathering programs, each simulated device may
    start another.
    """
    return reshard(moments, layout.parameter, layout)


def _require_possible_size(shapes: Any, shardings: Any) -> None:
    """Raise UserError if a device's part of the state exceeds the memory of any device.

    XLA reports smaller excesses when it allocates.
    """
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    count = sum(math.prod(to.shard_shape(x.shape)) * x.dtype.itemsize for x, to in pairs)
    if count > MOST_BYTES:
        raise UserError(
            f"the model's state takes {count / 2**40:,.0f} TiB per device, and no device holds "
            f"more than {MOST_BYTES // 2**40}; use fewer layers, or smaller ones"
        )
