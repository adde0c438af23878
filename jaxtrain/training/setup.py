"""`Setup`: the trained parameters, execution and gradients of a step; gradient accumulation.

A `Setup` has the facts that a step is composed of. It takes no step itself: see `step.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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
from jaxtrain.nn.execution import Execution, fuse_accumulation
from jaxtrain.nn.precision import Precision, to_compute
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD
from jaxtrain.parallel.gathering import with_slices
from jaxtrain.parallel.sharding import Layout, reshard, shard, shardings
from jaxtrain.training.finetune.tuning import Tuning, Weights
from jaxtrain.training.guard import select
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.objective import Objective, at_least_one
from jaxtrain.training.optimizers.moments import apply_updates
from jaxtrain.training.optimizers.unfreezing import Unfreezing
from jaxtrain.training.pipeline.schedules import Pipeline, Stages, deal
from jaxtrain.training.reduction import local_gradients, reduce_once_axes, sum_gradients
from jaxtrain.training.state import Applied, TrainState


def with_row_ids(batch: Batch) -> Batch:
    """Return the batch with row ids, numbered here unless it has them."""
    if batch.rows is not None:
        return batch
    return dataclasses.replace(batch, rows=shard(jnp.arange(len(batch.targets)), ("batch",)))


def split_microbatches(batch: Batch, count: int) -> Batch:
    """Add a leading microbatch dimension; row r goes to microbatch r mod count.

    Rows that are on one device stay there: splitting into runs of rows would move them.
    """

    def one(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(one, batch)


def accumulate(
    of_one: Callable[..., tuple[nnx.State, Sums, nnx.State]],
    add: Callable[..., tuple[nnx.State, Sums, nnx.State]],
    micros: Batch,
    statistics: nnx.State,
    *,
    like: nnx.State,
    dtype: str,
) -> tuple[nnx.State, Sums, nnx.State]:
    """Accumulate gradients and metrics over microbatches in order; also return new statistics.

    Args:
      of_one: (statistics, microbatch) -> gradients, sums and statistics.
      add: (sum, statistics, microbatch) -> the same, with the gradients added to the sum.
      micros: the microbatches, a leading dimension of them.
      statistics: the running statistics.
      like: a tree like the gradients, in whose memory their sums are.
      dtype: of these sums.
    """

    def run(carry: Any, micro: Batch) -> tuple[Any, None]:
        grads, sums, statistics = carry
        grads, more, statistics = add(grads, statistics, micro)
        return (grads, jax.tree.map(jnp.add, sums, more), statistics), None

    first = jax.tree.map(lambda x: x[0], micros)
    grads, sums, _ = jax.eval_shape(of_one, statistics, first)
    grads = jax.tree.map(lambda g: g.update(dtype=jnp.dtype(dtype)), grads)
    none, no_sums = jax.tree.map(_zeros, (grads, sums))
    none = jax.tree.map(lambda x, to: jax.device_put(x, jax.typeof(to).memory_space), none, like)
    (grads, sums, statistics), _ = jax.lax.scan(run, (none, no_sums, statistics), micros)
    return grads, sums, statistics


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype, out_sharding=shape.sharding)


class Targets(NamedTuple):
    """Parameters that gradients are taken with respect to, and how microbatch gradients are added.

    Attributes:
      select: layout, trained parameters -> what the gradient is taken with respect to.
      bind: layout, trained parameters, `select` of them -> the parameters to compute with.
      add: sum of gradients, a microbatch's gradients -> their sum, in the dtype of the first.
      finish: gradients of all microbatches -> the same where the update takes them.
    """

    select: Callable[[Layout, nnx.State], nnx.State]
    bind: Callable[[Layout, nnx.State, nnx.State], nnx.State]
    add: Callable[[nnx.State, nnx.State], nnx.State]
    finish: Callable[[nnx.State], nnx.State]


class Storage(NamedTuple):
    """Storage of the parameters between steps: their shardings.

    Attributes:
      shardings: layout, parameters -> a NamedSharding for each.
      store: layout, updated parameters as the moments are sharded -> the same as they are stored,
        within a compiled step.
    """

    shardings: Callable[[Layout, nnx.State], nnx.State]
    store: Callable[[Layout, nnx.State], nnx.State]


def _select(layout: Layout, trained: nnx.State) -> nnx.State:
    """Return the parameters to differentiate by: for ZeRO 2 their shards (see `GradientSlice`)."""
    return reshard(trained, layout.gradient, layout) if layout.zero == 2 else trained


def _bind(layout: Layout, trained: nnx.State, of: nnx.State) -> nnx.State:
    return with_slices(trained, of) if layout.zero == 2 else of


def add_gradients(total: nnx.State, grads: nnx.State) -> nnx.State:
    """Add a microbatch's gradients to the sum, in the dtype of the sum."""
    return jax.tree.map(lambda x, more: x + more.astype(x.dtype), total, grads)


