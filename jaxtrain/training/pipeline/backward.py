"""Backward pass of a stage: whole, or split into input and weight gradients.

The zero-bubble schedules (arXiv 2401.10241) need the gradient of a stage's input early and those of
its weights at any later time. Here the traced backward pass is split between its operations: what
the input's gradient needs runs first; the rest runs later, from the values that cross the split.
What each device computes by itself (`shard_map`: experts, kernels) is one operation there, and is
split too.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

# Operations that only call another traced function: they are inlined.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}

# Operations that are fused into their consumers.
_FREE = {"reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "name"}
_FREE |= {"convert_element_type", "neg"}

StageFunction = Callable[[Any, Any, Any], Any]


class Backward:
    """Forward and backward pass of `stage(params, x, context) -> outputs`, traced once.

    Attributes:
      keep_residuals: whether the forward pass saves its residuals; else backward recomputes the
        stage from x.
      outputs: shapes of the stage's outputs.
      kept: shapes of what `forward` saves of a microbatch, in addition to x.
    """

    def __init__(
        self, stage: StageFunction, params: Any, x: Any, context: Any, *, keep_residuals: bool
    ) -> None:
        """Trace the stage with arguments of these shapes; it is differentiated by params and x."""
        self.keep_residuals, self._stage = keep_residuals, stage

        self.kept: list[Any] = []
        if not keep_residuals:
            self.outputs = jax.eval_shape(stage, params, x, context)
            return

        def trace(params: Any, x: Any, context: Any) -> Any:
            outputs, transpose = self._vjp(params, x, context)
            residuals, self._tree = jax.tree.flatten(transpose)
            return outputs, residuals

        closed, (self.outputs, residuals) = jax.make_jaxpr(trace, return_shape=True)(
            params, x, context
        )
        flat = _inline(closed, jax.tree.leaves((params, x, context)))
        number_of_x = len(jax.tree.leaves(params))
        wanted = flat.jaxpr.outvars[len(jax.tree.leaves(self.outputs)) :]
        # Residuals that depend only on parameters and context (weights, masks) are not saved
        # for every microbatch but recomputed.
        of_x = flat.jaxpr.invars[number_of_x : number_of_x + len(jax.tree.leaves(x))]
        self._depends = _reachable(flat.jaxpr, of_x, wanted)
        again = [v for v, depends in zip(wanted, self._depends, strict=True) if not depends]
        self._again = ClosedJaxpr(
            _part(flat.jaxpr, flat.jaxpr.invars, again, _needed_equations(flat.jaxpr, again)),
            flat.consts,
        )
        self.kept = self._dependent(residuals)

    def forward(self, params: Any, x: Any, context: Any) -> tuple[Any, list[jax.Array]]:
        """Run the stage; return its outputs, and the residuals for `transpose`."""
        if not self.keep_residuals:
            return self._stage(params, x, context), []
        outputs, transpose = self._vjp(params, x, context)
        return outputs, self._dependent(jax.tree.leaves(transpose))

    def transpose(
        self, kept: Sequence[jax.Array], params: Any, x: Any, context: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """Return the stage's outputs (None if only residuals were kept), and its transpose.

        The transpose gives the gradients of `params` and `x` for a gradient of the outputs.
        """
        if not self.keep_residuals:
            return self._vjp(params, x, context)
        remaining = iter(kept)
        again = iter(jaxpr_as_fun(self._again)(*jax.tree.leaves((params, x, context))))
        residuals = [next(remaining) if depends else next(again) for depends in self._depends]
        return None, jax.tree.unflatten(self._tree, residuals)

    def halves(self, params: Any, x: Any, context: Any) -> "Halves":
        """Split `transpose` in two: x's gradient first, and later those of params.

        Arguments are shapes. The halves map leaves: of params, residuals, context, x
        and the outputs' gradients, to those of the gradients of params and x.
        """
        again = params, self.kept, context
        leaves, tree = jax.tree.flatten((*again, x, self.outputs))

        def run(*leaves: jax.Array) -> list[jax.Array]:
            params, kept, context, x, gradient = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(self.transpose(kept, params, x, context)[1](gradient))

        count, given_again = len(jax.tree.leaves(params)), len(jax.tree.leaves(again))
        return cut(
            run,
            leaves,
            early=lambda number: number >= count,
            available=lambda number: number < given_again,
        )

    def _vjp(self, params: Any, x: Any, context: Any) -> tuple[Any, Callable[..., Any]]:
        return jax.vjp(lambda params, x: self._stage(params, x, context), params, x)

    def _dependent(self, residuals: Sequence[Any]) -> list[Any]:
        return [r for r, depends in zip(residuals, self._depends, strict=True) if depends]


@dataclasses.dataclass(frozen=True)
class Halves:
    """Traced function split in two: `first` returns some results early, `second` the others later.

    Attributes:
      early: indices of the results (leaves, in order) of `first`.
      late: indices of the results of `second`.
      stash: shapes of what `first` passes to `second`.
    """

    early: tuple[int, ...]
    late: tuple[int, ...]
    stash: tuple[jax.ShapeDtypeStruct, ...]
    _first: ClosedJaxpr
    _second: ClosedJaxpr
    _again: tuple[int, ...]

    def first(self, *arguments: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the early results and the stash."""
        results = jaxpr_as_fun(self._first)(*arguments)
        return results[: len(self.early)], results[len(self.early) :]

    def second(self, stash: Sequence[jax.Array], *arguments: jax.Array) -> list[jax.Array]:
        """Return the late results.

        Args:
          stash: from `first`.
          arguments: those of `first`; only the ones that were declared available are read.
        """
        again = [arguments[number] for number in self._again]
        return jaxpr_as_fun(self._second)(*stash, *again)


