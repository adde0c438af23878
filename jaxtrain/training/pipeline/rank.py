"""Computation of one pipeline rank in each tick.

Backward is explicit, tick by tick, so that a microbatch's activations live only from its forward
to its backward: autodiff of the loop over ticks would save them all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.training.guard import select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.pipeline.backward import Backward
from jaxtrain.training.pipeline.parts import Parts, Stream, Variables, crossing
from jaxtrain.training.pipeline.schedules import Stages
from jaxtrain.training.pipeline.slots import Slots, buffer, by_rows, put, take, zeros
from jaxtrain.training.pipeline.timetables import Work

Edges = tuple[tuple[int, int], ...]
Row = dict[str, jax.Array]
Carry = dict[str, Any]
Kept = dict[str, list[list[jax.Array]]]  # by name and pass

# Data that waits at its rank for a later action: the action that stores it, and the column of its
# slot.
_KEPT = {
    "residuals": (Work.FORWARD, "residual_slot"),
    "stash": (Work.BACKWARD_INPUT, "stash_slot"),
}


class Rank:
    """Parameters and schedule of one pipeline rank."""

    def __init__(
        self,
        parts: Parts,
        stages: Stages,
        table: Slots,
        *,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        patterns: dict[str, list[Edges]],
        with_gradient: Callable[..., Any],
        keep_residuals: bool,
        together: bool,
        sum_dtype: str,
    ) -> None:
        """Prepare the rank; nothing is computed yet.

        Args:
          parts: the model.
          stages: the layers of each stage.
          table: the schedule as arrays.
          names: of the columns of a tick's row, per rank and shared.
          patterns: for each direction, the distinct sets of edges that a tick uses.
          with_gradient: as in Engine.
          keep_residuals: as in Backward.
          together: whether all ranks run a tick's work, idle ones too, whose
            results are discarded.
          sum_dtype: of the sums of microbatches' gradients.
        """
        self._parts, self._stages, self._table, self._patterns = parts, stages, table, patterns
        self._names = names
        self._with_gradient, self._keep_residuals = with_gradient, keep_residuals
        self._together, self._sum_dtype = together, sum_dtype
        numbers = np.unique(action_numbers(table, parts.passes, stages.chunks))
        self._actions = [(Work(n // parts.passes), int(n % parts.passes)) for n in numbers]
        self._split = Work.BACKWARD_INPUT in {kind for kind, _ in self._actions}
        # If backward recomputes the stage, the last stage's output is not stored.
        spare = table.has_backward and not keep_residuals and not self._split
        self._skip_last = spare and not together

    def run(
        self,
        ticks: tuple[jax.Array, jax.Array],
        numbers: jax.Array,
        layers: Variables,
        of_layers: Variables,
        outer: Variables,
        of_outer: Variables,
        micros: Batch,
        scales: Sums,
        step: jax.Array | None,
    ) -> tuple[Variables, Variables, Sums]:
        """Run all ticks; return the gradients of the rank's layers and of the other parameters, and
        sums.

        Args:
          ticks: int32 [ticks, names] each: the table's columns of the rank, and of everyone.
          numbers: the layer in each of the rank's slots, -1 for an empty one.
          layers, outer: parameters to compute with.
          of_layers, of_outer: what the gradients are taken with respect to.
          micros: the microbatches.
          scales: for each count of the objective, the factor of its sums.
          step: as in `Parts`.
        """
        self._layers, self._of_layers, self._outer, self._of_outer = (
            layers, of_layers, outer, of_outer
        )  # fmt: skip
        self._numbers, self._micros, self._scales = numbers, micros, scales
        self._parts = dataclasses.replace(self._parts, step=step)
        self._passes = [self._of_pass(number) for number in range(self._parts.passes)]
        totals, tree = jax.tree.flatten(of_layers)
        table, x = self._table, self._x
        carry = {
            "inputs": {name: buffer(one, table.num_input_slots) for name, one in x.items()},
            "gradients": {name: buffer(one, table.num_gradient_slots) for name, one in x.items()},
            "residuals": [
                [buffer(r, table.num_residual_slots) for r in own.kept] for own in self._passes
            ],
            "stash": [
                [buffer(s, table.num_stash_slots) for s in own.stash] for own in self._passes
            ],
            "layers": [jnp.zeros_like(total, self._sum_dtype) for total in totals],
            "outer": [jnp.zeros_like(v, self._sum_dtype) for v in jax.tree.leaves(of_outer)],
            "sums": self._no_sums(),
        }
        carry, _ = jax.lax.scan(self._tick, carry, ticks)
        outer = jax.tree.unflatten(jax.tree.structure(of_outer), carry["outer"])
        return jax.tree.unflatten(tree, carry["layers"]), outer, carry["sums"]

    def _of_pass(self, number: int) -> "_Pass":
        """Return the functions and shapes of a pass; pass 0 sets the activation's
        shape."""
        row: Any = {"chunk": 0, "microbatch": 0}
        params, context = self._arguments(row, number)
        if number == 0:
            self._x = jax.eval_shape(lambda: self._enter(0, self._of_outer, {}, context))
        stage = functools.partial(self._stage, number)
        backward = Backward(stage, params, self._x, context, keep_residuals=self._keep_residuals)
        y, auxiliary = backward.outputs
        # The last stage's loss needs its output, and a pass's input is computed from
        # the previous one's output, so those are saved too.
        before = self._before(number, self._x)
        kept = jax.tree.leaves((backward.kept, y, before)) if self._keep_residuals else []
        found = _Pass(
            number, backward, auxiliary, kept, None,
            self._leaf_indices(self._of_layers, lambda tree: self._parts.of_pass(number, tree)),
            self._leaf_indices(self._of_outer, self._parts.split_shared),
        )  # fmt: skip
        if self._split:
            found = dataclasses.replace(found, halves=backward.halves(params, self._x, context))
        return found

    def _leaf_indices(self, tree: Any, split: Callable[[Any], tuple[Any, Any]]) -> list[int]:
        """Return the indices, among a tree's leaves, of those that belong to its first part."""
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.leaves(split(jax.tree.unflatten(structure, range(len(leaves))))[0])

    # -- one tick -------------------------------------------------------------------------------

    def _tick(self, carry: Carry, tick: tuple[jax.Array, jax.Array]) -> tuple[Carry, None]:
        row: Row = {}
        for names, numbers in zip(self._names, tick, strict=True):
            row |= {name: numbers[index] for index, name in enumerate(names)}
        row |= {name: row[name] > 0 for name in ("enters", "last")}
        # Buffers are read in a branch and written after it: buffers that a branch returns unchanged
        # are copied by XLA's TPU compiler, with all slots in every tick.
        own = {name: carry[name] for name in ("layers", "outer", "sums")}
        nothing = {name: jnp.zeros_like(one[0]) for name, one in carry["inputs"].items()}

        def branch(kind: Work, number: int) -> Callable[[Carry], tuple[Carry, Stream, Kept]]:
            of = self._passes[number]
            if kind == Work.IDLE:
                return lambda own: (own, nothing, self._store(carry))
            if kind == Work.FORWARD:
                return lambda own: self._forward(of, own, carry, row)
            if kind == Work.BACKWARD_WEIGHT:
                return lambda own: (
                    self._weight_gradients(of, own, carry, row), nothing, self._store(carry),
                )  # fmt: skip
            return lambda own: self._backward(of, own, carry, row)

        with jax.named_scope("stage"):
            own, message, kept = jax.lax.switch(
                row["together" if self._together else "action"],
                [branch(*action) for action in self._actions],
                own,
            )
        return {
            **own,
            **{name: self._put_away(carry, name, kept[name], row) for name in _KEPT},
            "inputs": self._move(message, "forward", carry["inputs"], row),
            "gradients": self._move(message, "backward", carry["gradients"], row),
        }, None

    def _forward(
        self, of: "_Pass", own: Carry, carry: Carry, row: Row
    ) -> tuple[Carry, Stream, Kept]:
        params, context = self._arguments(row, of.number)
        is_last = of.number == self._parts.passes - 1

        def run(own: Carry) -> tuple[Carry, Stream, Kept]:
            x = self._stage_input(of, carry, row, context)
            (y, auxiliary), kept = of.backward.forward(params, x, context)
            if self._keep_residuals:
                before = self._before(of.number, self._receive(carry, row))
                kept = self._store(carry, "residuals", of, jax.tree.leaves((kept, y, before)))
            else:
                kept = self._store(carry)
            if not self._skip_last:
                own = {**own, "sums": _add_sums(own["sums"], self._mask_idle(auxiliary, row))}
            return own, y, kept

        if self._skip_last and is_last:
            nothing = {name: jnp.zeros_like(one[0]) for name, one in carry["inputs"].items()}
            idle = nothing, self._store(carry)
            return jax.lax.cond(row["last"], lambda own: (own, *idle), run, own)
        own, y, kept = run(own)
        if self._table.has_backward or not is_last:
            return own, y, kept
        sums = self._where(
            row["last"],
            self._parts.head_has_layers,
            lambda sums: _add_sums(sums, self._head(self._of_outer, y, context)),
            lambda sums: sums,
            own["sums"],
        )
        return {**own, "sums": sums}, y, kept

    def _backward(
        self, of: "_Pass", own: Carry, carry: Carry, row: Row
    ) -> tuple[Carry, Stream, Kept]:
        params, context = self._arguments(row, of.number)
        x = self._stage_input(of, carry, row, context)
        saved = by_rows(take(carry["residuals"][of.number], row["residual_slot"]))
        kept, outputs, transpose = self._before(of.number, self._receive(carry, row)), None, None
        for_second = self._store(carry)
        residuals, rest = saved[: len(of.backward.kept)], saved[len(of.backward.kept) :]
        if self._keep_residuals:
            y_kept, kept = jax.tree.unflatten(jax.tree.structure((x, kept)), rest)
        if of.halves is None:
            outputs, transpose = of.backward.transpose(residuals, params, x, context)

        def y() -> Stream:
            if self._keep_residuals:
                return y_kept
            return (self._stage(of.number, params, x, context) if outputs is None else outputs)[0]

        def receive() -> Any:
            gradient = {name: take([waiting], row["gradient_slot"])[0]
                        for name, waiting in carry["gradients"].items()}  # fmt: skip
            return gradient, own["outer"], own["sums"]

        if of.number == self._parts.passes - 1:
            y_gradient, outer, sums = self._where(
                row["last"],
                self._parts.head_has_layers,
                lambda: self._head_gradients(own, y(), context),
                receive,
            )
        else:
            y_gradient, outer, sums = receive()
        gradient = y_gradient, self._auxiliary_gradient(of)
        if transpose is None:
            assert of.halves is not None, "a stage that is not cut has a transpose"
            arguments = jax.tree.leaves((params, residuals, context, x, gradient))
            results, stash = of.halves.first(*arguments)
            by_number = dict(zip(of.halves.early, results, strict=True))
            for_second = self._store(carry, "stash", of, stash)
        else:
            by_number = dict(enumerate(jax.tree.leaves(transpose(gradient))))
        leaves = [by_number.pop(of.count + index) for index in range(len(jax.tree.leaves(x)))]
        message = jax.tree.unflatten(jax.tree.structure(x), leaves)
        if of.number == 0:
            outer = self._where(
                row["enters"],
                self._parts.enter_has_layers,
                lambda outer: self._entering(of, outer, message, kept, context)[0],
                lambda outer: outer,
                outer,
            )
        else:
            outer, message = jax.lax.cond(
                row["enters"],
                lambda outer, message: self._entering(of, outer, message, kept, context),
                lambda outer, message: (outer, message),
                outer,
                message,
            )
        if self._skip_last:
            assert outputs is not None, "a stage that is computed again gives its sums"
            sums = _add_sums(sums, outputs[1])
        own = {**own, "outer": outer, "sums": sums}
        return self._add(of, own, by_number, row), message, for_second

    def _weight_gradients(self, of: "_Pass", own: Carry, carry: Carry, row: Row) -> Carry:
        """Run the second half of a split backward pass."""
        params, context = self._arguments(row, of.number)
        saved = by_rows(take(carry["residuals"][of.number], row["residual_slot"]))
        saved = saved[: len(of.backward.kept)]
        results = of.halves.second(
            by_rows(take(carry["stash"][of.number], row["stash_slot"])),
            *jax.tree.leaves((params, saved, context)),
        )
        return self._add(of, own, dict(zip(of.halves.late, results, strict=True)), row)

    # -- the model's parts -----------------------------------------------------------------------

    def _stage(self, number: int, params: Any, x: Stream, context: Any) -> tuple[Stream, Sums]:
        (of_layers, of_shared), (own, micro, numbers) = params, context
        parts, weighed = self._parts, self._with_gradient
        _, others = parts.of_pass(number, self._layers)
        shared, rest = parts.split_shared(self._outer)
        layers = parts.join(weighed(own, of_layers), weighed(others))
        outer = parts.join(weighed(shared, of_shared), weighed(rest))
        return parts.run_layers(number, layers, outer, x, micro, numbers)

    def _enter(self, number: int, of_outer: Variables, before: Stream, context: Any) -> Stream:
        micro = context[1]
        outer = self._with_gradient(self._outer, of_outer)
        return self._parts.enter(number, self._with_gradient(self._layers), outer, before, micro)

    def _head(self, of_outer: Variables, y: Stream, context: Any) -> Sums:
        micro = context[1]
        outer = self._with_gradient(self._outer, of_outer)
        return self._parts.head(self._with_gradient(self._layers), outer, y, micro)

    def _head_gradients(self, own: Carry, y: Stream, context: Any) -> Any:
        """Return the loss's gradient with respect to the last layer's output, and updated
        totals.
        """

        def loss(of_outer: Variables, y: Stream) -> tuple[jax.Array, Sums]:
            sums = self._head(of_outer, y, context)
            return self._parts.objective.total(sums, self._scales), sums

        (of_outer, y_gradient), sums = jax.grad(loss, (0, 1), has_aux=True)(self._of_outer, y)
        return y_gradient, _add(own["outer"], of_outer), _add_sums(own["sums"], sums)

    def _where(
        self,
        has: jax.Array,
        layers: bool,
        run: Callable[..., Any],
        other: Callable[..., Any],
        *own: Any,
    ) -> Any:
        """Run `run(*own)` on the ranks with work, `other(*own)` elsewhere.

        If `run` has `layers` with permutes like those of the stages, every rank
        computes both: a permute waits for all devices.
        """
        if self._together and layers:
            return select(has, run(*own), other(*own))
        return jax.lax.cond(has, run, other, *own)

    def _entering(
        self, of: "_Pass", outer: Any, gradient: Stream, before: Stream, context: Any
    ) -> tuple[Any, Stream]:
        """Return totals with the gradient of a pass's inputs added, and the gradient for the pass
        before."""
        _, transpose = jax.vjp(
            lambda outer, before: self._enter(of.number, outer, before, context),
            self._of_outer,
            before,
        )
        of_outer, of_inputs = transpose(gradient)
        return _add(outer, of_outer), {**jax.tree.map(jnp.zeros_like, gradient), **of_inputs}

    def _before(self, number: int, x: Stream) -> Stream:
        """Return the outputs of the earlier passes in a stream."""
        return {name: x[name] for name, first in self._parts.travels.items() if first < number}

    def _auxiliary_gradient(self, of: "_Pass") -> Sums:
        # Only minimized sums have a gradient; the others are metrics.
        none = jax.tree.map(zeros, of.auxiliary)
        return jax.grad(self._parts.objective.total)(none, self._scales)

    def _no_sums(self) -> Sums:
        row: Any = {"chunk": 0, "microbatch": 0}
        last = self._passes[-1]
        _, context = self._arguments(row, last.number)
        y = last.backward.outputs[0]
        sums = jax.eval_shape(lambda y: self._head(self._of_outer, y, context), y)
        for of in self._passes:
            sums = {**of.auxiliary, **sums}
        return jax.tree.map(zeros, sums)

    # -- slots of its buffers --------------------------------------------------------------------

    def _arguments(self, row: Row, number: int) -> tuple[Variables, Any]:
        """Return the parameters to differentiate a pass by, and the others that its stage uses."""
        micro = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, row["microbatch"], keepdims=False),
            self._micros,
        )
        layers, of_layers = (
            self._rows_of(self._parts.of_pass(number, tree)[0], row)
            for tree in (self._layers, self._of_layers)
        )
        context = layers, micro, self._rows_of(self._numbers, row)
        return (of_layers, self._parts.split_shared(self._of_outer)[0]), context

    def _stage_input(self, of: "_Pass", carry: Carry, row: Row, context: Any) -> Stream:
        def entering() -> Stream:
            before = self._before(of.number, self._receive(carry, row))
            return self._enter(of.number, self._of_outer, before, context)

        return self._where(
            row["enters"],
            self._parts.enter_has_layers,
            entering,
            lambda: self._receive(carry, row),
        )

    def _receive(self, carry: Carry, row: Row) -> Stream:
        return {name: take([waiting], row["input_slot"])[0]
                for name, waiting in carry["inputs"].items()}  # fmt: skip

    def _move(self, message: Stream, way: str, buffers: Stream, row: Row) -> Stream:
        """Return the buffers with received data; each pattern of edges is a permute of its own."""
        return {
            name: self._pass_on(message[name], crossing(way, name, first), buffers[name], row)
            for name, first in self._parts.travels.items()
        }

    def _pass_on(self, message: jax.Array, way: str, buffer: jax.Array, row: Row) -> jax.Array:
        slot = row[f"receive_{'input' if way.startswith('forward') else 'gradient'}_slot"]

        def along(number: int, edges: Edges) -> Callable[[jax.Array], jax.Array]:
            def send(buffer: jax.Array) -> jax.Array:
                arrived = message
                if any(source != to for source, to in edges):
                    with jax.named_scope(f"send_{way}_{number}"):
                        arrived = jax.lax.ppermute(message, "pipe", edges)
                return jax.lax.cond(
                    slot >= 0,
                    lambda buffer: put([buffer], slot, [arrived])[0],
                    lambda buffer: buffer,
                    buffer,
                )

            # In a tick without this direction nothing is written either.
            return send if edges else lambda buffer: buffer

        senders = [along(number, edges) for number, edges in enumerate(self._patterns[way])]
        return jax.lax.switch(row[way], senders, buffer)

    def _store(
        self, carry: Carry, name: str = "", of: "_Pass | None" = None, new: Any = ()
    ) -> Kept:
        """Return what an action stores for later ones: zeros except for `new` of a pass."""
        kept = {
            name: [[jnp.zeros_like(b[0]) for b in own] for own in carry[name]] for name in _KEPT
        }
        if of is not None:
            kept[name][of.number] = [
                v.astype(b.dtype) for v, b in zip(new, carry[name][of.number], strict=True)
            ]
        return kept

    def _put_away(
        self, carry: Carry, name: str, kept: list[list[jax.Array]], row: Row
    ) -> list[list[jax.Array]]:
        """Return the buffers of one name with the results of the tick's action, if it
        stores any.
        """
        kind, slot = _KEPT[name]
        found = []
        for number, (buffers, new) in enumerate(zip(carry[name], kept, strict=True)):
            if buffers and (kind, number) in self._actions:
                writes = row["action"] == self._actions.index((kind, number))
                buffers = jax.lax.cond(
                    writes,
                    lambda buffers, new=new: put(buffers, row[slot], by_rows(new)),
                    lambda buffers: buffers,
                    buffers,
                )
            found.append(buffers)
        return found

    def _mask_idle(self, found: Any, row: Row) -> Any:
        """Return the results of an action, zeros where the rank is idle in this tick."""
        if not self._together:
            return found
        busy = row["busy"] > 0
        return jax.tree.map(lambda x: jnp.where(busy, x, jnp.zeros_like(x)), found)

    def _rows_of(self, tree: Any, row: Row) -> Any:
        """Return the indices of this tick's stage among a rank's layers."""
        if self._stages.chunks == 1:
            return tree
        size = self._stages.longest
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, row["chunk"] * size, size), tree
        )

    def _add(self, of: "_Pass", own: Carry, gradients: dict[int, jax.Array], row: Row) -> Carry:
        """Return the totals with a stage's gradients added, by their indices among its
        parameters.
        """
        start = row["chunk"] * self._stages.longest
        layers, outer = list(own["layers"]), list(own["outer"])
        for number, gradient in self._mask_idle(gradients, row).items():
            if number >= len(of.layers):
                slot = of.shared[number - len(of.layers)]
                outer[slot] += gradient.astype(outer[slot].dtype)
                continue
            total = layers[of.layers[number]]
            new = self._rows_of(total, row) + gradient.astype(total.dtype)
            if self._stages.chunks > 1:
                new = jax.lax.dynamic_update_slice_in_dim(total, new, start, axis=0)
            layers[of.layers[number]] = new
        return {**own, "layers": layers, "outer": outer}


