"""The table: what it resolves to, what it rejects, and that every model's axes stand in it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.axis_rules import RULES_BY_LAYOUT
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.parallel.sharding import logical_axes, parts_of, shard, shardings

MATRIX = ("embed", "mlp")


@pytest.mark.parametrize(
    ("zero", "parameter", "gradient", "moment"),
    [
        (0, P(None, "tensor"), P(None, "tensor"), P(None, "tensor")),
        (1, P(None, "tensor"), P(None, "tensor"), P("fsdp", "tensor")),
        (2, P(None, "tensor"), P("fsdp", "tensor"), P("fsdp", "tensor")),
        (3, P("fsdp", "tensor"), P("fsdp", "tensor"), P("fsdp", "tensor")),
    ],
)
def test_zero_stages_shard_what_the_paper_says(zero, parameter, gradient, moment):
    layout = make_layout(zero, data=2, fsdp=2, tensor=2)
    assert layout.parameter(MATRIX) == parameter
    assert layout.gradient(MATRIX) == gradient
    assert layout.moment(MATRIX) == moment
    assert layout.weight(MATRIX) == P(None, "tensor")


def test_activations_and_sequence_parallelism():
    axes = ("batch", "residual_length", "embed")
    assert make_layout(3, data=2, fsdp=2, tensor=2).activation(axes) == P(
        ("data", "fsdp"), None, None
    )
    layout = make_layout(3, sequence_parallel=True, fsdp=2, tensor=2)
    assert layout.activation(axes) == P("fsdp", "tensor", None)
    assert layout.batch_devices() == 2


def test_unknown_axes_and_axes_used_twice_are_refused():
    layout = make_layout(3, fsdp=2)
    with pytest.raises(ValueError, match=r"unknown logical axis 'embedd'; did you mean 'embed'\?"):
        layout.parameter(("embedd",))
    with pytest.raises(ValueError, match="two dimensions over one mesh axis"):
        layout.parameter(("mlp", "heads"))
    with layout.active(), pytest.raises(ValueError, match="shape .* has 1 axis names"):
        shard(jnp.zeros((2, 2)), ("batch",))


@pytest.mark.parametrize("table", RULES_BY_LAYOUT)
def test_the_tables_name_only_mesh_axes(table):
    factors = {"depth", "row"} if table != "1d" else set()
    assert set(RULES_BY_LAYOUT[table]) == set(RULES_BY_LAYOUT["1d"])
    for rule in RULES_BY_LAYOUT[table].values():
        for part in rule:
            assert set(parts_of(part)) <= {*MESH_AXES, *factors}


def test_gather_transposes_to_a_sharded_gradient():
    layout = make_layout(3, fsdp=8)
    weight = jnp.arange(64.0).reshape(16, 4)
    tree = shardings({"w": nnx.Param(weight, axes=MATRIX)}, layout.parameter, layout)
    param = nnx.Param(jax.device_put(weight, tree["w"].get_value()), axes=MATRIX)

    def loss(param):
        return (gather(param) ** 2).sum()

    with layout.active():
        gradient = jax.jit(jax.grad(loss))(param)
    assert gradient.get_value().sharding.spec == P("fsdp", None)
    np.testing.assert_array_equal(gradient.get_value(), 2 * weight)
    assert logical_axes(gradient) == MATRIX


def test_without_a_mesh_arrays_stay_as_they_are():
    x = jnp.ones((3, 3))
    assert shard(x, ("batch", "embed")) is x


def test_a_vocabulary_that_does_not_divide_is_gathered_with_rows_of_zeros():
    layout = dataclasses.replace(make_layout(3, fsdp=2, tensor=4), whole=frozenset({"vocab"}))
    table = np.arange(1.0, 41.0).reshape(10, 4)
    param = nnx.Param(jnp.asarray(table), axes=("vocab", "embed"))
    tree = shardings({"w": param}, layout.parameter, layout)
    param = param.replace(jax.device_put(param.get_value(), tree["w"].get_value()))
    with layout.active():
        whole = jax.jit(lambda: gather(param))()
    assert whole.sharding.spec == P("tensor", None)
    np.testing.assert_array_equal(whole, np.pad(table, [(0, 2), (0, 0)]))