def cut(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    early: Callable[[int], bool],
    available: Callable[[int], bool],
) -> Halves:
    """Split `function(*arguments) -> sequence of arrays` in two.

    A result that needs nothing beyond what the early ones need is returned early too.

    Args:
      function: maps flat sequences of arrays.
      arguments: their shapes.
      early: index of a result -> whether it is needed early.
      available: index of an argument -> whether the second half gets it again, so that it need not
        be stashed.
    """
    flat = _inline(jax.make_jaxpr(function)(*arguments), arguments)
    flat = _with_devices_cut(flat, early, arguments)
    jaxpr = flat.jaxpr
    wanted = [v for n, v in enumerate(jaxpr.outvars) if early(n)]
    first = _needed_equations(jaxpr, wanted)
    made = {var for eqn in first for var in eqn.outvars}
    known = made | set(jaxpr.invars) | set(jaxpr.constvars)
    late = [n for n, v in enumerate(jaxpr.outvars) if not isinstance(v, Literal) and v not in known]
    early_numbers = [n for n in range(len(jaxpr.outvars)) if n not in late]
    ids = {id(eqn) for eqn in first}
    rest = [eqn for eqn in jaxpr.eqns if id(eqn) not in ids]
    second = _needed_equations(jaxpr.replace(eqns=rest), [jaxpr.outvars[n] for n in late])
    again_vars = {v: n for n, v in enumerate(jaxpr.invars) if available(n)}
    second, inputs, crossing = _lighter(jaxpr, first, second, [], again_vars)
    again = [v for v in inputs if v in again_vars]
    first_jaxpr = _part(
        jaxpr, jaxpr.invars, [*(jaxpr.outvars[n] for n in early_numbers), *crossing], first
    )
    second_jaxpr = _part(jaxpr, [*crossing, *again], [jaxpr.outvars[n] for n in late], second)
    stash = tuple(_shape(v) for v in crossing)
    return Halves(
        tuple(early_numbers),
        tuple(late),
        stash,
        ClosedJaxpr(first_jaxpr, flat.consts),
        ClosedJaxpr(second_jaxpr, flat.consts),
        tuple(again_vars[v] for v in again),
    )


