"""Parameters in bfloat16: small updates add up, alike on every mesh; the step rounds so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx

from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.sharding import shardings
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.moments import apply_updates
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)
BATCH = text_batch(rows=8, length=8, vocab_size=32)


def tree(value, shape=(16, 32), axes=("embed", "mlp"), dtype=jnp.bfloat16):
    return nnx.State({"w": nnx.Param(jnp.broadcast_to(value, shape).astype(dtype), axes=axes)})


def test_updates_below_the_last_bit_add_up():
    """4,000 updates of 1e-4 to 1, whose last bit is 2^-7: each goes up with probability 1e-4 times
    2^7, so that the sum's variance is known; rounded to the nearest, 1 stays 1 indefinitely."""
    steps, update, bit = 4000, 1e-4, 2.0**-7
    updates = tree(update, dtype=jnp.float32)

    def move(params, count):
        return apply_updates(params, updates, count), None

    moved, _ = jax.jit(lambda params: jax.lax.scan(move, params, jnp.arange(steps)))(tree(1.0))
    found = np.asarray(moved["w"].get_value(), np.float64)
    error = np.sqrt(steps * update * (bit - update))  # of one number; 512 are drawn apart
    assert abs(found.mean() - (1 + steps * update)) < 5 * error / np.sqrt(found.size)
    assert 0.8 < found.std() / error < 1.2
    assert float(optax.apply_updates(tree(1.0), updates)["w"].get_value()[0, 0]) == 1.0


def test_float32_is_optaxs():
    rng = np.random.default_rng(0)
    params, updates = (
        tree(rng.normal(size=(16, 32)).astype(np.float32), dtype=jnp.float32) for _ in range(2)
    )
    found = apply_updates(params, updates, jnp.array(3))
    jax.tree.map(np.testing.assert_array_equal, found, optax.apply_updates(params, updates))


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"pipe": 2, "fsdp": 2}], ids=str)
def test_roundings_on_a_mesh_are_those_of_one_device(sizes):
    rng = np.random.default_rng(1)
    shape, axes = (4, 16, 32), ("layers", "embed", "mlp")
    w, u = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    one = apply_updates(tree(w, shape, axes), tree(u, shape, axes, jnp.float32), jnp.array(5))
    # A pipeline's stages hold layers in an order of their own.
    order = [2, 0, 3, 1] if "pipe" in sizes else [0, 1, 2, 3]
    layout, places = make_layout(**sizes), np.array(order)
    params, updates = tree(w[places], shape, axes), tree(u[places], shape, axes, jnp.float32)
    place = shardings(params, layout.moment, layout)
    params, updates = jax.device_put(params, place), jax.device_put(updates, place)
    with layout.active():
        step = jax.jit(lambda params, updates: apply_updates(params, updates, jnp.array(5), order))
        found = step(params, updates)["w"].get_value()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(one["w"].get_value())[places])


# Two programs; the rounding itself is in the fast part.
@pytest.mark.slow
def test_a_step_rounds_by_its_number_and_nothing_else():
    settings = Optimizer(rule=SGD(momentum=0.0), learning_rate=1e-4, weight_decay=0.0)
    optimizer = make_optimizer(settings, optax.constant_schedule(1e-4))
    program = make_step(
        MODEL,
        make_layout(fsdp=2, tensor=2),
        optimizer=optimizer,
        precision=Precision(params="bfloat16", compute="float32"),
    )
    step, batch = CompiledStep(program), jax.device_put(BATCH, program.setup.batch_shardings(BATCH))

    def after(number):
        state = program.create(seed=0)
        before = jax.device_get(state.params)
        state = dataclasses.replace(state, step=jnp.asarray(number, jnp.int32))
        with program.setup.layout.active():
            return before, jax.device_get(step(state, batch)[0].params)

    before, found = after(7)
    jax.tree.map(np.testing.assert_array_equal, found, after(7)[1])
    moved = np.concatenate(
        [(a != b).ravel() for a, b in zip(*map(jax.tree.leaves, (before, found)), strict=True)]
    )
    # The gradient has norm 1 or less: 1e-4 of it is far below most last bits, yet some go over.
    assert 0.001 < moved.mean() < 0.5
    other = jax.tree.leaves(after(8)[1])
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(found), other, strict=True))
