"""FLOP counter of a traced program: matmuls exactly, loops and recomputation included.

A jaxpr describes the computation on global shapes, before a compiler rearranges it, so the count
is of the whole program over all devices. Compiled programs do not provide it: their loop bodies are
counted once, and TPU compilers for many devices give no count at all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.nn.remat import is_grouped

# Primitives without arithmetic, which only move, name or compare values: no FLOPs.
_MOVES = frozenset(
    {
        "all_gather", "all_to_all", "bitcast_convert_type", "broadcast_in_dim", "concatenate",
        "convert_element_type", "copy", "copy_p", "device_put", "dynamic_slice",
        "dynamic_update_slice", "expand_dims", "gather", "get", "iota", "masked_load",
        "masked_swap", "mesh_cast", "name", "optimization_barrier", "pad", "pbroadcast", "ppermute",
        "pvary", "ragged_all_to_all", "random_bits", "random_seed", "random_unwrap", "random_wrap",
        "reduce_precision", "reshape", "reshard", "rev", "select_n", "sharding_constraint",
        "slice", "sort", "split", "squeeze", "stop_gradient", "swap", "transpose",
    }
)  # fmt: skip
# Primitives whose code is not part of the jaxpr.
_OPAQUE = ("callback", "custom_call", "dot_product_attention", "ffi_call")


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of a program over all devices; a multiply-add is two.

    Attributes:
      matmul: FLOPs of matmuls and convolutions, with the most expensive branch of each `cond`: an
        upper bound.
      matmul_least: the same with the cheapest branches; equal to `matmul` if all cost the same.
      chosen: the part of `matmul` in scopes selected by the caller's predicate.
      narrow: the part of `matmul` whose operands are all 8-bit, float8 or int8.
      elementwise: approximate FLOPs of everything else: one for each element that an arithmetic
        operation produces, or that a reduction reads, whatever the operation.
      unknown_loops: scopes of `while` loops with FLOPs but unknown trip count: counted once.
      opaque: primitives whose code is not part of the jaxpr: counted as zero.
    """

    matmul: int = 0
    matmul_least: int = 0
    chosen: int = 0
    narrow: int = 0
    elementwise: int = 0
    unknown_loops: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Matmul and elementwise FLOPs."""
        return self.matmul + self.elementwise

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.matmul + other.matmul,
            self.matmul_least + other.matmul_least,
            self.chosen + other.chosen,
            self.narrow + other.narrow,
            self.elementwise + other.elementwise,
            self.unknown_loops + other.unknown_loops,
            self.opaque + other.opaque,
        )

    def times(self, count: int) -> "Flops":
        """Return the FLOPs of `count` repetitions."""
        return dataclasses.replace(
            self,
            matmul=self.matmul * count,
            matmul_least=self.matmul_least * count,
            chosen=self.chosen * count,
            narrow=self.narrow * count,
            elementwise=self.elementwise * count,
        )


def count_flops(program: ClosedJaxpr, choose: Callable[[str], bool] | None = None) -> Flops:
    """Count the FLOPs of a program traced by `jax.make_jaxpr`.

    - `dot_general`: 2 x elements of the result x length of the contraction.
    - `conv_general_dilated`: 2 x multiply-adds of real values. Multiplications with padding, and
    with
      the holes of a dilation (`lhs_dilation` in the input gradient of a strided convolution), are
      not counted, so that both gradients cost exactly as much as the forward pass.
    - `ragged_dot_general`: 2 x rows x contraction x columns, as if the groups covered all rows.
    - A `scan` counts its body once per iteration, and a `pallas_call` once per grid point (a kernel
      that skips blocks shows this in `matmul_least`). Expert matmul kernels count by their own cost
      estimate (like `ragged_dot_general`). A `shard_map`, whose shapes are one device's, counts
      once for each device along its manual axes.
    - Recomputation (`jax.checkpoint`) is in the jaxpr twice and so counted twice; later merging or
      dead code elimination by XLA is not considered.

    Args:
      program: the traced function.
      choose: selects scopes for `Flops.chosen`. A scope is the path of `jax.named_scope` names and
        transformations around an operation, like 'transpose(jvp(attention))/BTD,DNH->BTNH'.
    """
    return _walk(program.jaxpr, "", choose or (lambda scope: False))


class Product(NamedTuple):
    """A matmul or convolution of a traced program.

    Attributes:
      scope: as in `count_flops`.
      equation: the operation.
      times: number of runs in the loops around it.
    """

    scope: str
    equation: JaxprEqn
    times: int


def products_of(program: ClosedJaxpr) -> Iterator[Product]:
    """Yield the matmuls and convolutions of a traced program at any depth."""
    waiting = [("", program.jaxpr, 1)]
    while waiting:
        outer, jaxpr, times = waiting.pop()
        for equation in jaxpr.eqns:
            scope = _scope(equation, outer)
            if equation.primitive.name in _PRODUCTS:
                yield Product(scope, equation, times)
            inside = times
            if equation.primitive.name == "scan":
                inside *= equation.params["length"]
            waiting += [(scope, body, inside) for body in _jaxprs(equation.params)]


def _scope(equation: JaxprEqn, outer: str) -> str:
    return "/".join(part for part in (outer, str(equation.source_info.name_stack)) if part)


def _walk(jaxpr: Jaxpr, outer: str, choose: Callable[[str], bool]) -> Flops:
    return sum((_equation(equation, outer, choose) for equation in jaxpr.eqns), Flops())


def _equation(equation: JaxprEqn, outer: str, choose: Callable[[str], bool]) -> Flops:
    name, parameters = equation.primitive.name, equation.params
    scope = _scope(equation, outer)
    if name in _PRODUCTS:
        flops = _PRODUCTS[name](equation)
        chosen = flops if choose(scope) else 0
        return Flops(flops, flops, chosen, flops if _is_narrow(equation) else 0)
    if any(part in name for part in _OPAQUE):
        return Flops(opaque=(name,))
    bodies = [_walk(body, scope, choose) for body in _jaxprs(parameters)]
    if name == "cond":
        return _dearest(bodies)
    inside = sum(bodies, Flops())
    if name == "scan":
        return inside.times(parameters["length"])
    if name == "pallas_call":
        if is_grouped(parameters):
            # Its 8-bit operands are multiplied as bfloat16.
            flops = parameters["cost_estimate"].flops
            return Flops(flops, flops, flops if choose(scope) else 0)
        return inside.times(math.prod(parameters["grid_mapping"].grid))
    if name == "shard_map":
        sizes = parameters["mesh"].shape
        return inside.times(math.prod(sizes[axis] for axis in parameters["newly_manual_axes"]))
    if name == "while" and inside.total:
        return dataclasses.replace(inside, unknown_loops=(*inside.unknown_loops, scope or name))
    return inside if bodies else Flops(elementwise=_elementwise(equation))


def _jaxprs(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yield the jaxprs in an equation's parameters: loop bodies, branches, called functions."""
    for value in parameters.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part


