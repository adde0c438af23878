"""Mesh sizes, the refusals of meshes that do not fit, and device order."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxtrain.errors import UserError
from jaxtrain.mesh import MESH_AXES, Mesh, make_mesh, simulate_devices


def test_the_free_axis_takes_what_is_left():
    ones = dict.fromkeys(MESH_AXES, 1)
    found = Mesh(data=2, fsdp=-1, tensor=2).sizes(32)
    assert found == {**ones, "data": 2, "fsdp": 8, "tensor": 2}
    assert Mesh(data=-1, fsdp=1).sizes(5) == {**ones, "data": 5}


@pytest.mark.parametrize(
    ("sizes", "count", "words"),
    [
        ({"fsdp": 3, "tensor": 2}, 8, ["Mesh.fsdp=3", "product 6", "equal the 8 devices",
                                       "set Mesh.fsdp=4"]),
        ({"fsdp": -1, "tensor": 3}, 8, ["product 3 (without the -1)", "divide the 8 devices"]),
        ({"fsdp": 4, "tensor": 2}, 1, ["product 8", "1 device there is",
                                       "--simulate-devices 8"]),
    ],
)  # fmt: skip
def test_idle_or_missing_devices_are_refused_with_a_way_out(sizes, count, words):
    with pytest.raises(UserError) as caught:
        Mesh(**sizes).sizes(count)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_way_out_of_a_refusal_works():
    assert Mesh(fsdp=4, tensor=2).sizes(8)["fsdp"] == 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"fsdp": -1, "data": -1}, "Mesh.data and Mesh.fsdp are all -1; at most one"),
        ({"tensor": 0}, "Mesh.tensor=0: a mesh axis has at least 1"),
        ({"simulated_devices": -1}, "Mesh.simulated_devices=-1"),
    ],
)
def test_impossible_sizes_are_refused(sizes, words):
    with pytest.raises(UserError, match=words):
        Mesh(**sizes)


def test_axes_are_explicit_and_tensor_is_innermost(devices):
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2), devices)
    assert mesh.axis_names == MESH_AXES
    assert set(mesh.axis_types) == {AxisType.Explicit}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids.ravel(), np.arange(8))


def test_simulating_another_count_in_a_running_process_is_refused(devices):
    simulate_devices(len(devices))
    assert jax.device_count() == 8
    with pytest.raises(UserError, match="simulated_devices=4, but JAX already runs on 8 cpu"):
        simulate_devices(4)
