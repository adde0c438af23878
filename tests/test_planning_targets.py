"""Targets: what is written, what exists, and the devices that compilers give for it."""

import subprocess
import sys

import jax
import pytest
from jax.experimental import topologies

from jaxtrain.errors import UserError
from jaxtrain.planning.hardware import CHIPS
from jaxtrain.planning.targets import (
    TPU_GRIDS,
    native_stderr_kept,
    parse_target,
    target_devices,
    tpu_devices,
)


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
        ("abacus:1", "there are v4, v5e, v5p, v6e, 7x, a100, a100-40, h100, h200, b200, cpu"),
        ("v5e", "not written as v5e:GRID, for example 'v5e:2x2'"),
        ("v5p:4x4x", "not written as v5p:GRID, for example 'v5p:2x2x2'"),
        ("h200:eight", "not written as h200:HOSTSxGPUS, for example 'h200:1x8'"),
        ("cpu:-1", "not written as cpu:DEVICES, for example 'cpu:8'"),
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
        ("h100:2x6", "the nearest is 'h100:2x8'"),
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
        ("h100:128x8", 1024), ("h200:1x8", 8), ("b200:3x4", 12), ("cpu:8", 8),
    ],
)  # fmt: skip
def test_a_target_counts_its_devices_and_writes_its_name(target, devices):
    found = parse_target(target)
    assert found.devices == devices
    assert found.name == target
    assert found.chip is CHIPS[target.split(":")[0]]


def test_every_grid_that_a_refusal_lists_is_taken():
    for name, grids in TPU_GRIDS.items():
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
        "from jaxtrain.planning.targets import tpu_devices; tpu_devices('v5e:2x4')"
    )
    assert done.returncode == 1
    assert "UserError: target 'v5e:2x4' is compiled by libtpu, which is not" in done.stderr
    assert "pip install 'jaxtrain[tpu]', or --no-compile" in done.stderr


def test_what_libtpu_says_is_in_the_refusal(monkeypatch):
    def refuse(**_):
        raise RuntimeError("no such topology")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(UserError, match="'v5e:2x4': libtpu refuses it: no such topology"):
        tpu_devices("v5e:2x4")


# -- CPUs ----------------------------------------------------------------------------------------


def test_simulated_devices_are_those_of_this_process():
    assert target_devices(parse_target("cpu:4")) == jax.devices()[:4]
    with pytest.raises(UserError, match="plan for 'cpu:8'"):
        target_devices(parse_target("cpu:9"))


def test_a_new_process_simulates_as_many_as_are_asked_for():
    done = python(
        "import jax; from jaxtrain.planning.targets import parse_target, target_devices\n"
        "devices = target_devices(parse_target('cpu:5')); print(len(devices), jax.device_count())"
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
