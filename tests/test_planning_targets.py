"""Targets: what is written, what exists, and the devices that compilers give for it."""

import collections
import importlib.util
import math
import os
import re
import subprocess
import sys
import types

import jax
import pytest
from conftest import make_step, text_batch
from jax.experimental import topologies

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines import targets
from jaxtrain.analysis.planning.machines.targets import (
    compiler_options,
    native_stderr_kept,
    parse_target,
    target_devices,
    tpu_devices,
)
from jaxtrain.config.errors import NoCompilerError, UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.chips import CHIPS
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, Sharding
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.state import with_shardings


def libtpu():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the libtpu package")


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", "no chip ''"),
        ("v6:2x4", "did you mean 'v6e'"),
        ("h10:1x8", "did you mean 'h100'"),
        ("a100-80:1x8", "did you mean 'a100'"),
        ("v7x:2x2x1", "did you mean '7x'"),
        ("tpu7x:2x2x1", "did you mean '7x'"),
        (
            "abacus:1",
            "there are v4, v5e, v5p, v6e, 7x, a100, a100-40, h100, h100-nvl, h100-pcie, h200, "
            "b200, gb200, b300, gb300, mi300x, l40s, l4, rtx3090, rtx4090, rtx5090, cpu",
        ),
        ("4090:1x2", "did you mean 'rtx4090'"),
        (
            "rtx4090:2x8",
            "plan for one host, or pass --network; the nearest is 'rtx4090:1x8'",
        ),
        ("rtx5090:16", "the nearest is 'rtx5090:1x8'"),
        ("rtx3090:2x3", "or pass --network; the nearest is 'rtx3090:1x3'"),
        ("gb200:1x80", "has 1 to 72; the nearest is 'gb200:1x72'"),
        ("gb200", "does not have the form gb200:HOSTSxGPUS, for example 'gb200:1x72'"),
        ("h100:99999999999x5", "1,048,576 devices are planned for; the nearest is 'h100:209715x5'"),
        ("cpu:9999999", "the nearest is 'cpu:1048576'"),
        ("h100-pci:1x8", "did you mean 'h100-pcie'"),
        ("v5e", "does not have the form v5e:GRID, for example 'v5e:2x2'"),
        ("v5p:4x4x", "does not have the form v5p:GRID, for example 'v5p:2x2x2'"),
        ("h200:eight", "does not have the form h200:HOSTSxGPUS, for example 'h200:1x8'"),
        ("cpu:-1", "does not have the form cpu:DEVICES, for example 'cpu:8'"),
        ("v5e:3x3", "the nearest is 'v5e:2x4'"),
        ("v5e:0x0", "the nearest is 'v5e:1x1'"),
        ("v5e:8x4", "the nearest is 'v5e:4x8'"),
        ("v6e:32x32", "the nearest is 'v6e:16x16'"),
        ("v5e:2x2x1", "the nearest is 'v5e:2x2'"),
        ("v5p:8x8x6", "the nearest is 'v5p:4x8x8'"),
        ("v5p:16x16x28", "the nearest is 'v5p:16x16x24'"),
        ("v4:16x16x24", "the nearest is 'v4:16x16x16'"),
        ("v4:12x4x4", "the nearest is 'v4:4x4x12'"),
        ("v4:1x1x1", "the nearest is 'v4:2x2x1'"),
        ("7x:16x16x40", "the nearest is '7x:16x16x36'"),
        ("h100:8", "the nearest is 'h100:1x8'"),
        ("h100:4", "the nearest is 'h100:1x4'"),
        ("h100:32", "the nearest is 'h100:4x8'"),
        ("h100:2x16", "the nearest is 'h100:2x8'"),
        ("h100:0x8", "the nearest is 'h100:1x8'"),
        ("h100:1x0", "the nearest is 'h100:1x1'"),
        ("h100:1x2x8", "a GPU target is hosts x GPUs per host"),
        ("cpu:0", "at least 1; the nearest is 'cpu:1'"),
        ("cpu:2x4", "the nearest is 'cpu:8'"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest(target, says):
    with pytest.raises(UserError) as error:
        parse_target(target)
    assert str(error.value).startswith(f"target {target!r}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "devices"),
    [
        ("v4:8x8x16", 1024), ("v5e:16x16", 256), ("v5p:4x4x12", 192), ("v5p:8x8x16", 1024),
        ("v6e:8x8", 64), ("7x:1x1x1", 2), ("7x:8x8x8", 1024), ("a100:4x8", 32), ("a100-40:1x8", 8),
        ("h100:128x8", 1024), ("h200:1x8", 8), ("b200:3x4", 12), ("h100:2x6", 12),
        ("gb200:4x72", 288), ("gb300:1x72", 72), ("b300:2x8", 16), ("h100-nvl:1x4", 4),
        ("h100-pcie:1x8", 8), ("l40s:1x8", 8),
        ("mi300x:4x8", 32), ("a100-40:1x16", 16), ("v5p:16x20x28", 8960), ("l4:2x8", 16),
        ("rtx3090:1x2", 2), ("rtx4090:1x1", 1), ("rtx5090:1x4", 4), ("cpu:8", 8),
    ],
)  # fmt: skip
def test_a_target_counts_its_devices_and_writes_its_name(target, devices):
    found = parse_target(target)
    assert found.devices == devices
    assert found.name == target
    assert found.chip is CHIPS[target.split(":")[0]]


def test_a_network_of_one_s_own_is_that_of_its_adapters():
    found = parse_target("h100:4x8", network=100)
    assert (found.name, found.chip.dcn_bandwidth) == ("h100:4x8", 100e9 / 8)
    assert parse_target("rtx4090:2x4", network=25).devices == 8
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--network="):
            parse_target("h100:4x8", network=wrong)


def test_disks_of_one_s_own():
    assert parse_target("v5e:2x2", disk=12).chip.disk_bandwidth == 12e9
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--disk="):
            parse_target("v5e:2x2", disk=wrong)


def test_what_the_cuda_plugin_cannot_compile_is_planned_by_closed_forms():
    with pytest.raises(NoCompilerError, match="'mi300x:1x8': no compiler for it comes with JAX's"):
        target_devices(parse_target("mi300x:1x8"))


def test_every_grid_that_a_refusal_lists_is_taken():
    there = {name: chip.slices.grids for name, chip in CHIPS.items() if chip.slices is not None}
    assert there.keys() == {"v4", "v5e", "v5p", "v6e", "7x"}
    for name, grids in there.items():
        for grid in grids:
            assert parse_target(f"{name}:{grid}").name == f"{name}:{grid}"


# -- TPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["v4:2x2x1", "v4:8x8x16", "v5e:1x1", "v5p:4x4x4", "v5p:8x8x16", "v6e:2x4",
               "v6e:16x16", "7x:1x1x1", "7x:2x2x1", "7x:8x8x8"],
)  # fmt: skip
def test_a_slice_has_its_chips_and_libtpu_is_quiet(target, capfd):
    libtpu()
    found = parse_target(target)
    devices = target_devices(found)
    assert len(devices) == len(set(devices)) == found.devices
    assert {device.platform for device in devices} == {"tpu"}
    assert {device.device_kind for device in devices} == {found.chip.device_kinds[0]}
    corner = tuple(max(device.coords[i] for device in devices) + 1 for i in range(3))
    assert corner == (*found.shape, 1)[:3]
    assert capfd.readouterr().err == ""


