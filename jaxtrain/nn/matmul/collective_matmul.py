"""Collective matmul: matmuls overlapped with the ring all-gather or reduce-scatter over `tensor`.

With sequence parallelism (arXiv 2205.05198) the positions of the residual stream are gathered over
`tensor` before a block's first matmuls, and the sum of its last one is scattered. Here no device
waits for all of them: it multiplies the part that it has while the next one is sent, and adds its
share to the sum of a part that is then sent on (collective matmul: Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition", doi 10.1145/3567955.3567959). The bytes
are the same, t - 1 permutes for each gather or scatter.

Letters: B batch, T length, D embed, F mlp; t the devices along `tensor`.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.matmul.contract import sides, spec_of
from jaxtrain.nn.remat import PRODUCT
from jaxtrain.parallel.sharding import on_each_device, without

_AXIS = "tensor"


def gather_matmul(
    equations: Sequence[str], x: jax.Array, weights: Sequence[jax.Array], specs: Sequence[P]
) -> list[jax.Array]:
    """Matmuls of one activation, whose positions are split over `tensor`, with several weights.

    Args:
      equations: of each matmul, over (x, weight); the first letters of x are the same in all.
      x: the activation, T among its letters, `tensor` the last axis along it.
      weights: of x's dtype, split over `tensor` along the output dimensions.
      specs: of the results, `tensor` along the weights' output dimensions and not along T.
    """
    letters = sides(equations[0])[0]
    here = spec_of(x), [spec_of(weight) for weight in weights]
    whole = _gathered_spec(here[0], letters)

    @jax.custom_vjp
    def run(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        def products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
            found = [_Whole(sides(equation)[2]) for equation in equations]
            for number, part in _in_turn(x):
                for one, equation, weight in zip(found, equations, weights, strict=True):
                    one.put(jnp.einsum(equation, part, weight), number)
            return [one.array for one in found]

        return on_each_device(products, here, list(specs))(x, weights)

    def forward(x: jax.Array, weights: list[jax.Array]) -> tuple[list[jax.Array], tuple]:
        return run(x, weights), (x, weights)

    def backward(kept: tuple, gradients: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        def of_x(
            x: jax.Array, weights: list[jax.Array], gradients: list[jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            found = _Whole(letters)
            for number, part in _in_turn(x):
                found.put(part, number)
            own = _sums([_of_x(one) for one in equations], gradients, weights)
            return own, found.array

        x, weights = kept
        sent = on_each_device(of_x, (*here, list(specs)), (here[0], whole))
        own, x = sent(x, weights, gradients)
        pairs = zip(equations, gradients, weights, strict=True)
        return own, [_of_weight(equation, x, g, w) for equation, g, w in pairs]

    run.defvjp(forward, backward)
    return [checkpoint_name(one, PRODUCT) for one in run(x, list(weights))]


def matmul_scatter(equation: str, x: jax.Array, weight: jax.Array, spec: P) -> jax.Array:
    """Return a matmul that is reduce-scattered over `tensor` by positions.

    Args:
      equation: over (x, weight).
      x: the activation, split over `tensor` along the contracted dimension and not along T.
      weight: of x's dtype, split like x.
      spec: of the result, `tensor` the last axis along T.
    """
    here, letters = (spec_of(x), spec_of(weight)), sides(equation)[2]

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        def product(x: jax.Array, weight: jax.Array) -> jax.Array:
            return _sums([equation], [x], [weight])

        return on_each_device(product, here, spec)(x, weight)

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        return run(x, weight), (x, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        def of_x(weight: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
            by_x = _of_x(equation)
            found, whole = _Whole(sides(by_x)[2]), _Whole(letters)
            for number, part in _in_turn(gradient):
                whole.put(part, number)
                found.put(jnp.einsum(by_x, part, weight), number)
            return found.array, whole.array

        x, weight = kept
        sent = on_each_device(of_x, (here[1], spec), (here[0], _gathered_spec(spec, letters)))
        own, gradient = sent(weight, gradient)
        return own, _of_weight(equation, x, gradient, weight)

    run.defvjp(forward, backward)
    return checkpoint_name(run(x, weight), PRODUCT)


def _gathered_spec(spec: P | None, letters: str) -> P:
    """Return the spec of an array with these letters once its positions are gathered over
    `tensor`."""
    assert spec is not None, "no mesh"
    return P(
        *(
            without(part, (_AXIS,)) if letter == "T" else part
            for letter, part in zip(letters, spec, strict=True)
        )
    )


def _in_turn(part: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """(number, part) of every device's part of the sequence, from this one's on."""
    size, rank = lax.axis_size(_AXIS), lax.axis_index(_AXIS)
    for step in range(size):
        # Sent before it is multiplied, so that a schedule can overlap the matmul with it.
        following = _permute(part, -1) if step < size - 1 else part
        yield _of_ring(rank + step), part
        part = following


def _sums(
    equations: Sequence[str], xs: Sequence[jax.Array], weights: Sequence[jax.Array]
) -> jax.Array:
    """This device's positions of the matmuls' sum over all of them and over the devices."""
    size, rank, total = lax.axis_size(_AXIS), lax.axis_index(_AXIS), None
    for step in range(size):
        number = _of_ring(rank + (size - 1 - step))
        own = functools.reduce(
            jnp.add,
            (
                jnp.einsum(equation, _slice_of(x, sides(equation)[0], number), weight)
                for equation, x, weight in zip(equations, xs, weights, strict=True)
            ),
        )
        total = own if total is None else _permute(total, 1) + own
    assert total is not None, "a ring of no devices"
    return total


def _of_weight(equation: str, x: jax.Array, gradient: jax.Array, weight: jax.Array) -> jax.Array:
    """Return a weight's gradient, from all positions: one matmul, for a part's would read and write
    all of the gradient too."""
    left, right, result = sides(equation)
    return jnp.einsum(f"{left},{result}->{right}", x, gradient, out_sharding=spec_of(weight))


def _of_x(equation: str) -> str:
    """Return the equation of x's gradient, over (the output's gradient, weight)."""
    left, right, result = sides(equation)
    return f"{result},{right}->{left}"


def _permute(x: jax.Array, step: int) -> jax.Array:
    """Return the part of the device `step` ranks before this one."""
    size = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(i, (i + step) % size) for i in range(size)])


def _of_ring(number: jax.Array) -> jax.Array:
    return number % lax.axis_size(_AXIS)


def _slice_of(whole: jax.Array, letters: str, number: jax.Array) -> jax.Array:
    """Return a part of an array's positions."""
    dim = letters.index("T")
    length = whole.shape[dim] // lax.axis_size(_AXIS)
    return lax.dynamic_slice_in_dim(whole, number * length, length, dim)


class _Whole:
    """Buffer for the parts along T."""

    def __init__(self, letters: str) -> None:
        self._dim = letters.index("T")
        self._array: jax.Array | None = None

    def put(self, part: jax.Array, number: jax.Array) -> None:
        """Write a part."""
        length, array = part.shape[self._dim], self._array
        if array is None:
            shape = list(part.shape)
            shape[self._dim] = length * lax.axis_size(_AXIS)
            array = lax.empty(tuple(shape), part.dtype)  # zeros would be written first
        start = number * length
        self._array = lax.dynamic_update_slice_in_dim(array, part, start, self._dim)

    @property
    def array(self) -> jax.Array:
        """The whole array."""
        assert self._array is not None, "no part was put"
        return self._array
