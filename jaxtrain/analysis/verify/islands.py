"""Float32 islands: operations that stay in float32 for every compute dtype (mixed precision)."""

import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

# Primitives that distinguish an island from a cast or a copy, and their display names.
_KINDS = {
    "dot_general": "products", "ragged_dot_general": "products", "conv_general_dilated": "products",
    "reduce_sum": "sums", "exp": "exp", "log": "log", "rsqrt": "rsqrt", "logistic": "sigmoid",
    "tanh": "tanh", "erf": "erf", "cos": "cos", "sin": "sin",
}  # fmt: skip
_TRANSFORMED = re.compile(r"\w+\(|\)")  # in scope names under `jax.grad`: transpose(jvp(loss))


def float32_islands(program: ClosedJaxpr) -> dict[str, list[str]]:
    """Return the kinds of float32 operations by named scope, in the forward and backward passes.

    Args:
      program: the program, traced by `jax.make_jaxpr`.
    """
    found: dict[str, set[str]] = {}
    for scope, equation in _equations(program.jaxpr, ""):
        kind = _KINDS.get(equation.primitive.name)
        if scope and kind is not None and _reads_float32(equation):
            found.setdefault(scope, set()).add(kind)
    return {scope: sorted(kinds) for scope, kinds in sorted(found.items())}


def _equations(jaxpr: Jaxpr, outer: str) -> Iterator[tuple[str, JaxprEqn]]:
    for equation in jaxpr.eqns:
        parts = _TRANSFORMED.sub("", str(equation.source_info.name_stack)).split("/")
        # Scopes of matmuls are named after their einsum equations.
        own = [part for part in parts if part and "->" not in part]
        scope = "/".join([outer, *own] if outer else own)
        yield scope, equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner, scope)


def _reads_float32(equation: JaxprEqn) -> bool:
    avals: list[Any] = [operand.aval for operand in equation.invars]
    return any(hasattr(x, "dtype") and x.shape and x.dtype == jnp.float32 for x in avals)