def add_gradient(
    loss_fn: Callable[..., tuple[jax.Array, tuple[Sums, nnx.State]]],
    total: nnx.State,
    of: nnx.State,
    *arguments: Any,
) -> tuple[nnx.State, Sums, nnx.State]:
    """Add the gradient of a loss to a sum; also return the loss's sums and statistics.

    The gradients of layers that a loop runs are added layer by layer, in place.

    Args:
      loss_fn: (of, *arguments) -> loss, (sums, statistics).
      total: the sum so far, a tree like `of`.
      of: what the gradient is taken with respect to.
      arguments: further ones.
    """

    def run(of: nnx.State, sums: list[jax.Array]) -> tuple[Any, Any]:
        with fuse_accumulation(jax.tree.leaves(of), sums) as fused:
            loss, more = loss_fn(of, *arguments)
            return (loss, fused.sums), more

    sums, structure = jax.tree.flatten(total)
    (loss, _), transpose, more = jax.vjp(run, of, sums, has_aux=True)
    # Zero for what the loops have added: XLA drops the addition.
    others, sums = transpose((jnp.ones_like(loss), sums))
    return add_gradients(jax.tree.unflatten(structure, sums), others), *more


ON_DEVICES = Targets(_select, _bind, add_gradients, lambda grads: grads)
IN_DEVICE_MEMORY = Storage(
    lambda layout, params: shardings(params, layout.parameter, layout),
    lambda layout, params: reshard(params, layout.parameter, layout),
)


def apply_on_devices(
    setup: "Setup",
    old: TrainState,
    grads: nnx.State,
    good: jax.Array | None,
    extra: Mapping[str, Any],
) -> Applied:
    """Apply the optimizer's update; a bad step keeps the old values.

    Args:
      setup: with the optimizer.
      old: the state, its parameters sharded as the moments are.
      grads: likewise.
      good: as in `Gradient`.
      extra: further arguments of the optimizer's rule.
    """
    updates, opt_state = optax.with_extra_args_support(setup.optimizer).update(
        grads, old.opt_state, old.params, layers=setup.layer_order, **extra
    )
    params: Any = apply_updates(old.params, updates, old.step, setup.layer_order)
    return Applied(*select(good, (params, opt_state), (old.params, old.opt_state)))