def _is_narrow(product: JaxprEqn) -> bool:
    operands: list[Any] = [operand.aval for operand in product.invars[:2]]
    return all(operand.dtype.itemsize == 1 for operand in operands)


def _dearest(branches: list[Flops]) -> Flops:
    return Flops(
        max(branch.matmul for branch in branches),
        min(branch.matmul_least for branch in branches),
        max(branch.chosen for branch in branches),
        max(branch.narrow for branch in branches),
        max(branch.elementwise for branch in branches),
        sum((branch.unknown_loops for branch in branches), ()),
        sum((branch.opaque for branch in branches), ()),
    )


def _elementwise(equation: JaxprEqn) -> int:
    if equation.primitive.name in _MOVES:
        return 0
    reads = equation.primitive.name.startswith(("reduce_", "arg"))
    arrays = equation.invars[:1] if reads else equation.outvars
    return sum(math.prod(shape_of(array)) for array in arrays if _is_float(array))


def shape_of(variable: Any) -> tuple[int, ...]:
    """Return the shape of an input or output of an equation."""
    return variable.aval.shape


def _is_float(variable: Any) -> bool:
    # Effect tokens have no dtype; PRNG keys have one that NumPy does not support.
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _dot(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = shape_of(equation.invars[0])
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(shape_of(equation.outvars[0])) * depth


def _ragged_dot(equation: JaxprEqn) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left, result = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    flops = 2 * math.prod(result)
    flops *= math.prod(left[axis] for axis in contracted)
    # Groups along the contraction (the gradient of the weights): the result has one matrix per
    # group, to which only the rows of that group contribute.
    if set(numbers.lhs_ragged_dimensions) & set(contracted):
        flops //= result[0]
    return flops


def _convolution(equation: JaxprEqn) -> int:
    parameters = equation.params
    left, right = (shape_of(variable) for variable in equation.invars[:2])
    result = shape_of(equation.outvars[0])
    numbers = parameters["dimension_numbers"]
    products = result[numbers.out_spec[0]] * result[numbers.out_spec[1]]
    # Input channels per output value: with feature groups, only those of the kernel.
    products *= right[numbers.rhs_spec[1]]
    for i, axis in enumerate(numbers.lhs_spec[2:]):
        products *= count_kernel_taps(
            inputs=left[axis],
            kernel=right[numbers.rhs_spec[2 + i]],
            outputs=result[numbers.out_spec[2 + i]],
            stride=parameters["window_strides"][i],
            before=parameters["padding"][i][0],
            input_dilation=parameters["lhs_dilation"][i],
            kernel_dilation=parameters["rhs_dilation"][i],
        )
    return 2 * products


@functools.cache
def count_kernel_taps(
    *,
    inputs: int,
    kernel: int,
    outputs: int,
    stride: int,
    before: int,
    input_dilation: int,
    kernel_dilation: int,
) -> int:
    """Count the pairs of output and kernel elements that read a real input, in one dimension."""
    start = np.arange(outputs)[:, None] * stride - before
    position = start + np.arange(kernel)[None, :] * kernel_dilation
    inside = (position >= 0) & (position < (inputs - 1) * input_dilation + 1)
    return int((inside & (position % input_dilation == 0)).sum())


_PRODUCTS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
}
