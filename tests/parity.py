"""What the proofs of parallelism share: one step's losses and gradients, and their comparison."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.training.compiled_step import CompiledStep

# Sums of at most a few thousand float32 products in another order.
TOLERANCE = 2e-6


def keep_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with the gradients it was given as the first part of its state."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradients, _state, _params=None: (gradients, gradients),
    )
    return optax.chain(keep, optimizer)


def evaluate(program, batch, begin=None):
    """Initial parameters, loss and gradients of the first step, and the state after two steps: of
    its arrays those that have no gradient.

    Parameters and gradients come with their layers in the model's order.

    Args:
      program: the step.
      batch: of both steps.
      begin: the result of one device, whose initial parameters the program starts from; None: it
        initializes its own, which a mesh compiles for seconds. That meshes initialize the same
        parameters is asserted where `begin` is left out (test_step.py, test_mixtral.py,
        test_tensor_layouts.py, test_pipeline.py with padded stages), and in test_verify.py for a
        config of every kind.
    """
    program = program.rebuild(optimizer=keep_gradients(program.setup.optimizer))
    stages = program.setup.stages
    order = (lambda tree: tree) if stages is None else stages.to_layers
    params = None
    if begin is not None:
        params = begin["initial"] if stages is None else stages.to_stages(begin["initial"])
        params = jax.device_put(params, program.shardings(program.shapes()).params)
    state = program.create(0, params)
    initial = jax.tree.map(np.asarray, order(jax.device_get(state.params)))
    batch = jax.device_put(batch, program.setup.batch_shardings(batch))
    with program.setup.layout.active():
        before = jax.tree.map(lambda x: x.sharding, state)
        step = CompiledStep(program)
        state, metrics = step(state, batch)
        gradients = jax.tree.map(np.asarray, order(jax.device_get(state.opt_state[0])))
        state, step_metrics = step(state, batch)
    after = jax.tree.map(lambda x: x.sharding, state)
    return {
        "initial": initial,
        "loss": float(metrics["loss"]),
        "frozen": jax.tree.map(np.asarray, order(jax.device_get(state.frozen))),
        "gradients": gradients,
        "metrics": {name: float(value) for name, value in step_metrics.items()},
        "shardings": (before, after),
        "compilations": step.on_arrays._cache_size(),
    }


def assert_equal(found, expected):
    """Initial parameters bit for bit, loss and gradients to rounding; one compilation."""
    for name in ("initial", "frozen"):
        jax.tree.map(np.testing.assert_array_equal, found[name], expected[name])
    assert found["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE),
        found["gradients"],
        expected["gradients"],
    )
    for metric, value in expected["metrics"].items():
        assert found["metrics"][metric] == pytest.approx(value, rel=1e-4), metric
    before, after = found["shardings"]
    assert jax.tree.leaves(before) == jax.tree.leaves(after)
    assert found["compilations"] == 1
