"""Rows of a table on every layout: the lookup, and its gradient, of numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from flax import nnx

from jaxtrain.nn.layers import embed
from jaxtrain.nn.parameters import param
from jaxtrain.parallel.sharding import shardings

B, T, D, V = 8, 16, 32, 64


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 1}, {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}, {"context": 2, "fsdp": 2}],
    ids=lambda sizes: "_".join(sizes),
)
def test_rows_are_looked_up_and_their_gradients_added_up(sizes):
    rng, layout = np.random.default_rng(0), make_layout(**sizes)
    tokens_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    weights_BTD = rng.integers(-4, 5, (B, T, D)).astype(np.float32)  # their sums are exact
    init = nnx.initializers.normal(0.1)
    table = param(jax.random.key(0), (V, D), ("vocab", "vocab_embed"), init, role="embedding")
    rows_VD = np.asarray(table.get_value())
    expected_VD = np.zeros((V, D), np.float32)
    np.add.at(expected_VD, tokens_BT, weights_BTD)

    def weighed(table, tokens_BT, weights_BTD):
        x_BTD = embed(tokens_BT, table)
        return (x_BTD * weights_BTD).sum(), x_BTD

    def put(x, *axes):
        return jax.device_put(x, layout.sharding_of(layout.activation(axes)))

    with layout.active():
        table = jax.device_put(table, shardings(table, layout.parameter, layout))
        tokens, weights = (
            put(tokens_BT, "batch", "length"),
            put(weights_BTD, "batch", "length", "embed"),
        )
        run = jax.jit(jax.grad(weighed, has_aux=True))
        gradient, found_BTD = run(table, tokens, weights)
    np.testing.assert_array_equal(found_BTD, rows_VD[tokens_BT])
    np.testing.assert_array_equal(gradient.get_value(), expected_VD)
    assert found_BTD.sharding.spec == layout.activation(("batch", "length", "embed"))


def test_without_a_layout_it_is_an_index():
    table = nnx.Param(jnp.arange(V * D, dtype=jnp.float32).reshape(V, D), axes=("vocab", "embed"))
    found = embed(jnp.array([[3, 0]]), table)
    np.testing.assert_array_equal(found, np.stack([np.arange(3 * D, 4 * D), np.arange(D)])[None])
