"""What one rank of a pipeline does in each tick, traced inside the `shard_map` over `pipe`.

Backward is written by hand, tick by tick, so that a microbatch's activations live from its forward
to its backward and no longer: autodiff of the loop over ticks would keep them all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.pipeline.backward import Backward, cut
from jaxtrain.training.pipeline.parts import Parts, Variables
from jaxtrain.training.pipeline.slots import Slots
from jaxtrain.training.pipeline.stages import Stages
from jaxtrain.training.pipeline.table import Work

Edges = tuple[tuple[int, int], ...]
Row = dict[str, jax.Array]
Carry = dict[str, Any]


class Rank:
    """A rank's part of the parameters and of the schedule."""

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
    ) -> None:
        """Nothing is computed yet.

        Args:
          parts: the model.
          stages: which layers each stage has.
          table: the schedule as arrays.
          names: of what a tick's row has, the rank's own and everyone's.
          patterns: for each way, the distinct sets of edges that a tick uses.
          with_gradient: as in Engine.
          keep_residuals: as in Backward.
        """
        self._parts, self._stages, self._table, self._patterns = parts, stages, table, patterns
        self._names = names
        self._with_gradient, self._keep_residuals = with_gradient, keep_residuals
        self._kinds = sorted({Work(kind) for kind in table.kind.flat})
        self._split = Work.BACKWARD_INPUT in self._kinds
        # Where backward computes the stage again, nothing waits for what the last stage gives.
        self._skip_last = table.has_backward and not keep_residuals and not self._split

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
    ) -> tuple[Variables, Variables, Sums]:
        """All ticks: gradients of the rank's layers and of what stands around them, and sums.

        Args:
          ticks: int32 [ticks, names] each: the table's columns of the rank, and of everyone.
          numbers: the layer at each of the rank's places, -1 where there is none.
          layers, outer: parameters to compute with.
          of_layers, of_outer: what the gradients are taken with respect to.
          micros: the microbatches.
          scales: for each count of the objective, what the sums over it are multiplied by.
        """
        self._layers, self._of_layers, self._outer, self._of_outer = (
            layers, of_layers, outer, of_outer
        )  # fmt: skip
        self._numbers, self._micros, self._scales = numbers, micros, scales
        first: Any = {"chunk": 0, "microbatch": 0}
        params, context = self._arguments(first)
        x = jax.eval_shape(lambda: self._embed(of_outer, context))
        self._backward_pass = Backward(
            self._stage, params, x, context, keep_residuals=self._keep_residuals
        )
        y, self._auxiliary = self._backward_pass.outputs
        # The last stage's loss begins at what it gives, so that is kept too.
        residuals = [*self._backward_pass.kept, y] if self._keep_residuals else []
        self._halves: Any = self._cut(params, residuals, context, x) if self._split else None
        stash = [] if self._halves is None else self._halves.stash
        totals, tree = jax.tree.flatten(of_layers)
        table = self._table
        carry = {
            "inputs": _buffer(x, table.num_input_slots),
            "gradients": _buffer(x, table.num_gradient_slots),
            "residuals": [_buffer(r, table.num_residual_slots) for r in residuals],
            "stash": [_buffer(s, table.num_stash_slots) for s in stash],
            "layers": [jnp.zeros_like(total, jnp.float32) for total in totals],
            "outer": jax.tree.map(lambda v: jnp.zeros_like(v, jnp.float32), of_outer),
            "sums": self._no_sums(y),
        }
        carry, _ = jax.lax.scan(self._tick, carry, ticks)
        return jax.tree.unflatten(tree, carry["layers"]), carry["outer"], carry["sums"]

    # -- one tick --------------------------------------------------------------------------------

    def _tick(self, carry: Carry, tick: tuple[jax.Array, jax.Array]) -> tuple[Carry, None]:
        row: Row = {}
        for names, numbers in zip(self._names, tick, strict=True):
            row |= {name: numbers[place] for place, name in enumerate(names)}
        row |= {name: row[name] > 0 for name in ("first", "last")}
        own = {name: carry[name] for name in carry if name not in ("inputs", "gradients")}
        nothing = jnp.zeros_like(carry["inputs"][0])
        actions: dict[Work, Callable[[Carry], tuple[Carry, jax.Array]]] = {
            Work.IDLE: lambda own: (own, nothing),
            Work.FORWARD: lambda own: self._forward(own, carry, row),
            Work.BACKWARD: lambda own: self._backward(own, carry, row),
            Work.BACKWARD_INPUT: lambda own: self._backward(own, carry, row),
            Work.BACKWARD_WEIGHT: lambda own: (self._weight_gradients(own, row), nothing),
        }
        with jax.named_scope("stage"):
            own, message = jax.lax.switch(
                row["action"], [actions[kind] for kind in self._kinds], own
            )
        return {
            **own,
            "inputs": self._move(message, "forward", carry["inputs"], row),
            "gradients": self._move(message, "backward", carry["gradients"], row),
        }, None

    def _forward(self, own: Carry, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        params, context = self._arguments(row)

        def run(own: Carry) -> tuple[Carry, jax.Array]:
            x = self._stage_input(carry, row, context)
            (y, auxiliary), kept = self._backward_pass.forward(params, x, context)
            if self._keep_residuals:
                own = {**own, "residuals": _put(own["residuals"], row["residual_slot"], [*kept, y])}
            if not self._skip_last:
                own = {**own, "sums": _add_sums(own["sums"], auxiliary)}
            return own, y

        if self._skip_last:
            return jax.lax.cond(
                row["last"], lambda own: (own, jnp.zeros_like(carry["inputs"][0])), run, own
            )
        own, y = run(own)
        if self._table.has_backward:
            return own, y
        sums = jax.lax.cond(
            row["last"],
            lambda sums: _add_sums(sums, self._head(self._of_outer, y, context)),
            lambda sums: sums,
            own["sums"],
        )
        return {**own, "sums": sums}, y

    def _backward(self, own: Carry, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        params, context = self._arguments(row)
        x = self._stage_input(carry, row, context)
        saved = _take(own["residuals"], row["residual_slot"])
        outputs: Any = None
        transpose: Any = None
        if self._halves is None:
            outputs, transpose = self._backward_pass.transpose(saved[:-1], params, x, context)

        def y() -> jax.Array:
            if self._keep_residuals:
                return saved[-1]
            return (self._stage(params, x, context) if outputs is None else outputs)[0]

        y_gradient, outer, sums = jax.lax.cond(
            row["last"],
            lambda: self._head_gradients(own, y(), context),
            lambda: (
                _take([carry["gradients"]], row["gradient_slot"])[0], own["outer"], own["sums"]
            ),
        )  # fmt: skip
        gradient = y_gradient, self._auxiliary_gradient()
        if transpose is None:
            assert self._halves is not None, "a stage that is not cut has a transpose"
            arguments = jax.tree.leaves((params, saved[:-1], context, x, gradient))
            results, stash = self._halves.first(*arguments)
            by_number = dict(zip(self._halves.early, results, strict=True))
            own = {**own, "stash": _put(own["stash"], row["stash_slot"], stash)}
        else:
            by_number = dict(enumerate(jax.tree.leaves(transpose(gradient))))
        x_gradient = by_number.pop(len(own["layers"]))
        outer = jax.lax.cond(
            row["first"],
            lambda outer: self._embedding_gradients(outer, x_gradient, context),
            lambda outer: outer,
            outer,
        )
        if self._skip_last:
            sums = _add_sums(sums, outputs[1])
        layers = self._add_layers(own["layers"], by_number, row)
        return {**own, "layers": layers, "outer": outer, "sums": sums}, x_gradient

    def _weight_gradients(self, own: Carry, row: Row) -> Carry:
        """The second half of a backward pass that was cut in two."""
        params, context = self._arguments(row)
        saved = _take(own["residuals"], row["residual_slot"])[:-1]
        results = self._halves.second(
            _take(own["stash"], row["stash_slot"]), *jax.tree.leaves((params, saved, context))
        )
        by_number = dict(zip(self._halves.late, results, strict=True))
        return {**own, "layers": self._add_layers(own["layers"], by_number, row)}

    # -- the model's parts -----------------------------------------------------------------------

    def _stage(self, of_layers: Variables, x: jax.Array, context: Any) -> tuple[jax.Array, Sums]:
        layers, micro, numbers = context
        params = self._with_gradient(layers, of_layers)
        outer = self._with_gradient(self._outer)
        return self._parts.run_layers(params, outer, x, micro, numbers)

    def _embed(self, of_outer: Variables, context: Any) -> jax.Array:
        layers, micro, _ = context
        outer = self._with_gradient(self._outer, of_outer)
        return self._parts.embed(self._with_gradient(layers), outer, micro)

    def _head(self, of_outer: Variables, y: jax.Array, context: Any) -> Sums:
        layers, micro, _ = context
        outer = self._with_gradient(self._outer, of_outer)
        return self._parts.head(self._with_gradient(layers), outer, y, micro)

    def _head_gradients(self, own: Carry, y: jax.Array, context: Any) -> Any:
        """The loss's gradient with respect to what the last layer gives; totals with it added."""

        def loss(of_outer: Variables, y: jax.Array) -> tuple[jax.Array, Sums]:
            sums = self._head(of_outer, y, context)
            return self._parts.objective.total(sums, self._scales), sums

        (of_outer, y_gradient), sums = jax.grad(loss, (0, 1), has_aux=True)(self._of_outer, y)
        return y_gradient, _add(own["outer"], of_outer), _add_sums(own["sums"], sums)

    def _embedding_gradients(self, outer: Any, x_gradient: jax.Array, context: Any) -> Any:
        _, transpose = jax.vjp(lambda outer: self._embed(outer, context), self._of_outer)
        return _add(outer, transpose(x_gradient)[0])

    def _auxiliary_gradient(self) -> Sums:
        # Only what is minimised has a gradient; the other sums are metrics.
        none = jax.tree.map(zeros, self._auxiliary)
        return jax.grad(self._parts.objective.total)(none, self._scales)

    def _no_sums(self, y: jax.ShapeDtypeStruct) -> Sums:
        _, context = self._arguments({"chunk": 0, "microbatch": 0})  # type: ignore[dict-item] - both are indices
        sums = jax.eval_shape(lambda y: self._head(self._of_outer, y, context), y)
        return jax.tree.map(zeros, {**self._auxiliary, **sums})

    def _cut(self, params: Any, residuals: Sequence[Any], context: Any, x: Any) -> Any:
        """The stage's backward pass in two halves."""
        saved = residuals[:-1]
        gradient = (self._backward_pass.outputs[0], self._auxiliary)
        again = (params, saved, context)
        leaves, tree = jax.tree.flatten((*again, x, gradient))

        def run(*leaves: jax.Array) -> list[jax.Array]:
            params, saved, context, x, gradient = jax.tree.unflatten(tree, leaves)
            _, transpose = self._backward_pass.transpose(saved, params, x, context)
            return jax.tree.leaves(transpose(gradient))

        number_of_x = len(jax.tree.leaves(params))
        given_again = len(jax.tree.leaves(again))
        return cut(
            run,
            leaves,
            early=lambda number: number == number_of_x,
            available=lambda number: number < given_again,
        )

    # -- its places in the buffers ---------------------------------------------------------------

    def _arguments(self, row: Row) -> tuple[Variables, Any]:
        """Parameters that the gradient is taken by, and the rest that a stage works with."""
        micro = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, row["microbatch"], keepdims=False),
            self._micros,
        )
        context = self._rows_of(self._layers, row), micro, self._rows_of(self._numbers, row)
        return self._rows_of(self._of_layers, row), context

    def _stage_input(self, carry: Carry, row: Row, context: Any) -> jax.Array:
        return jax.lax.cond(
            row["first"],
            lambda: self._embed(self._of_outer, context),
            lambda: _take([carry["inputs"]], row["input_slot"])[0],
        )

    def _move(self, message: jax.Array, way: str, buffer: jax.Array, row: Row) -> jax.Array:
        """The buffer with what arrived in it: every pattern of edges is a permute of its own."""

        slot = row["receive_input_slot" if way == "forward" else "receive_gradient_slot"]

        def along(number: int, edges: Edges) -> Callable[[jax.Array], jax.Array]:
            def send(buffer: jax.Array) -> jax.Array:
                with jax.named_scope(f"send_{way}_{number}"):
                    arrived = jax.lax.ppermute(message, "pipe", edges)
                return jax.lax.cond(
                    slot >= 0,
                    lambda buffer: _put([buffer], slot, [arrived])[0],
                    lambda buffer: buffer,
                    buffer,
                )

            # In a tick without this way nothing is written either.
            return send if edges else lambda buffer: buffer

        senders = [along(number, edges) for number, edges in enumerate(self._patterns[way])]
        return jax.lax.switch(row[f"{way}_pattern"], senders, buffer)

    def _rows_of(self, tree: Any, row: Row) -> Any:
        """The places of this tick's stage among a rank's places."""
        if self._stages.chunks == 1:
            return tree
        size = self._stages.longest
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, row["chunk"] * size, size), tree
        )

    def _add_layers(self, totals: list[Any], parts: dict[int, jax.Array], row: Row) -> list[Any]:
        """The totals with the gradients of this tick's stage added, by the number of their leaf."""
        start = row["chunk"] * self._stages.longest

        def one(total: jax.Array, part: jax.Array) -> jax.Array:
            new = self._rows_of(total, row) + part.astype(total.dtype)
            if self._stages.chunks == 1:
                return new
            return jax.lax.dynamic_update_slice_in_dim(total, new, start, axis=0)

        return [
            one(total, parts[number]) if number in parts else total
            for number, total in enumerate(totals)
        ]


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of this shape, dtype and sharding."""
    return _zeros(shape, ())


def _buffer(shape: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    return _zeros(shape, (max(slots, 1),))


def _zeros(shape: jax.ShapeDtypeStruct, leading: tuple[int, ...]) -> jax.Array:
    spec = None if shape.sharding is None else P(*[None] * len(leading), *shape.sharding.spec)
    return jnp.zeros((*leading, *shape.shape), shape.dtype, out_sharding=spec)


def _take(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(b, slot, keepdims=False) for b in buffers]


def _put(buffers: Any, slot: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
    return [
        jax.lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), slot, 0)
        for b, v in zip(buffers, values, strict=True)
    ]


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part)


def _add_sums(total: Sums, part: Sums) -> Sums:
    """Name by name; those that `part` has not stay."""
    return {name: value + part[name] if name in part else value for name, value in total.items()}
