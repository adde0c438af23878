"""Products around a ring: of a sequence in parts, while the other parts are on their way.

With sequence parallelism (arXiv 2205.05198) the places of the residual stream are gathered over
`tensor` before a block's first products, and the sum of its last one is scattered. Here no device
waits for all of them: it multiplies the part that it holds while the next one is sent, and adds its
share to the sum of a part that is then sent on (collective matmul: Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition", doi 10.1145/3567955.3567959). The bytes
are the same, t - 1 permutes for each gather or scatter.

Letters: B batch, T length, D embed, F mlp; t the devices along `tensor`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.products.dot import sides, spec_of
from jaxtrain.nn.remat import PRODUCT
from jaxtrain.parallel.sharding import along, current_layout, parts_of

_AXIS = "tensor"


def refuse(asked: bool, *, matmul: str) -> Iterator[str]:
    """A sentence where products cannot go around a ring.

    Args:
      asked: Sharding.collective_matmul.
      matmul: Precision.matmul.
    """
    if asked and matmul != "compute":
        yield (
            f"Sharding.collective_matmul=True with Precision.matmul={matmul!r}: products of 8 bits "
            "have no ring; use Precision.matmul='compute' or Sharding.collective_matmul=False"
        )


def gathered(
    equations: Sequence[str], x: jax.Array, weights: Sequence[jax.Array], specs: Sequence[P]
) -> list[jax.Array]:
    """Products of one activation, whose places are split over `tensor`, with several weights.

    Args:
      equations: of each product, over (x, weight); the first letters of x are the same in all.
      x: the activation, T among its letters, `tensor` the last axis along it.
      weights: of x's dtype, split over `tensor` along what the products make.
      specs: of the products, `tensor` along what the weights have there and not along T.
    """
    spec = spec_of(x)
    assert spec is not None, "no mesh"
    over = parts_of(spec[sides(equations[0])[0].index("T")])

    @jax.custom_vjp
    def run(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        def products(rank: jax.Array, x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
            found = [_Whole(sides(equation)[2]) for equation in equations]
            for number, part in _in_turn(rank, x):
                for one, equation, weight in zip(found, equations, weights, strict=True):
                    one.put(jnp.einsum(equation, part, weight), number)
            return [one.array for one in found]

        return _along(over, products, x, weights, out_specs=list(specs))

    def forward(x: jax.Array, weights: list[jax.Array]) -> tuple[list[jax.Array], tuple]:
        return run(x, weights), (x, weights)

    def backward(kept: tuple, gradients: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        def of_both(
            rank: jax.Array, x: jax.Array, weights: list[jax.Array], gradients: list[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            of_x = _sums(rank, [_of_x(one) for one in equations], gradients, weights)
            # One product for all places: a part's would add to the whole weight's gradient.
            whole = _Whole(sides(equations[0])[0])
            for number, part in _in_turn(rank, x):
                whole.put(part, number)
            pairs = zip(equations, gradients, weights, strict=True)
            return of_x, [_of_weight(one, whole.array, g, w, over) for one, g, w in pairs]

        specs = spec_of(kept[0]), [spec_of(weight) for weight in kept[1]]
        return _along(over, of_both, *kept, gradients, out_specs=specs)

    run.defvjp(forward, backward)
    return [checkpoint_name(one, PRODUCT) for one in run(x, list(weights))]


def scattered(equation: str, x: jax.Array, weight: jax.Array, spec: P) -> jax.Array:
    """A product that is summed over `tensor`, of which each device has its own places.

    Args:
      equation: over (x, weight).
      x: the activation, split over `tensor` along what is summed over and not along T.
      weight: of x's dtype, split as x is.
      spec: of the product, `tensor` the last axis along T.
    """
    over = parts_of(spec[sides(equation)[2].index("T")])

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        def product(rank: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
            return _sums(rank, [equation], [x], [weight])

        return _along(over, product, x, weight, out_specs=spec)

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        return run(x, weight), (x, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        def of_both(
            rank: jax.Array, x: jax.Array, weight: jax.Array, gradient: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            by_x = _of_x(equation)
            of_x, whole = _Whole(sides(by_x)[2]), _Whole(sides(by_x)[0])
            for number, part in _in_turn(rank, gradient):
                whole.put(part, number)
                of_x.put(jnp.einsum(by_x, part, weight), number)
            return of_x.array, _of_weight(equation, x, whole.array, weight, over)

        specs = tuple(spec_of(one) for one in kept)
        return _along(over, of_both, *kept, gradient, out_specs=specs)

    run.defvjp(forward, backward)
    return checkpoint_name(run(x, weight), PRODUCT)


def _along(
    over: tuple[str, ...], function: Callable[..., Any], *arguments: Any, out_specs: Any
) -> Any:
    """`function` of the place in the ring and of the arguments' parts along these axes."""
    layout = current_layout()
    assert layout is not None, "no layout is active"
    ranks = jax.sharding.reshard(np.arange(layout.mesh.shape[_AXIS], dtype=np.int32), P(_AXIS))

    def run(ranks: jax.Array, *arguments: Any) -> Any:
        return function(ranks[0], *arguments)

    return along(over, run, ranks, *arguments, out_specs=out_specs)