def test_slices_are_joined_by_the_network():
    libtpu()
    devices = target_devices(parse_target("v5e:16x16"), slices=4)
    assert len(devices) == 1024
    by_slice = [[d for d in devices if d.slice_index == index] for index in range(4)]
    assert [len(one) for one in by_slice] == [256] * 4
    assert tpu_devices("v6e:1x1", slices=2)[1].slice_index == 1


def test_without_libtpu_the_user_learns_what_to_install():
    """In a process of its own: a libtpu that another test has loaded would stay."""
    done = python(
        "import os, sys; sys.modules['libtpu'] = None; os.environ.pop('TPU_LIBRARY_PATH', None)\n"
        "from jaxtrain.analysis.planning.machines import targets; targets.tpu_devices('v5e:2x4')"
    )
    assert done.returncode == 1
    assert "NoCompilerError: target 'v5e:2x4' is compiled by libtpu, which is not" in done.stderr
    assert "pip install 'jaxtrain[tpu]'" in done.stderr


def test_what_libtpu_says_is_in_the_refusal(monkeypatch):
    def validate(**_):
        raise RuntimeError("no such topology")

    monkeypatch.setattr(topologies, "get_topology_desc", validate)
    with pytest.raises(UserError, match="'v5e:2x4': libtpu rejects it: no such topology"):
        tpu_devices("v5e:2x4")


