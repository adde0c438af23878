"""A stage's backward pass, kept, recomputed or cut in two, gives the gradients of jax.vjp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.training.pipeline.backward import Backward, cut

D, F, B = 8, 16, 4


def stage(params, x, context):
    for up, down in params:

        def layer(x, up=up, down=down):
            return jax.nn.silu(x @ up) @ down

        x = x + jax.checkpoint(layer)(x) * context
    return x, {"norm": (x**2).sum()}


@pytest.fixture(scope="module")
def arguments():
    keys = jax.random.split(jax.random.key(0), 7)
    params = [
        (0.3 * jax.random.normal(keys[i], (D, F)), 0.3 * jax.random.normal(keys[i + 3], (F, D)))
        for i in range(3)
    ]
    return params, jax.random.normal(keys[6], (B, D)), jnp.float32(0.5)


GRADIENT = (jnp.ones((B, D)), {"norm": jnp.float32(2.0)})


def expected(arguments):
    params, x, context = arguments
    outputs, transpose = jax.vjp(lambda p, x: stage(p, x, context), params, x)
    return outputs, transpose(GRADIENT)


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize("keep_residuals", [False, True])
def test_gradients_equal_vjp(arguments, keep_residuals):
    params, x, context = arguments
    backward = Backward(stage, *arguments, keep_residuals=keep_residuals)
    outputs, kept = backward.forward(params, x, context)
    # After the forward pass x is given to others where residuals are kept.
    x_now = jnp.full_like(x, jnp.nan) if keep_residuals else x
    _, transpose = backward.transpose(kept, params, x_now, context)
    wanted_outputs, wanted = expected(arguments)
    assert_close(outputs, wanted_outputs)
    assert_close(transpose(GRADIENT), wanted)


def test_residuals_hold_activations_and_no_weights(arguments):
    backward = Backward(stage, *arguments, keep_residuals=True)
    shapes = {residual.shape for residual in backward.kept}
    assert shapes
    assert all(shape[0] == B for shape in shapes)
    assert Backward(stage, *arguments, keep_residuals=False).kept == []


@pytest.mark.parametrize("keep_residuals", [False, True])
def test_the_halves_give_the_input_first_and_the_weights_from_the_stash(arguments, keep_residuals):
    params, x, context = arguments
    backward = Backward(stage, *arguments, keep_residuals=keep_residuals)
    _, kept = backward.forward(params, x, context)
    leaves, tree = jax.tree.flatten((params, kept, context, x, GRADIENT))

    def run(*leaves):
        params, kept, context, x, gradient = jax.tree.unflatten(tree, leaves)
        _, transpose = backward.transpose(kept, params, x, context)
        return jax.tree.leaves(transpose(gradient))

    again = len(jax.tree.leaves((params, kept, context)))
    halves = cut(run, leaves, early=lambda n: n == 6, available=lambda n: n < again)
    assert halves.early == (6,)
    assert halves.late == (0, 1, 2, 3, 4, 5)
    early, stash = halves.first(*leaves)
    # The second half sees neither x nor the gradient: both buffers are free by then.
    spoilt = [leaf if n < again else jnp.full_like(leaf, jnp.nan) for n, leaf in enumerate(leaves)]
    late = halves.second(stash, *spoilt)
    found = [*late, *early]
    assert_close(found, jax.tree.leaves(expected(arguments)[1]))


def test_the_second_half_multiplies_matrices_only_for_weights(arguments):
    """Zero bubble pays off if nothing of the input's gradient is computed again for the weights."""
    params, x, context = arguments
    backward = Backward(stage, *arguments, keep_residuals=False)
    leaves, tree = jax.tree.flatten((params, context, x, GRADIENT))

    def run(*leaves):
        params, context, x, gradient = jax.tree.unflatten(tree, leaves)
        _, transpose = backward.transpose([], params, x, context)
        return jax.tree.leaves(transpose(gradient))

    halves = cut(run, leaves, early=lambda n: n == 6, available=lambda n: n < 7)
    _, stash = halves.first(*leaves)
    text = jax.jit(halves.second).lower(stash, *leaves).as_text()
    # Three layers of two weights each.
    assert text.count("stablehlo.dot_general") == 6
    whole = jax.jit(run).lower(*leaves).as_text().count("stablehlo.dot_general")
    first = jax.jit(halves.first).lower(*leaves).as_text().count("stablehlo.dot_general")
    assert first + 6 <= whole


# The cases that are left run the same code.
@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("keep_residuals", [False, True])
def test_what_each_device_does_for_itself_is_cut_too(devices, keep_residuals):
    """A `shard_map`, which is one operation, with both gradients in it: the second half has the
    products of its weights, and no weight-sized array waits for it."""
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Explicit,), devices=devices[:4])
    rows, whole = P("data"), P()

    def stage(params, x, context):
        @functools.partial(jax.shard_map, in_specs=(whole, whole, rows), out_specs=rows)
        def on_device(up, down, x):
            return jax.nn.silu(x @ up) @ down

        return x + on_device(*params, x) * context, {}

    with jax.set_mesh(mesh):
        params = jnp.full((D, F), 0.1), jnp.full((F, D), 0.2)
        x = jax.device_put(jnp.arange(B * D, dtype=jnp.float32).reshape(B, D) / 9, rows)
        gradient = jax.device_put(jnp.ones((B, D)), rows), {}
        context = jnp.float32(0.5)
        backward = Backward(stage, params, x, context, keep_residuals=keep_residuals)
        kept = backward.forward(params, x, context)[1]
        leaves, tree = jax.tree.flatten((params, kept, context, x, gradient))

        def run(*leaves):
            params, kept, context, x, gradient = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(backward.transpose(kept, params, x, context)[1](gradient))

        again = len(jax.tree.leaves((params, kept, context)))
        halves = cut(run, leaves, early=lambda n: n == 2, available=lambda n: n < again)
        early, stash = jax.jit(halves.first)(*leaves)
        late = jax.jit(halves.second)(stash, *leaves)
        text = jax.jit(halves.second).lower(stash, *leaves).as_text()
        wanted = jax.vjp(lambda p, x: stage(p, x, context), params, x)[1](gradient)
    assert_close([*late, *early], jax.tree.leaves(wanted))
    assert (halves.early, halves.late) == ((2,), (0, 1))
    assert text.count("stablehlo.dot_general") == 2
    assert all((D, F) != x.shape[-2:] != (F, D) for x in halves.stash)
