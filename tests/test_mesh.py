"""Mesh sizes, the rejections of meshes that do not fit, device order, and slices."""

import collections
import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import lower_step, make_step, needs_libtpu, text_batch
from jax.sharding import AxisType

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.compiled.hlo import parse
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.devices import simulate_devices
from jaxtrain.parallel.mesh import (
    MESH_AXES,
    Mesh,
    abstract_mesh,
    make_mesh,
    order_over_slices,
    slices_of,
)
from jaxtrain.parallel.sharding import Layout, Sharding, is_variable, logical_axes
from jaxtrain.training.settings import load_config


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
        ({"simulated_devices": 10**8}, "Mesh.simulated_devices=100000000; use at most 4096"),
        ({"dcn": {"dta": 2}}, r"no mesh axis 'dta'; did you mean 'data'\?"),
        ({"dcn": {"data": 0}}, "data spans at least 1 slice"),
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


# -- slices -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What the order of devices reads of one."""

    id: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "fake"
    process_index: int = 0


def places(order: np.ndarray) -> list[int]:
    return [device.id for device in order.flat]


def test_slices_lie_along_the_outer_part_of_their_axis(devices):
    """Simulated devices know no slices: equal runs of them are taken for some."""
    mesh = make_mesh(Mesh(data=4, fsdp=1, tensor=2, dcn={"data": 2}), devices)
    assert mesh.shape["data"] == 4
    assert mesh.axis_types == (AxisType.Explicit,) * len(MESH_AXES)
    order = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    # Rows 0 and 1 stand in the first slice; `tensor` stays within one.
    np.testing.assert_array_equal(order, [[0, 1], [2, 3], [4, 5], [6, 7]])
    inner = make_mesh(Mesh(data=2, fsdp=4, dcn={"fsdp": 2}), devices)
    order = np.vectorize(lambda device: device.id)(inner.devices).reshape(2, 4)
    # The slices are the halves of fsdp, each with a part of every replica.
    np.testing.assert_array_equal(order, [[0, 1, 4, 5], [2, 3, 6, 7]])


def test_devices_that_know_their_slice_are_grouped_by_it():
    mixed = [FakeDevice(i, slice_index=i % 4) for i in range(16)]
    slices = slices_of(mixed, {"data": 2, "fsdp": 2})
    assert [{d.slice_index for d in found} for found in slices] == [{0}, {1}, {2}, {3}]
    sizes = {"data": 4, "fsdp": 2, "tensor": 2}
    on_gpus = [[dataclasses.replace(d, platform="gpu") for d in found] for found in slices]
    order = order_over_slices(sizes, {"data": 2, "fsdp": 2}, on_gpus)
    assert order.shape == (4, 2, 2)
    index = np.vectorize(lambda device: device.slice_index)(order)
    np.testing.assert_array_equal(index[..., 0], [[0, 1], [0, 1], [2, 3], [2, 3]])
    np.testing.assert_array_equal(index[..., 0], index[..., 1])
    assert sorted(places(order)) == list(range(16))


@pytest.mark.parametrize(
    ("count", "dcn", "words"),
    [
        (4, {"data": 2}, "has 2 slices, but the devices are in 4; set for example "
                         "Mesh.dcn={'data': 4}"),
        (2, {}, "Mesh.dcn={} has 1 slice, but the devices are in 2"),
        (1, {"data": 2}, "the devices are in 1; set Mesh.dcn={}"),
    ],
)  # fmt: skip
def test_another_number_of_slices_is_refused(count, dcn, words):
    tpus = [FakeDevice(i, slice_index=i % count) for i in range(8)]
    with pytest.raises(UserError) as caught:
        slices_of(tpus, dcn)
    assert words in str(caught.value)