# -- CPUs ----------------------------------------------------------------------------------------


def test_simulated_devices_are_those_of_this_process():
    devices = jax.devices()  # opened first: what is requested then finds them
    assert target_devices(parse_target("cpu:4")) == devices[:4]
    with pytest.raises(UserError, match="plan for 'cpu:8'"):
        target_devices(parse_target("cpu:9"))


def test_a_new_process_simulates_as_many_as_are_asked_for():
    done = python(
        "import jax; from jaxtrain.analysis.planning.machines import targets\n"
        "devices = targets.target_devices(targets.parse_target('cpu:5'))\n"
        "print(len(devices), jax.device_count())"
    )
    assert done.stdout == "5 5\n"


@pytest.mark.parametrize(("target", "more"), [("cpu:4", "'cpu:8'"), ("h100:2x8", "'h100:4x8'")])
def test_only_tpus_have_slices(target, more):
    with pytest.raises(UserError, match=f"only TPUs have slices; all of these devices are {more}"):
        target_devices(parse_target(target), slices=2)


def test_native_stderr_is_kept_and_given_back(capfd):
    with native_stderr_kept() as noise:
        subprocess.run(["sh", "-c", "echo complaint >&2"], check=True)
        assert noise() == "complaint\n"
    subprocess.run(["sh", "-c", "echo heard >&2"], check=True)
    assert capfd.readouterr().err == "heard\n"


# -- GPUs ----------------------------------------------------------------------------------------


