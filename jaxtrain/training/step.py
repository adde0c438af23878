"""The train step: `TrainState`, init, train_step and eval_step as pure functions."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError, nearest_multiple
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model
from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.parameters import Statistic
from jaxtrain.nn.precision import Precision, to_compute, to_master
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD
from jaxtrain.parallel.gathering import with_slices
from jaxtrain.parallel.sharding import Layout, by_name, reshard, shardings
from jaxtrain.training.balancing import update_biases
from jaxtrain.training.creation import init_sharded
from jaxtrain.training.finetune.tuning import Tuning, Weights, partition
from jaxtrain.training.guard import FIRST_LOSS_SCALE, Guard, History, Verdict, judge, select
from jaxtrain.training.microbatches import accumulate, split_microbatches, with_row_ids
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.objective import Objective, at_least_one
from jaxtrain.training.optimizers.average import averaged_params, restart_averages
from jaxtrain.training.optimizers.plateau import rate_taken
from jaxtrain.training.optimizers.rounding import apply_updates
from jaxtrain.training.optimizers.unfreezing import Unfreezing
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.pipeline.stages import Stages, deal
from jaxtrain.training.reduction import local_gradients, reduce_once_axes, sum_gradients

PENDING = "pending"  # among a step's metrics, what its compiled program leaves to be done
_ADAPTERS = 0x10A  # folded into the key of the parameters: adapters draw their own numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that is saved and updated.

    Attributes:
      step: int32 scalar, optimizer steps taken.
      params: the master parameters that are trained.
      opt_state: the optimizer's state.
      statistics: running statistics; empty for models that have none.
      loss_scale: what the loss is multiplied by, and good steps since it last changed; float32 [2].
      exchange: what an exchange over `data` other than the synchronous one remembers.
      guard: the last good steps' numbers, where spikes are looked for: `guard.History`, else ().
      frozen: the parameters without a gradient, which stay as they are but for routers' biases.
    """

    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    statistics: nnx.State
    loss_scale: jax.Array
    exchange: Any = ()
    guard: Any = ()
    frozen: nnx.State = dataclasses.field(default_factory=lambda: nnx.State({}))

    @property
    def weights(self) -> Weights:
        """All parameters: those that are trained, and those that are not."""
        return self.params, self.frozen


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, an optimizer and a layout, and the pure functions they make.

    Attributes:
      build: key -> module.
      objective: what the model is trained to do.
      optimizer: the optax transformation.
      schedule: steps taken -> learning rate, for the metrics.
      layout: where everything goes.
      precision: dtypes and loss scaling.
      loss: the loss's settings.
      execution: how the model's mathematics is run.
      accumulation: microbatches in one optimizer step.
      pipeline: how microbatches go through the stages, where the mesh has more than one.
      guard: which steps are bad, and whether they may change the state.
      curvature: what the optimizer's update is given of the Hessian's diagonal, from this program,
        a state and a batch: see `training/curvature.py`; None: nothing.
      seed: of what training draws in its steps, as dropout does.
      tuning: which parameters are trained.
      bias_speed: by how much a step moves the biases of routers; see `balancing`.
      unfreezing: which of these wait, and for what step; the optimizer knows of it too.
    """

    build: Callable[[jax.Array], nnx.Module]
    objective: Objective[Any]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    layout: Layout
    precision: Precision
    loss: Loss
    execution: Execution
    accumulation: int = 1
    pipeline: Pipeline = Pipeline()
    guard: Guard = Guard()
    curvature: Callable[["Program", TrainState, Batch], Any] | None = None
    seed: int = 0
    tuning: Tuning = Tuning()
    bias_speed: float | None = None
    unfreezing: Unfreezing = Unfreezing()

    # -- state ----------------------------------------------------------------------------------

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """A fresh state; the same key gives the same bits on every mesh.

        Args:
          key: of what is drawn.
          params: the parameters to start from, and running statistics, as `whole`'s state holds
            them; those that are missing are drawn. None draws all.
        """
        _, drawn, statistics = nnx.split(self.build(key), nnx.Param, Statistic)
        given = {} if params is None else by_name(params)
        missing = partition(drawn, lambda name, _: name not in given)[0]
        missing = to_master(missing, self.precision.params)
        if self.stages is not None:
            missing = self.stages.to_stages(missing)
        found = nnx.merge_state(statistics, missing, *([] if params is None else [params]))
        statistics, params = partition(found, lambda _, x: isinstance(x, Statistic))
        scale = self.precision.loss_scale
        first = FIRST_LOSS_SCALE if scale == "dynamic" else 1.0 if scale is None else scale
        params, frozen = self.tuning.begin(params, self._adapters(drawn, key))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(params),
            statistics=statistics,
            loss_scale=jnp.array([first, 0.0], jnp.float32),
            guard=() if self.guard.spike_sigma is None else History.empty(self.guard.window),
            frozen=frozen,
        )

    def _adapters(self, shapes: nnx.State, key: jax.Array) -> nnx.State:
        """What is trained beside a model's parameters, in the form of a state's."""
        adapters = self.tuning.draw(shapes, jax.random.fold_in(key, _ADAPTERS))
        adapters = jax.tree.map(lambda x: x.astype(self.precision.params), adapters)
        return adapters if self.stages is None else self.stages.to_stages(adapters)

    @property
    def whole(self) -> "Program":
        """The same program with all parameters trained: its state holds a model's as they are."""
        return dataclasses.replace(self, tuning=Tuning())

    @functools.cached_property
    def stages(self) -> Stages | None:
        """Which layers stand on which stage of the pipeline; None where there is none."""
        ranks = self.layout.mesh.shape["pipe"]
        if ranks == 1:
            return None
        shapes, pipeline = parameter_shapes(self.build), self.pipeline
        return deal(shapes, ranks, pipeline.virtual_stages, folded=pipeline.folded)

    @property
    def layer_order(self) -> list[int] | None:
        """The layer at each place of the state's stacked arrays, -1 for padding; None: 0, 1, ..."""
        return None if self.stages is None else self.stages.order.tolist()

    def shapes(self) -> TrainState:
        """The state's shapes and dtypes; the key too is only traced, so that no device is asked."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings; no array is made."""
        shapes = self.shapes()
        return with_shardings(shapes, self.state_shardings(shapes))

    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state."""
        layout = self.layout
        of: dict[str, Any] = {
            "step": layout.named(P()),
            "params": shardings(state.params, layout.parameter, layout),
            "opt_state": shardings(state.opt_state, layout.moment, layout),
            "statistics": shardings(state.statistics, layout.weight, layout),
            "loss_scale": layout.named(P()),
            "guard": jax.tree.map(lambda _: layout.named(P()), state.guard),
            "frozen": self.tuning.frozen_shardings(state.frozen, layout),
        }
        return TrainState(**of)

    def create(self, seed: int, params: nnx.State | None = None) -> TrainState:
        """A fresh state, created in place: no device ever holds more than its shards.

        Args:
          seed: of what is drawn.
          params: the parameters to start from, as of `init`, which are taken away.
        """
        return self.filed(init_sharded(self, seed, params))

    def in_memory(self, state: TrainState) -> TrainState:
        """What programs are given of a state: all but what lies in files."""
        return state

    def filed(self, state: TrainState, before: TrainState | None = None) -> TrainState:
        """The whole state of one in memory: this one, where nothing lies in files."""
        del before
        return state

    def finisher(self, options: Mapping[str, str]) -> Callable[..., TrainState] | None:
        """What ends a step that its compiled program leaves PENDING; None: it is all there is."""
        del options

    def batch_shardings(self, batch: Batch) -> Batch:
        """A NamedSharding for every array of a batch: rows over the batch's mesh axes."""
        spec = self.layout.activation(("batch",))
        return jax.tree.map(lambda _: self.layout.named(spec), batch)

    def validate(self, batch: Batch, model: Model) -> None:
        """Raises UserError with every reason why no step can be taken on a batch of your own.

        Args:
          batch: the global batch. Arrays on devices are looked at for shape and dtype alone.
          model: the model's settings.
        """
        found = list(self.objective.validate(batch, model, self.loss, self.layout))
        if not found:
            found += self._validate_rows(jax.tree.leaves(batch)[0].shape[0])
        if found:
            raise UserError("\n".join(found))

    def _validate_rows(self, rows: int) -> Iterator[str]:
        devices = self.layout.batch_devices()
        parts, times = devices * self.accumulation, f"Train.accumulation={self.accumulation}"
        if self.stages is not None:
            parts *= self.pipeline.microbatches
            times += f" times Pipeline.microbatches={self.pipeline.microbatches}"
        if rows % parts:
            yield (
                f"Batch.inputs has {rows} rows, which do not divide over the {devices} devices "
                f"that split the batch times {times}; the nearest multiple of {parts} is "
                f"{nearest_multiple(rows, parts)}"
            )

    @property
    def plain(self) -> "Program":
        """The program that evaluates and generates with what `consensus` returns: this one."""
        return self

    def consensus(self, state: TrainState) -> TrainState:
        """The state that evaluation and generation use: with the averaged parameters, if any."""
        average = averaged_params(state.opt_state, state.params)
        if average is None:
            return state
        average = jax.tree.map(lambda x, like: x.astype(like.dtype), average, state.params)
        if self.layout.zero in (1, 2):  # else it lies there already
            with self.layout.active():
                average = _as_parameters(average, self.layout)
        return dataclasses.replace(state, params=average)

    def trained(self, state: TrainState) -> TrainState:
        """The state with the parameters that training resumes from: this one."""
        return state

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """The state with other weights; moments stay, averages of the parameters restart.

        Args:
          state: the state.
          params: in its form: the layers in stage order.
          statistics: likewise.
        """
        moved = reshard(params, self.layout.moment, self.layout)
        opt_state = restart_averages(state.opt_state, moved)
        return dataclasses.replace(state, params=params, opt_state=opt_state, statistics=statistics)

    # -- the step -------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One optimizer step.

        Args:
          state: the state; donate it.
          batch: the global batch.

        Returns:
          The new state and the metrics `loss` (mean over the targets that count), `grad_norm`
          (before clipping), `learning_rate` and the objective's own; all stay on the device.
        """
        grads, metrics, statistics = self.gradients(state, batch)
        curvature = self.estimate_curvature(state, batch)
        return self.update(state, grads, metrics, statistics, curvature)

    def estimate_curvature(self, state: TrainState, batch: Batch) -> Any:
        """What the optimizer's update is given of the Hessian's diagonal; None: nothing."""
        return None if self.curvature is None else self.curvature(self, state, batch)

    @jax.named_scope("optimizer")
    def update(
        self,
        state: TrainState,
        grads: nnx.State,
        metrics: Sums,
        statistics: nnx.State,
        curvature: tuple[jax.Array, nnx.State] | None = None,
    ) -> tuple[TrainState, Sums]:
        """The second half of `train_step`: the state after these gradients, and all its metrics."""
        layout = self.layout
        # From here each device updates its own shard of everything (ZeRO 1 and up).
        grads = reshard(grads, layout.moment, layout)
        old = dataclasses.replace(state, params=reshard(state.params, layout.moment, layout))
        load = metrics.pop(EXPERT_LOAD, None)
        frozen = update_biases(state.frozen, load, self.bias_speed, self.layer_order)
        more: dict[str, Any] = {"value": metrics["loss"], "step": state.step}
        if curvature is not None:
            more["curvature"] = curvature[0], reshard(curvature[1], layout.moment, layout)
        metrics["grad_norm"] = optax.global_norm(grads)
        good, new = None, dataclasses.replace(old, step=state.step + 1)
        if self.guard.in_step or self.precision.loss_scale == "dynamic":
            verdict, metrics = self._judge(old, metrics)
            good = verdict.good
            new = dataclasses.replace(new, loss_scale=verdict.loss_scale, guard=verdict.history)
        params, opt_state = self.moved(old, grads, good, **more)
        metrics["learning_rate"] = rate_taken(self.schedule, old.opt_state, opt_state, old.step)
        new = dataclasses.replace(
            new,
            params=self.at_rest(params),
            opt_state=opt_state,
            statistics=select(good, statistics, old.statistics),
            frozen=select(good, frozen, old.frozen),
        )
        return new, metrics

    def moved(
        self, old: TrainState, grads: nnx.State, good: jax.Array | None, **more: Any
    ) -> tuple[nnx.State, optax.OptState]:
        """Parameters and optimizer state after an update, the old ones where it is not good.

        Args:
          old: the state, its parameters laid out as the moments are.
          grads: likewise.
          good: bool scalar; None: it is.
          more: what the rule is given besides.
        """
        updates, opt_state = optax.with_extra_args_support(self.optimizer).update(
            grads, old.opt_state, old.params, layers=self.layer_order, **more
        )
        params: Any = apply_updates(old.params, updates, old.step, self.layer_order)
        return select(good, (params, opt_state), (old.params, old.opt_state))

    def at_rest(self, params: nnx.State) -> nnx.State:
        """Updated parameters as a state has them between steps."""
        return reshard(params, self.layout.parameter, self.layout)

    def _judge(self, old: TrainState, metrics: Sums) -> tuple[Verdict, Sums]:
        """Whether a step counts, by its metrics, and these with what there is to say of it."""
        verdict = judge(
            self.guard,
            metrics,
            history=old.guard,
            loss_scale=old.loss_scale,
            dynamic=self.precision.loss_scale == "dynamic",
        )
        return verdict, {**metrics, **verdict.metrics}

    def gradients(
        self, state: TrainState, batch: Batch, counts: Sums | None = None
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """Gradients of the mean loss, its metrics, the new statistics.

        Args:
          state: the state.
          batch: the global batch, or the rows of it that are one replica's.
          counts: what the sums are divided by, as `Objective.counts` has them; None: this batch's.
        """
        self.layout.check_active()
        counts = self.objective.counts(batch) if counts is None else counts
        batch = with_row_ids(batch) if self.objective.draws or self.tuning.draws else batch
        # Counts are known before the first microbatch, so each contributes its share of the MEAN
        # gradient: nothing is summed at a scale that a 16-bit gradient could not hold.
        scale = state.loss_scale[0]
        scales = {name: scale / at_least_one(count) for name, count in counts.items()}
        weights = to_compute(state.weights, self.precision.compute)
        arguments = state.statistics, scales, state.step
        layout = self.layout.of_microbatches
        if layout is self.layout:
            grads, sums, statistics = self._of_batch(layout, batch, weights, *arguments)
        else:
            whole = reshard(weights, layout.parameter, layout)
            with layout.current():
                grads, sums, statistics = self._of_batch(layout, batch, whole, *arguments)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        grads = self.unfreezing.mask_gradients(grads, state.step, self.layer_order)
        return grads, self.objective.means(sums, counts), statistics

    def _of_batch(
        self, layout: Layout, batch: Batch, *arguments: Any
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """What `_of_rows` gives, of the rows of all devices that sum their gradients once."""
        axes = () if self.tuning.splits_more(layout) else reduce_once_axes(layout, self.passes)
        if not axes:
            return self._of_rows(layout, batch, *arguments)
        batch = self.objective.arrange(batch, self.execution)
        grads, sums, statistics = local_gradients(axes, layout, self._of_rows, batch, *arguments)
        return sum_gradients(axes, layout, grads), sums, statistics

    @property
    def passes(self) -> int:
        """Forward and backward passes in a step: microbatches."""
        return self.accumulation * (1 if self.stages is None else self.pipeline.microbatches)

    def _of_rows(
        self,
        layout: Layout,
        batch: Batch,
        weights: Weights,
        statistics: nnx.State,
        scales: Sums,
        step: jax.Array,
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """Gradients and sums of all microbatches of these rows, and the new statistics.

        Gradients of several microbatches are in Precision.gradients, one's as they are computed.

        Args:
          layout: where everything goes, these rows being all that it knows of.
          batch: the rows.
          weights: the parameters in the compute dtype.
          statistics: the running statistics.
          scales: for each count of the objective, what the sums over it are multiplied by.
          step: optimizer steps taken.
        """
        program = dataclasses.replace(self, layout=layout)

        def loss_fn(slices: nnx.State, statistics: nnx.State, micro: Batch) -> tuple[Any, Any]:
            params = program._with_gradient(weights, slices)
            sums, statistics = program.sums(params, statistics, micro, train=True, step=step)
            return self.objective.total(sums, scales), (sums, statistics)

        of = program.with_respect_to(weights[0])
        gradient = jax.grad(loss_fn, has_aux=True)

        def one(statistics: nnx.State, micro: Batch) -> tuple[nnx.State, Sums, nnx.State]:
            if self.stages is None:
                grads, (sums, statistics) = gradient(of, statistics, micro)
            else:
                grads, sums = program._through_stages(weights, of, micro, scales, step)
            return grads, sums, statistics

        if self.accumulation == 1:
            return one(statistics, batch)

        micros = split_microbatches(batch, self.accumulation)
        dtype = self.precision.gradients
        return accumulate(one, self.added, micros, statistics, like=of, dtype=dtype)

    def with_respect_to(self, trained: nnx.State) -> nnx.State:
        """What gradients are taken with respect to: of ZeRO 2 the shards (see GradientSlice)."""
        layout = self.layout
        return reshard(trained, layout.gradient, layout) if layout.zero == 2 else trained

    def added(self, total: nnx.State, grads: nnx.State) -> nnx.State:
        """The sum of microbatches' gradients with one's more, in the dtype of the sum."""
        return jax.tree.map(lambda x, more: x + more.astype(x.dtype), total, grads)

    def sums(
        self,
        params: nnx.State,
        statistics: nnx.State,
        batch: Batch,
        *,
        train: bool,
        step: jax.Array | None = None,
    ) -> tuple[Sums, nnx.State]:
        """The forward pass: the objective's sums over a batch, and the new running statistics.

        Of a whole model; through the stages of a pipeline goes `_through_stages`.

        Args:
          params: in the dtype to compute with.
          statistics: the running statistics.
          batch: all rows, or a microbatch of them.
          train: turns on what only training does.
          step: whose random numbers are drawn, where rows are numbered; None draws none.
        """
        model, execution = nnx.merge(self._graphdef(), params, statistics), self.execution
        if step is not None and batch.rows is not None:
            draws = Draws.of_step(self.seed, step, batch.rows)
            execution = dataclasses.replace(execution, draws=draws)
        return self.objective.sums(model, statistics, batch, execution, self.loss, train=train)

    def _through_stages(
        self, weights: Weights, of: nnx.State, batch: Batch, scales: Sums, step: jax.Array | None
    ) -> tuple[nnx.State, Sums]:
        """Gradients and sums of a batch that goes through the pipeline in microbatches; it is
        evaluated where no number of steps is given."""
        from jaxtrain.training.pipeline.cutting import parts_of
        from jaxtrain.training.pipeline.engine import Engine

        assert self.stages is not None, "no pipeline"
        parts = parts_of(
            nnx.eval_shape(lambda: self.build(jax.random.key(0))), self.objective, self.execution,
            self.loss, train=step is not None, padded=not self.stages.valid.all(), seed=self.seed,
        )  # fmt: skip
        engine = Engine(
            parts,
            self.pipeline.table(self.stages.ranks, passes=parts.passes, train=step is not None),
            self.stages,
            self.layout,
            self._with_gradient,
            keep_residuals=self.pipeline.backward == "residuals",
            sum_dtype=self.precision.gradients,
        )
        micros = split_microbatches(
            self.objective.arrange(batch, self.execution), self.pipeline.microbatches
        )
        return engine.run(weights, of, micros, scales, step)

    def _with_gradient(self, weights: Weights, of: Any = None) -> nnx.State:
        """The parameters to compute with, so that the gradient is taken with respect to `of`, which
        is like the trained ones; None: no gradient is."""
        trained, frozen = weights
        if of is not None:
            trained = with_slices(trained, of) if self.layout.zero == 2 else of
        return self.tuning.join((trained, frozen))

    def _graphdef(self) -> Any:
        return nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))), nnx.Param, ...)[0]

    def eval_step(self, state: TrainState, batch: Batch, total: Sums) -> Sums:
        """`total` plus a held-out batch's sums and counts, as the objective names them.

        The total passes through every batch, so that one batch runs after the other: programs
        that do not depend on each other starve simulated devices of threads while they wait in
        reductions.
        """
        self.layout.check_active()
        sums = self._heldout_sums(state.weights, state.statistics, batch)
        return jax.tree.map(jnp.add, total, sums)

    def _heldout_sums(self, weights: Weights, statistics: nnx.State, batch: Batch) -> Sums:
        weights = to_compute(weights, self.precision.compute)
        with self.precision.products():
            if self.stages is None:
                params = self._with_gradient(weights)
                sums, _ = self.sums(params, statistics, batch, train=False)
            else:
                no_gradient = jax.tree.map(jnp.ones_like, self.objective.counts(batch))
                sums = self._through_stages(weights, weights[0], batch, no_gradient, None)[1]
        sums.pop(EXPERT_LOAD, None)
        return {**sums, **self.objective.counts(batch)}

    def no_sums(self, state: TrainState, batch: Batch) -> Sums:
        """Zeros in the form of `eval_step`'s sums, on every device."""
        with self.layout.active():
            shapes = jax.eval_shape(self._heldout_sums, state.weights, state.statistics, batch)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return jax.device_put(zeros, self.layout.named(P()))

    def model(self, state: TrainState) -> Any:
        """The module with the state's parameters in the compute dtype, on every stage."""
        weights = to_compute(state.weights, self.precision.compute)
        if self.stages is not None:
            whole = self.layout.with_manual("pipe")
            weights = self.stages.to_layers(reshard(weights, whole.parameter, whole))
        return nnx.merge(self._graphdef(), self._with_gradient(weights), state.statistics)


@functools.partial(jax.jit, static_argnums=1)
def _as_parameters(moments: nnx.State, layout: Layout) -> nnx.State:
    """Moved in one program: of several that gather, each simulated device may begin another."""
    return reshard(moments, layout.parameter, layout)


def parameter_shapes(build: Callable[[jax.Array], nnx.Module]) -> nnx.State:
    """The parameters that a model would have; no array is made."""
    return nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), nnx.Param)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes with these shardings."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes, shardings,
    )  # fmt: skip