def _with_devices_cut(
    flat: ClosedJaxpr, early: Callable[[int], bool], arguments: Sequence[Any]
) -> ClosedJaxpr:
    """Return the function with each `shard_map` split that has both early and other results."""
    jaxpr = flat.jaxpr
    wanted = [v for n, v in enumerate(jaxpr.outvars) if early(n)]
    first = _needed_equations(jaxpr, wanted)
    live = {*(v for v in wanted if not isinstance(v, Literal))}
    live |= {v for eqn in first for v in eqn.invars if not isinstance(v, Literal)}
    both = {
        id(eqn): [var in live for var in eqn.outvars]
        for eqn in first
        if eqn.primitive.name == "shard_map" and not all(var in live for var in eqn.outvars)
    }
    if not both:
        return flat

    def evaluate(*arguments: Any) -> list[Any]:
        values = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*flat.consts, *arguments], strict=True)
        )
        for splits, eqns in itertools.groupby(jaxpr.eqns, key=lambda eqn: id(eqn) in both):
            if not splits:
                _run(list(eqns), values)
                continue
            for eqn in eqns:
                results = _on_separate_devices(eqn, _read(eqn.invars, values), both[id(eqn)])
                values.update(zip(eqn.outvars, results, strict=True))
        return _read(jaxpr.outvars, values)

    return jax.make_jaxpr(evaluate)(*arguments)


def _on_separate_devices(eqn: Any, inputs: Sequence[Any], early: Sequence[bool]) -> list[Any]:
    """Return the results of a `shard_map` run as two: the early results, and from theirs the rest.

    Values that cross are per device: [devices, ...].
    """
    given, made = eqn.params["in_specs"], eqn.params["out_specs"]
    over = eqn.params.get("newly_manual_axes") or eqn.params["manual_axes"]
    own = P(tuple(name for name in eqn.params["mesh"].axis_names if name in over))
    inner: list[ClosedJaxpr] = []

    def shard_map(
        function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        checks = eqn.params["check_vma"]
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=set(over), check_vma=checks
        )

    def trace(*shards: Any) -> tuple[Any, ...]:
        inner.append(_inline(ClosedJaxpr(eqn.params["jaxpr"], ()), shards))
        return tuple(jaxpr_as_fun(inner[0])(*shards))

    jax.eval_shape(shard_map(trace, given, made), *inputs)
    flat, consts = inner[0].jaxpr, inner[0].consts
    soon, late = ([n for n, one in enumerate(early) if one is first] for first in (True, False))
    first = _needed_equations(flat, [flat.outvars[n] for n in soon])
    done = {id(eqn) for eqn in first}
    rest = flat.replace(eqns=[eqn for eqn in flat.eqns if id(eqn) not in done])
    second = _needed_equations(rest, [flat.outvars[n] for n in late])
    ends = [flat.outvars[n] for n in late]
    second, read, crossing = _lighter(flat, first, second, ends, flat.invars)
    again = [n for n, v in enumerate(flat.invars) if v in read]

    def run_first(*shards: Any) -> tuple[Any, ...]:
        outvars = [*(flat.outvars[n] for n in soon), *crossing]
        results = jaxpr_as_fun(ClosedJaxpr(_part(flat, flat.invars, outvars, first), consts))
        found = results(*shards)
        return (*found[: len(soon)], *(x[None] for x in found[len(soon) :]))

    def run_second(*shards: Any) -> tuple[Any, ...]:
        invars = [*crossing, *(flat.invars[n] for n in again)]
        outvars = [flat.outvars[n] for n in late]
        results = jaxpr_as_fun(ClosedJaxpr(_part(flat, invars, outvars, second), consts))
        count = len(crossing)
        return tuple(results(*(x[0] for x in shards[:count]), *shards[count:]))

    own_of_all = [own] * len(crossing)
    found = shard_map(run_first, given, (*(made[n] for n in soon), *own_of_all))(*inputs)
    others = shard_map(
        run_second,
        (*own_of_all, *(given[n] for n in again)),
        tuple(made[n] for n in late),
    )(*found[len(soon) :], *(inputs[n] for n in again))
    numbered = dict(zip(soon, found, strict=False)) | dict(zip(late, others, strict=True))
    return [numbered[n] for n in range(len(early))]


