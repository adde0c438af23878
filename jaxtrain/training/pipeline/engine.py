"""Pipeline engine: runs a schedule table as a scan over ticks inside `shard_map` over `pipe`.

In each tick a rank runs the action in its column of the table, then activations and gradients move
one stage on, along the edges that this tick uses. A ring inside a stage, of attention or of matmuls
along `tensor`, has permutes, in which all devices must take part: there all
ranks run the tick's work of any of them, which takes no longer, since they synchronize at the end
of a tick.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import Layout, along, reshard
from jaxtrain.training.finetune.tuning import Weights
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.pipeline.parts import Parts, crossing
from jaxtrain.training.pipeline.rank import Rank, action_numbers
from jaxtrain.training.pipeline.schedules import Stages
from jaxtrain.training.pipeline.slots import Slots, sends, slots
from jaxtrain.training.pipeline.timetables import Timetable, Work, stage_on


@dataclasses.dataclass(frozen=True)
class Engine:
    """Pipeline engine for a schedule, a model's parts and a layout.

    Attributes:
      parts: the model.
      schedule: the table.
      stages: the layers of each stage.
      layout: how everything is sharded outside the pipeline.
      with_gradient: (weights, of) -> the parameters to compute with, so that the gradient is taken
        with respect to `of`; of weights alone: without one (see `setup.Setup`).
      keep_residuals: whether the forward pass keeps its residuals; else backward computes each
        stage again from its input.
      sum_dtype: of the sums of microbatches' gradients.
    """

    parts: Parts
    schedule: Timetable
    stages: Stages
    layout: Layout
    with_gradient: Callable[..., Any]
    keep_residuals: bool = False
    sum_dtype: str = "float32"

    def run(
        self,
        weights: Weights,
        of: nnx.State,
        micros: Batch,
        scales: Sums,
        step: jax.Array | None = None,
    ) -> tuple[nnx.State, Sums]:
        """Return the gradients of the objective over all microbatches, and their sums.

        Args:
          weights: parameters in the compute dtype, layers in stage order.
          of: what the gradient is taken with respect to, like the trained ones of `weights`.
          micros: the microbatches, a leading dimension of them.
          scales: for each count of the objective, the factor of its sums.
          step: optimizer steps taken, seeds random numbers; None: no random numbers.

        Returns:
          Gradients like `of`, in `sum_dtype`; sums over all rows. A schedule without backward
          actions gives zeros for gradients.
        """
        kept = "residuals" if self.keep_residuals else "recompute"
        table = slots(self.schedule, backward=kept)
        columns, uniform, patterns = _columns(self.schedule, table, self.parts)
        if self._has_ring:
            columns["busy"] = (table.kind != Work.IDLE).astype(np.int32)
            uniform["together"] = _of_all_ranks(columns["action"], columns["busy"])
        # One array of each kind: reading one element of a tick costs as much as reading all.
        own = jax.sharding.reshard(np.stack([*columns.values()], axis=-1), P(None, "pipe"))
        everyones = np.stack([*uniform.values()], axis=-1)
        numbers = jax.sharding.reshard(self.stages.order, P("pipe"))
        layers, outer = self.parts.split(weights)
        of_layers, of_outer = self.parts.split(of)

        rank = Rank(
            self._parts(),
            self.stages,
            table,
            names=(tuple(columns), tuple(uniform)),
            patterns=patterns,
            with_gradient=self.with_gradient,
            keep_residuals=self.keep_residuals,
            together=self._has_ring,
            sum_dtype=self.sum_dtype,
        )

        def body(own: Any, *arguments: Any) -> Any:
            ticks = own[:, 0], jnp.asarray(everyones)
            of_layers, of_outer, sums = rank.run(ticks, *arguments)
            by_rank = jax.tree.map(lambda total: total[None], of_outer)
            return of_layers, by_rank, jax.lax.psum(sums, "pipe")

        # Embedding and head are gathered over pipe once per step, not once per microbatch.
        inside = self.layout.with_manual("pipe")
        outer = reshard(outer, inside.parameter, inside)
        of_outer = reshard(of_outer, inside.gradient, inside)
        grads_layers, grads_outer, sums = along(
            ("pipe",),
            body,
            own,
            numbers,
            layers,
            of_layers,
            outer,
            of_outer,
            micros,
            scales,
            step if self.parts.draws else None,
            out_specs=(
                jax.tree.map(spec_of, of_layers),
                jax.tree.map(lambda x: P("pipe", *spec_of(x)), of_outer),
                P(),
            ),
        )
        grads_outer = jax.tree.map(lambda g: g.sum(0), grads_outer)
        return self.parts.join(grads_layers, grads_outer), sums

    @property
    def _has_ring(self) -> bool:
        """Whether a stage has permutes: ring attention over `context`, or collective matmuls over
        `tensor`.
        """
        split = self.layout.mesh.shape["context"] > 1
        by_attention = split and self.parts.execution.context_parallel == "ring"
        return by_attention or self.layout.collective_matmul

    def _parts(self) -> Parts:
        """Return the parts without a loop over layers if a stage's backward pass is split by
        operation.
        """
        kinds = {action.kind for _, _, action in self.schedule.actions()}
        if not self.keep_residuals and Work.BACKWARD_INPUT not in kinds:
            return self.parts
        execution = dataclasses.replace(self.parts.execution, layers_per_iteration=0)
        return dataclasses.replace(self.parts, execution=execution)


def _of_all_ranks(actions: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """Return the action [ticks] shared by the busy ranks of each tick; [ticks, ranks] both."""
    found = np.where(busy, actions, -1).max(1)
    assert (np.where(busy, actions, found[:, None]) == found[:, None]).all(), "ranks do two things"
    return np.maximum(found, 0)


def spec_of(x: jax.Array) -> P:
    """Return the PartitionSpec in an array's type."""
    return jax.typeof(x).sharding.spec