# Memory in bytes, multiprocessors and compute capability as drivers report them: XLA's own
# descriptions of these GPUs (xla/backends/gpu/target_config/specs).
@pytest.mark.parametrize(
    ("name", "description", "memory", "cores", "capability"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", 85100068864, 108, "major: 8 minor: 0"),
        ("a100-40", "NVIDIA A100-SXM4-40GB", 42331013120, 108, "major: 8 minor: 0"),
        ("h100", "NVIDIA H100 80GB HBM3", 84942979072, 132, "major: 9 minor: 0"),
        ("b200", "NVIDIA B200", 191514411008, 148, "major: 10 minor: 0"),
        ("h100-pcie", "NVIDIA H100 PCIe", 84942979072, 114, "major: 9 minor: 0"),
        ("gb200", "NVIDIA GB200", 197897748480, 152, "major: 10 minor: 0"),
        ("gb300", "NVIDIA GB300", 297021079552, 152, "major: 10 minor: 3"),
        # What PyTorch reports of these, in hundredths of a GiB.
        ("l4", "NVIDIA L4", 22.03, 58, "major: 8 minor: 9"),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 23.70, 82, "major: 8 minor: 6"),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 23.64, 128, "major: 8 minor: 9"),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 31.36, 170, "major: 12 minor: 0"),
        ("h100-nvl", "NVIDIA H100 NVL", 93.00, 132, "major: 9 minor: 0"),
        ("b300", "NVIDIA B300", 267.69, 158, "major: 10 minor: 3"),
        ("l40s", "NVIDIA L40S", 44.42, 142, "major: 8 minor: 9"),
    ],
)
def test_a_gpu_is_described_as_its_driver_would(name, description, memory, cores, capability):
    text = targets.target_config(CHIPS[name])
    assert f'\ndevice_description_str: "{description}"\n' in text
    size = int(re.search(r"\n  device_memory_size: (\d+)\n", text)[1])
    assert size == memory if isinstance(memory, int) else round(size / 2**30, 2) == memory
    assert f"\n  core_count: {cores}\n" in text
    assert f"\n  cuda_compute_capability {{ {capability} " in text
    assert ("ACCELERATED" in text) == capability.startswith(("major: 9 ", "major: 10 "))
    # CUDA's programming guide: 48 warps of 32 on a core of these, 64 on one of the others.
    threads = 1536 if name.startswith(("l4", "rtx")) else 2048
    assert f"\n  threads_per_core_limit: {threads}\n" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    "target", ["a100:1x8", "a100-40:1x8", "h100:2x8", "h200:1x8", "b200:4x4", "gb200:2x72"]
)
def test_hosts_are_nvlink_domains_of_their_own(target, monkeypatch):
    """The compiler is told: NVLink domains x hosts in each x GPUs of a host."""
    asked = {}

    def describe(**arguments):
        asked.update(arguments)
        return types.SimpleNamespace(devices=["a device"])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    assert target_devices(parse_target(target)) == ["a device"]
    hosts, per_host = target.split(":")[1].split("x")
    assert asked["topology"] == f"{hosts}x1x{per_host}"
    assert asked["platform"] == "cuda"
    assert os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        (False, "not installed; pip install 'jaxtrain[cuda13]' (4.4 GB)"),
        (True, "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before it starts"),
    ],
)
def test_without_the_cuda_plugin_the_user_learns_what_to_do(installed, says, monkeypatch):
    def unknown(**_):
        raise NotImplementedError("topology not implemented for cuda")

    find = importlib.util.find_spec
    spec = find("json") if installed else None
    monkeypatch.setattr(topologies, "get_topology_desc", unknown)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: spec if name.startswith("jax_cuda") else find(name),
    )
    with pytest.raises(UserError) as error:
        tpu_devices("h100:1x8")
    assert str(error.value).startswith("target 'h100:1x8'")
    assert says in str(error.value)


@pytest.mark.cuda_compile
@pytest.mark.parametrize(
    "target",
    ["a100:1x8", "a100-40:1x8", "h100:1x8", "h200:1x8", "b200:1x8", "l4:1x8", "rtx3090:1x8",
     "rtx4090:1x8", "rtx5090:1x8", "h100-nvl:1x8", "h100-pcie:1x8", "gb200:1x8", "b300:1x8",
     "gb300:1x8", "l40s:1x8"],
)  # fmt: skip
def test_the_cuda_compiler_compiles_a_train_step_where_no_gpu_is(target, capfd):
    found = parse_target(target)
    devices = target_devices(found)
    assert len(devices) == found.devices
    assert {device.device_kind for device in devices} == {found.chip.device_kinds[0]}
    per_host = collections.Counter(device.process_index for device in devices)
    assert per_host == dict.fromkeys(range(found.shape[0]), found.shape[1])

    layout = Layout.of(make_mesh(Mesh(fsdp=8), devices), Sharding(zero=3))
    model = Llama(
        vocab_size=128, num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=4, mlp_dim=512,
        context_length=128,
    )  # fmt: skip
    program = make_step(model, layout, precision=Precision(compute="bfloat16"))
    state, batch = program.abstract_state(), text_batch(rows=16, length=128, vocab_size=128)
    batch = with_shardings(batch, program.setup.batch_shardings(batch))
    with layout.active():
        compiled = CompiledStep(program).lower(batch).compile(compiler_options(found))
    arguments = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((state, batch))
    )
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == arguments
    assert memory.temp_size_in_bytes > 0
    rows = collectives(compiled.as_text(), layout.mesh)
    assert {row.axis for row in rows if row.bytes > 4096} == {"fsdp"}
    assert "all-gather" in {row.kind for row in rows}
    assert capfd.readouterr().err == ""