@dataclasses.dataclass(frozen=True)
class Setup:
    """Model, objective, optimizer and layout that a step is composed of.

    Attributes:
      build: key -> module.
      objective: what the model is trained to do.
      optimizer: the optax transformation.
      schedule: steps taken -> learning rate, for the metrics.
      layout: the mesh, and how each array is sharded.
      precision: dtypes and loss scaling.
      loss: the loss's settings.
      execution: kernels, precision and dropout.
      accumulation: microbatches in one optimizer step.
      pipeline: the schedule, if the mesh has stages.
      seed: of random numbers in training steps, such as dropout.
      tuning: which parameters are trained.
      unfreezing: when frozen parameters are unfrozen; used by the optimizer too.
      targets: what gradients are taken with respect to.
      storage: how parameters are stored between steps.
      apply: setup, state, gradients, good, extra -> `Applied`: as in `apply_on_devices`.
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
    seed: int = 0
    tuning: Tuning = Tuning()
    unfreezing: Unfreezing = Unfreezing()
    targets: Targets = ON_DEVICES
    storage: Storage = IN_DEVICE_MEMORY
    apply: Callable[..., Applied] = apply_on_devices

    def replace(self, **changes: Any) -> "Setup":
        """Return the setup with other fields."""
        return dataclasses.replace(self, **changes)

    # -- facts -----------------------------------------------------------------------------------

    @functools.cached_property
    def stages(self) -> Stages | None:
        """Assignment of layers to pipeline stages; None without a pipeline."""
        ranks = self.layout.mesh.shape["pipe"]
        if ranks == 1:
            return None
        shapes, pipeline = parameter_shapes(self.build), self.pipeline
        return deal(shapes, ranks, pipeline.virtual_stages, folded=pipeline.folded)

    @property
    def layer_order(self) -> list[int] | None:
        """Layer at each index of the state's stacked arrays, -1 for padding; None is 0, 1, ..."""
        return None if self.stages is None else self.stages.order.tolist()

    @property
    def passes(self) -> int:
        """Number of forward and backward passes in a step: microbatches."""
        return self.accumulation * (1 if self.stages is None else self.pipeline.microbatches)

    def batch_shardings(self, batch: Batch) -> Batch:
        """Return a NamedSharding for each array of a batch: rows over the batch's mesh axes."""
        spec = self.layout.activation(("batch",))
        return jax.tree.map(lambda _: self.layout.sharding_of(spec), batch)

    def validate(self, batch: Batch, model: Model) -> None:
        """Raise UserError with all reasons why a user-provided batch cannot be trained on.

        Args:
          batch: the global batch. Only shape and dtype of arrays on devices are checked.
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

    # -- gradients -------------------------------------------------------------------------------

    def gradients(
        self, state: TrainState, batch: Batch, counts: Sums | None = None
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """Return the gradients of the mean loss, its metrics, and the new statistics.

        Args:
          state: the state.
          batch: the global batch, or the rows of it that are one replica's.
          counts: denominators of the sums, from `Objective.counts`; None: this batch's.
        """
        self.layout.check_active()
        counts = self.objective.counts(batch) if counts is None else counts
        batch = with_row_ids(batch) if self.objective.draws or self.tuning.draws else batch
        # Loss scaling, and division by the counts. These are known before the first microbatch, so
        # each contributes its share of the MEAN gradient: no sum exceeds the range of 16 bits.
        scaled = self.precision.loss_scale is not None
        scale = state.loss_scale[0] if scaled else 1.0
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
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if scaled:  # a CPU writes what it divided to memory
            grads = jax.tree.map(lambda g: g / scale, grads)
        grads = self.unfreezing.mask_gradients(grads, state.step, self.layer_order)
        return grads, self.objective.means(sums, counts), statistics

    def _of_batch(
        self, layout: Layout, batch: Batch, *arguments: Any
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """Return the results of `_of_rows`, for all devices that sum their gradients once."""
        axes = () if self.tuning.splits_more(layout) else reduce_once_axes(layout, self.passes)
        if not axes:
            grads, sums, statistics = self._of_rows(layout, batch, *arguments)
            return self.targets.finish(grads), sums, statistics
        batch = self.objective.arrange(batch, self.execution)
        grads, sums, statistics = local_gradients(axes, layout, self._of_rows, batch, *arguments)
        return self.targets.finish(sum_gradients(axes, layout, grads)), sums, statistics

    def _of_rows(
        self,
        layout: Layout,
        batch: Batch,
        weights: Weights,
        statistics: nnx.State,
        scales: Sums,
        step: jax.Array,
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """Return the gradients and sums over all microbatches of these rows, and the new
        statistics.

        Gradients of several microbatches are in Precision.gradients, of one in the compute dtype.

        Args:
          layout: how everything is sharded, for these rows alone.
          batch: the rows.
          weights: the parameters in the compute dtype.
          statistics: the running statistics.
          scales: for each count of the objective, the factor of its sums.
          step: optimizer steps taken.
        """
        setup = self.replace(layout=layout)

        def loss_fn(slices: nnx.State, statistics: nnx.State, micro: Batch) -> tuple[Any, Any]:
            params = setup.bind(weights, slices)
            sums, statistics = setup.sums(params, statistics, micro, train=True, step=step)
            return self.objective.total(sums, scales), (sums, statistics)

        of = self.targets.select(layout, weights[0])
        gradient = jax.grad(loss_fn, has_aux=True)

        def one(statistics: nnx.State, micro: Batch) -> tuple[nnx.State, Sums, nnx.State]:
            if self.stages is None:
                grads, (sums, statistics) = gradient(of, statistics, micro)
            else:
                grads, sums = setup._through_stages(weights, of, micro, scales, step)
            return grads, sums, statistics

        if self.accumulation == 1:
            return one(statistics, batch)

        def add_microbatch(
            total: nnx.State, statistics: nnx.State, micro: Batch
        ) -> tuple[nnx.State, Sums, nnx.State]:
            if self.stages is not None or self.targets.add is not add_gradients:
                grads, sums, statistics = one(statistics, micro)
                return self.targets.add(total, grads), sums, statistics
            return add_gradient(loss_fn, total, of, statistics, micro)

        micros = split_microbatches(batch, self.accumulation)
        dtype = self.precision.gradients
        return accumulate(one, add_microbatch, micros, statistics, like=of, dtype=dtype)

    def sums(
        self,
        params: nnx.State,
        statistics: nnx.State,
        batch: Batch,
        *,
        train: bool,
        step: jax.Array | None = None,
    ) -> tuple[Sums, nnx.State]:
        """Run the forward pass: return the objective's sums over a batch, and the new running
        statistics.

        For a whole model; see `_through_stages` for pipelines.

        Args:
          params: in the compute dtype.
          statistics: the running statistics.
          batch: all rows, or a microbatch of them.
          train: whether in training mode.
          step: seeds random numbers, if rows are numbered; None: no random numbers.
        """
        model, execution = nnx.merge(self._graphdef, params, statistics), self.execution
        if step is not None and batch.rows is not None:
            draws = Draws.of_step(self.seed, step, batch.rows)
            execution = dataclasses.replace(execution, draws=draws)
        return self.objective.sums(model, statistics, batch, execution, self.loss, train=train)

    def _through_stages(
        self, weights: Weights, of: nnx.State, batch: Batch, scales: Sums, step: jax.Array | None
    ) -> tuple[nnx.State, Sums]:
        """Return gradients and sums of a batch that is pipelined in microbatches.

        Without a step number it is evaluated.
        """
        from jaxtrain.training.pipeline.engine import Engine
        from jaxtrain.training.pipeline.parts import parts_of

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
            self.bind,
            keep_residuals=self.pipeline.backward == "residuals",
            sum_dtype=self.precision.gradients,
        )
        micros = split_microbatches(
            self.objective.arrange(batch, self.execution), self.pipeline.microbatches
        )
        return engine.run(weights, of, micros, scales, step)

    def bind(self, weights: Weights, of: Any = None) -> nnx.State:
        """Return the parameters to compute with, bound to `of`, which the gradient is taken with
        respect to.

        `of` is like the trained parameters; None: no gradient is taken.
        """
        trained, frozen = weights
        if of is not None:
            trained = self.targets.bind(self.layout, trained, of)
        return self.tuning.join((trained, frozen))

    @functools.cached_property
    def _graphdef(self) -> Any:
        """The model's `nnx.GraphDef`, cached: building GoogLeNet takes 0.3 s, even from shapes."""
        return nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))), nnx.Param, ...)[0]

    # -- evaluation ------------------------------------------------------------------------------

    def eval_step(self, state: TrainState, batch: Batch, total: Sums) -> Sums:
        """Add a held-out batch's sums and counts to `total`, by the objective's names.

        The total passes through every batch, so that one batch runs after the other: programs
        that are independent starve simulated devices of threads while they wait in
        reductions.
        """
        self.layout.check_active()
        sums = self._heldout_sums(state.weights, state.statistics, batch)
        return jax.tree.map(jnp.add, total, sums)

    def _heldout_sums(self, weights: Weights, statistics: nnx.State, batch: Batch) -> Sums:
        weights = to_compute(weights, self.precision.compute)
        with self.precision.products():
            if self.stages is None:
                params = self.bind(weights)
                sums, _ = self.sums(params, statistics, batch, train=False)
            else:
                no_gradient = jax.tree.map(jnp.ones_like, self.objective.counts(batch))
                sums = self._through_stages(weights, weights[0], batch, no_gradient, None)[1]
        sums.pop(EXPERT_LOAD, None)
        return {**sums, **self.objective.counts(batch)}

    def no_sums(self, state: TrainState, batch: Batch) -> Sums:
        """Return zeros with the structure of `eval_step`'s sums, on every device."""
        with self.layout.active():
            shapes = jax.eval_shape(self._heldout_sums, state.weights, state.statistics, batch)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return jax.device_put(zeros, self.layout.sharding_of(P()))

    def model(self, state: TrainState) -> Any:
        """Return the module with the state's parameters in the compute dtype, on every stage."""
        weights = to_compute(state.weights, self.precision.compute)
        if self.stages is not None:
            whole = self.layout.with_manual("pipe")
            weights = self.stages.to_layers(reshard(weights, whole.parameter, whole))
        return nnx.merge(self._graphdef, self.bind(weights), state.statistics)


def parameter_shapes(build: Callable[[jax.Array], nnx.Module]) -> nnx.State:
    """Return the shapes of a model's parameters; no array is made."""
    return nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), nnx.Param)