def _lighter(
    jaxpr: Jaxpr,
    first: Sequence[Any],
    second: Sequence[Any],
    ends: Sequence[Any],
    free: Collection[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the second half with cheap operations recomputed, where the stash becomes smaller.

    Args:
      jaxpr: of both halves.
      first, second: the equations of its halves.
      ends: results of the second half.
      free: variables that it gets again.

    Returns:
      its equations, the variables that it reads, and which of them cross.
    """
    makers = {var: eqn for eqn in first for var in eqn.outvars}
    chosen = {id(eqn) for eqn in second}
    while True:
        eqns = [eqn for eqn in jaxpr.eqns if id(eqn) in chosen]
        own = {*jaxpr.constvars, *(var for eqn in eqns for var in eqn.outvars)}
        read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        read |= dict.fromkeys(v for v in ends if not isinstance(v, Literal))
        crossing = [v for v in read if v not in own and v not in free]
        for var in crossing:
            maker = makers.get(var)
            if maker is None or maker.primitive.name not in _FREE:
                continue
            of = {v for v in maker.invars if not isinstance(v, Literal)}
            if sum(_bytes(v) for v in of if v not in free and v not in crossing) <= _bytes(var):
                chosen.add(id(maker))
                break
        else:
            return eqns, list(read), crossing


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _read(variables: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else values[v] for v in variables]


def _run(eqns: Sequence[Any], values: dict[Any, Any]) -> None:
    """Run equations that follow each other, and add their results to the values they read."""
    made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
    inputs = [v for v in read if v not in made]
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    part = ClosedJaxpr(Jaxpr((), inputs, list(made), list(eqns), effects), ())
    values.update(zip(made, jaxpr_as_fun(part)(*(values[v] for v in inputs)), strict=True))


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    aval = var.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=getattr(aval, "sharding", None))


def _needed_equations(jaxpr: Jaxpr, wanted: Sequence[Any]) -> list[Any]:
    """Return the equations that the wanted variables depend on, in order."""
    live = {v for v in wanted if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if any(var in live for var in eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]


def _reachable(jaxpr: Jaxpr, sources: Sequence[Any], wanted: Sequence[Any]) -> list[bool]:
    """Return for each wanted variable whether it depends on any of `sources`."""
    reached = {*sources}
    for eqn in jaxpr.eqns:
        if any(v in reached for v in eqn.invars if not isinstance(v, Literal)):
            reached.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in reached for v in wanted]


def _part(of: Jaxpr, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Jaxpr:
    return Jaxpr(of.constvars, list(invars), list(outvars), list(eqns))


def _is_call(eqn: Any) -> bool:
    return eqn.primitive.name in _CALLS


def _inline(closed: ClosedJaxpr, arguments: Sequence[Any]) -> ClosedJaxpr:
    """Return the function without calls: their equations are inlined."""

    def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        for calls, eqns in itertools.groupby(jaxpr.eqns, key=_is_call):
            if not calls:
                _run(list(eqns), values)
                continue
            for eqn in eqns:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                if not isinstance(inner, ClosedJaxpr):
                    inner = ClosedJaxpr(inner, ())
                results = evaluate(inner.jaxpr, inner.consts, _read(eqn.invars, values))
                values.update(zip(eqn.outvars, results, strict=True))
        return _read(jaxpr.outvars, values)

    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*arguments)