def _in_turn(rank: jax.Array, part: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """(number, part) of every device's part of the sequence, from this one's on."""
    size = lax.axis_size(_AXIS)
    for step in range(size):
        # Sent before it is multiplied: a schedule may put the product beside it.
        following = _sent(part, -1) if step < size - 1 else part
        yield _of_ring(rank + step), part
        part = following


def _sums(
    rank: jax.Array, equations: Sequence[str], xs: Sequence[jax.Array], weights: Sequence[jax.Array]
) -> jax.Array:
    """This device's places of the products' sum over all of them and over the devices."""
    size, total = lax.axis_size(_AXIS), None
    for step in range(size):
        number = _of_ring(rank + (size - 1 - step))
        own = functools.reduce(
            jnp.add,
            (
                jnp.einsum(equation, _taken(x, sides(equation)[0], number), weight)
                for equation, x, weight in zip(equations, xs, weights, strict=True)
            ),
        )
        total = own if total is None else _sent(total, 1) + own
    assert total is not None, "a ring of no devices"
    return total


def _of_weight(
    equation: str, x: jax.Array, gradient: jax.Array, weight: jax.Array, over: tuple[str, ...]
) -> jax.Array:
    """A weight's gradient, from all places of this device's row."""
    left, right, result = sides(equation)
    found = jnp.einsum(f"{left},{result}->{right}", x, gradient, out_sharding=spec_of(weight))
    others = tuple(axis for axis in over if axis != _AXIS)
    return lax.psum(found, others) if others else found


def _of_x(equation: str) -> str:
    """The equation of x's gradient, over (the product's gradient, weight)."""
    left, right, result = sides(equation)
    return f"{result},{right}->{left}"


def _sent(x: jax.Array, step: int) -> jax.Array:
    """What the device so many places before this one has."""
    size = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(i, (i + step) % size) for i in range(size)])


def _of_ring(number: jax.Array) -> jax.Array:
    # No `%`: its own trace would keep the ring's size of the forward pass for the backward one.
    return lax.rem(number, np.int32(lax.axis_size(_AXIS)))


def _taken(whole: jax.Array, letters: str, number: jax.Array) -> jax.Array:
    """The part of this number of an array's places."""
    dim = letters.index("T")
    length = whole.shape[dim] // lax.axis_size(_AXIS)
    return lax.dynamic_slice_in_dim(whole, number * length, length, dim)


class _Whole:
    """An array that its parts along T are written into."""

    def __init__(self, letters: str) -> None:
        self._dim = letters.index("T")
        self._array: jax.Array | None = None

    def put(self, part: jax.Array, number: jax.Array) -> None:
        """Writes the part of this number."""
        length, array = part.shape[self._dim], self._array
        if array is None:
            shape = list(part.shape)
            shape[self._dim] = length * lax.axis_size(_AXIS)
            array = lax.empty(tuple(shape), part.dtype, out_sharding=spec_of(part))
        start = number * length
        self._array = lax.dynamic_update_slice_in_dim(array, part, start, self._dim)

    @property
    def array(self) -> jax.Array:
        """All parts."""
        assert self._array is not None, "no part was put"
        return self._array