def test_hosts_of_gpus_are_no_slices_unless_asked_for():
    gpus = [FakeDevice(i, slice_index=i // 4, platform="gpu") for i in range(8)]
    assert len(slices_of(gpus, {})) == 1
    assert len(slices_of(gpus, {"data": 2})) == 2


def test_slices_that_do_not_divide_are_refused():
    with pytest.raises(UserError) as caught:
        Mesh(data=6, fsdp=1, dcn={"data": 4}).sizes(6)
    assert "4 slices do not divide Mesh.data=6" in str(caught.value)
    assert "the nearest number of slices is 3, or set Mesh.data=8" in str(caught.value)
    assert Mesh(data=-1, fsdp=1, dcn={"data": 2}).sizes(6)["data"] == 6


def test_slices_are_written_in_a_config_and_read_again(tmp_path):
    bindings = ["Mesh.dcn = {'data': 2}", "Mesh.data = 2", "Mesh.fsdp = 4", "Mesh.tensor = 1"]
    config = load_config("gpt_quickstart", bindings)
    assert config.mesh.dcn == {"data": 2}
    file = tmp_path / "again.gin"
    file.write_text(config.to_gin())
    assert load_config(file) == config
    hash(config.mesh)
    with pytest.raises(UserError, match=r"Mesh.dcn = {'data': '2'} is a dict; it takes dict\[str"):
        load_config("gpt_quickstart", ["Mesh.dcn = {'data': '2'}"])


def test_a_grid_has_axes_in_place_of_tensor(devices):
    settings = Mesh(data=2, fsdp=1, tensor=4, dcn={"data": 2})
    mesh = make_mesh(settings, devices, tensor_layout="2d")
    assert mesh.axis_names == (*MESH_AXES[:-1], "row", "tensor")
    assert (mesh.shape["data"], mesh.shape["row"], mesh.shape["tensor"]) == (2, 2, 2)
    assert abstract_mesh(settings, 8, tensor_layout="2d").shape == mesh.shape
    cube = make_mesh(Mesh(fsdp=1, tensor=8), devices, tensor_layout="3d")
    assert cube.axis_names == (*MESH_AXES[:-1], "depth", "row", "tensor")
    assert cube.devices.shape[-3:] == (2, 2, 2)
    with pytest.raises(UserError, match="stays within a slice; give the slices to data or fsdp"):
        make_mesh(Mesh(fsdp=1, tensor=8, dcn={"tensor": 2}), devices, tensor_layout="3d")


def sent_to_other_slices(text: str) -> collections.Counter:
    """Elements that a device sends over the data-centre network in a step, by dtype."""
    module, sent = parse(text), collections.Counter()

    def walk(name: str, runs: int) -> None:
        for one in module.computations[name].instructions.values():
            if one.opcode == "send":
                sent[one.tensors[0].dtype] += runs * int(np.prod(one.tensors[0].shape))
            again = module.trip_count(one) if one.opcode == "while" else 1
            for called in one.called:
                walk(called, runs * again)

    walk(module.entry, 1)
    return sent


@needs_libtpu
def test_only_shards_of_gradients_cross_between_slices():
    """Two TPU slices: `fsdp` and `tensor` stay inside; what goes over the network is reduced."""
    devices = tpu_devices("v5e:2x2", slices=2)
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2, dcn={"data": 2}), devices)
    by_data = mesh.devices.reshape(2, 4)
    assert [{d.slice_index for d in row} for row in by_data] == [{0}, {1}]
    layout = Layout.of(mesh, Sharding())
    model = Llama(
        vocab_size=128, num_layers=3, embed_dim=256, num_heads=4, num_kv_heads=4, mlp_dim=512,
        context_length=128,
    )  # fmt: skip
    program = make_step(model, layout, precision=Precision(compute="bfloat16"))
    lowered = lower_step(program, text_batch(rows=8, length=128, vocab_size=128))
    text = lowered.compile({"exec_time_optimization_effort": -1.0}).as_text()
    # Every collective of the links; the network is reached by sends of the host.
    assert {one.axis for one in collectives(text, mesh)} == {"fsdp", "tensor"}
    matrices = vectors = 0
    for variable in jax.tree.leaves(program.abstract_state().params, is_leaf=is_variable):
        value = variable.get_value()
        if "vector" in logical_axes(variable):
            vectors += value.size
        else:
            matrices += int(np.prod(value.sharding.shard_shape(value.shape)))
    sent = sent_to_other_slices(text)
    assert sent["bf16"] == matrices
    # Norms, and a few numbers: the count of targets, the loss.
    assert 0 <= sent["f32"] - vectors <= 8 * 128


@needs_libtpu
def test_an_axis_may_take_half_of_a_direction_of_the_grid():
    devices = tpu_devices("v5p:4x4x4")
    mesh = make_mesh(Mesh(data=2, fsdp=32), devices)
    assert mesh.shape["fsdp"] == 32
    assert {device.id for device in mesh.devices.flat} == {device.id for device in devices}
    # Each run of 32 is half of the slice: two of four planes.
    for half in mesh.devices.reshape(2, 32):
        planes = [{device.coords[i] for device in half} for i in range(3)]
        assert sorted(len(plane) for plane in planes) == [2, 4, 4]


def answers_of(script: str, **environment: str) -> list[str]:
    """What a fresh process prints, which has one CPU device unless it asks for more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_notebook_without_accelerators_gets_eight_simulated_devices(tmp_path):
    script = """
import jaxtrain
devices = jaxtrain.use_devices()
import jax
print(len(devices), devices == jax.devices(), len(jaxtrain.use_devices(8)))
print(jax.config.jax_compilation_cache_dir)
try:
    jaxtrain.use_devices(4)
except ValueError as error:
    print("already runs on 8 cpu devices" in str(error))
"""
    *answers, folder, refused = answers_of(script, JAXTRAIN_CACHE=str(tmp_path))
    assert answers == ["8", "True", "8"]
    assert folder.startswith(str(tmp_path / "compiled"))
    assert refused == "True"


def test_too_few_accelerators_make_room_for_simulated_devices():
    # Stands in for a machine with one GPU: a backend that is open, has one device and is no CPU's,
    # until the backends are opened again.
    script = """
import jax, jaxtrain
opened = jax.devices()
real = jax.default_backend
jax.default_backend = lambda: "gpu" if jax.devices() == opened else real()
print(jaxtrain.use_devices() == opened, jaxtrain.use_devices(1) == opened)
print(len(jaxtrain.use_devices(8)), jax.default_backend())
"""
    assert answers_of(script) == ["True", "True", "8", "cpu"]