@dataclasses.dataclass(frozen=True)
class _Pass:
    """Functions and shapes of one pass around the ring, on a rank.

    Attributes:
      number: index from 0.
      backward: of a stage.
      auxiliary: shapes of its layers' sums.
      kept: shapes of what is stored from a microbatch's forward to its backward.
      halves: of the backward pass, if it is split.
      layers: indices of its layers' parameters among those of all layers.
      shared: indices, among the parameters around the layers, of those that its layers read.
    """

    number: int
    backward: Backward
    auxiliary: Sums
    kept: list[Any]
    halves: Any
    layers: list[int]
    shared: list[int]

    @property
    def count(self) -> int:
        """Number of arrays that a stage is differentiated by, except its input."""
        return len(self.layers) + len(self.shared)

    @property
    def stash(self) -> Sequence[Any]:
        """Shapes of what the first half of a backward pass passes to the second."""
        return () if self.halves is None else self.halves.stash


def action_numbers(table: Slots, passes: int, chunks: int) -> np.ndarray:
    """Return the number of a rank's action in each tick: kind of work times `passes`, plus the
    pass.

    Args:
      table: the schedule.
      passes: around the ring.
      chunks: stages of each rank in one of them.
    """
    return table.kind * passes + np.where(table.kind == Work.IDLE, 0, table.chunk // chunks)


def _add(totals: list[jax.Array], parts: Any) -> list[jax.Array]:
    """Return the totals of a tree's leaves with another tree's added."""
    leaves = jax.tree.leaves(parts)
    return [t + p.astype(t.dtype) for t, p in zip(totals, leaves, strict=True)]


def _add_sums(total: Sums, part: Sums) -> Sums:
    """Add sums by name; those that `part` lacks are unchanged."""
    return {name: value + part[name] if name in part else value for name, value in total.items()}