def _columns(
    schedule: Timetable, table: Slots, parts: Parts
) -> tuple[Any, dict[str, np.ndarray], Any]:
    """Return the table as arrays: per tick and rank, per tick, and the distinct patterns
    of edges.
    """
    stage = np.array(
        [
            [stage_on(*at, schedule.ranks, folded=schedule.folded) for at in enumerate(row)]
            for row in table.chunk.tolist()
        ]
    )
    chunks = schedule.virtual_stages // parts.passes
    busy = table.kind != Work.IDLE
    actions = action_numbers(table, parts.passes, chunks)
    columns = {
        "action": np.searchsorted(np.unique(actions), actions).astype(np.int32),
        "microbatch": np.maximum(table.microbatch, 0),
        "chunk": np.maximum(table.chunk, 0) % chunks,
        "input_slot": np.maximum(table.input_slot, 0),
        "gradient_slot": np.maximum(table.gradient_slot, 0),
        "residual_slot": np.maximum(table.residual_slot, 0),
        "stash_slot": np.maximum(table.stash_slot, 0),
        "receive_input_slot": table.receive_input_slot,
        "receive_gradient_slot": table.receive_gradient_slot,
        "enters": ((stage % (schedule.ranks * chunks) == 0) & busy).astype(np.int32),
        "last": ((stage == schedule.num_stages - 1) & busy).astype(np.int32),
    }
    uniform, patterns = {}, {}
    for name, first_pass in parts.travels.items():
        both = sends(schedule, first_pass * schedule.ranks * chunks)
        for way, edges in zip(("forward", "backward"), both, strict=True):
            distinct = sorted({tuple(sorted(tick)) for tick in edges})
            numbers = [distinct.index(tuple(sorted(tick))) for tick in edges]
            uniform[crossing(way, name, first_pass)] = np.array(numbers, np.int32)
            patterns[crossing(way, name, first_pass)] = distinct
    return columns, uniform, patterns
