"""Layouts of an elastic run: which numbers of hosts train, on what mesh, with the same batch."""

import itertools
import json
import math

import numpy as np
import pytest

from jaxtrain import Trainer, load_config
from jaxtrain.cli import main as command
from jaxtrain.config.errors import UserError
from jaxtrain.training.preflight import elastic
from jaxtrain.training.preflight.elastic import elastic_layouts

INNER = ("pipe", "expert", "context", "tensor")


def changed(config, bindings, layout):
    words = [f"{name} = {value!r}" for name, value in layout.changes.items()]
    return load_config(config, [*bindings, *words])


@pytest.mark.parametrize(
    ("data", "fsdp", "hosts", "expected"),
    [
        # Replicas are lost first, whole shards last: embed_dim is 128, which 3 does not divide.
        (4, 1, 3, (3, 1)),
        (4, 2, 3, (3, 2)),
        (2, 4, 3, (3, 2)),
        (2, 4, 2, (1, 4)),
        (1, 8, 2, (1, 4)),
        (1, 8, 1, (1, 2)),
    ],
)
def test_data_shrinks_first_and_then_fsdp(data, fsdp, hosts, expected):
    bindings = ["Mesh.tensor=1", f"Mesh.data={data}", f"Mesh.fsdp={fsdp}"]
    config = load_config("gpt_quickstart", bindings)
    (found,) = (one for one in elastic_layouts(config, hosts, 4) if one.hosts == hosts)
    assert found.error is None
    assert (found.changes["Mesh.data"], found.changes["Mesh.fsdp"]) == expected


def test_batches_stay_and_microbatches_do_not_grow():
    for batch, data, accumulation in itertools.product((12, 16, 30), (2, 4), (1, 2)):
        bindings = [
            f"Train.global_batch_size={batch}", f"Mesh.data={data}", "Mesh.fsdp=2",
            "Mesh.tensor=1", f"Train.accumulation={accumulation}", "Train.fill_batch=True",
        ]  # fmt: skip
        config = load_config("gpt_quickstart", bindings)
        *fewer, whole = elastic_layouts(config, 1, data)
        assert whole.changes == {}
        most = whole.rows / (data * 2 * accumulation)
        for one in fewer:
            smaller = changed("gpt_quickstart", bindings, one)
            assert one.devices == one.hosts * 2
            assert smaller.train.global_batch_size == batch
            parts = one.devices * smaller.train.accumulation
            assert one.rows % parts == 0
            assert batch <= one.rows < batch + parts
            assert one.rows / parts <= math.ceil(most)


def test_axes_inside_a_replica_keep_their_sizes():
    bindings = ["Mesh.tensor=4", "Mesh.fsdp=2", "Mesh.data=1"]
    found = elastic_layouts(load_config("gpt_quickstart", bindings), 1, 4)
    # Hosts of 2 devices: a replica takes two hosts.
    assert [one.error is None for one in found] == [False, True, False, True]
    assert found[0].error == "1 host has 2 devices, a number that Mesh.tensor=4 does not divide"
    sizes = changed("gpt_quickstart", bindings, found[1]).mesh.sizes(4)
    assert {axis: sizes[axis] for axis in INNER} == {
        "pipe": 1, "expert": 1, "context": 1, "tensor": 4,
    }  # fmt: skip


def test_batch_statistics_keep_the_microbatches():
    """They are those of a microbatch, so a batch that does not divide is an error."""
    bindings = ["Mesh.data=4", "Mesh.fsdp=1", "Train.global_batch_size=64"]
    one, two, three, _ = elastic_layouts(load_config("resnet_digits", bindings), 1, 4)
    assert [one.changes["Train.accumulation"], two.changes["Train.accumulation"]] == [1, 1]
    assert "running statistics" in three.error


@pytest.mark.parametrize(
    ("bindings", "hosts", "message"),
    [
        (["Mesh.fsdp=-1"], (1, 2), "Mesh.fsdp=-1 takes the devices that there are"),
        (["Mesh.fsdp=2", "Mesh.tensor=3"], (1, 4), "the 6 devices of the mesh do not divide"),
        (
            ["Mesh.data=4", "Mesh.fsdp=1", "Mesh.tensor=1", "Exchange.method='diloco'"],
            (2, 4),
            "Exchange.method='diloco' has a state per replica",
        ),
        (
            ["Mesh.data=4", "Mesh.fsdp=1", "Mesh.tensor=1", "Mesh.dcn={'data': 2}"],
            (2, 4),
            "fixes the number of slices",
        ),
    ],
)
def test_what_fixes_the_number_of_hosts_is_an_error(bindings, hosts, message):
    with pytest.raises(UserError, match=message):
        elastic_layouts(load_config("gpt_quickstart", bindings), *hosts)


def test_a_tpu_slice_is_whole():
    config = load_config("gpt_quickstart", ["Mesh.fsdp=4", "Mesh.tensor=1"])
    with pytest.raises(UserError, match="a TPU slice"):
        elastic_layouts(config, 2, 4, platform="tpu")


def test_the_layouts_of_a_supervisor(capsys):
    given = {
        "config": "gpt_quickstart", "least": 1, "most": 2, "allow_imports": False,
        "bindings": ["Mesh.tensor=1", "Mesh.fsdp=4", "Mesh.simulated_devices=4"],
    }  # fmt: skip
    assert elastic.main(json.dumps(given)) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["hosts"], one["changes"]["Mesh.simulated_devices"]) == (1, 2)
    assert (two["hosts"], two["changes"], two["error"]) == (2, {}, None)
    assert elastic.main(json.dumps({**given, "most": 3})) == 2
    assert "do not divide over 3 hosts" in capsys.readouterr().err


def test_plan_prints_a_row_per_number_of_hosts(tmp_path, capsys):
    words = ["plan", "gpt_quickstart", "--target", "cpu:8", "--no-compile", "--hosts", "2:4"]
    words += ["-b", "Mesh.tensor=1", "-b", "Mesh.fsdp=4", "-b", "Mesh.data=2"]
    assert command([*words, "--json", str(tmp_path / "plan.json")]) == 0
    assert "hosts" in capsys.readouterr().out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [(one["target"], one["values"]["hosts"]) for one in plans] == [
        ("cpu:4", "2"), ("cpu:6", "3"), ("cpu:8", "4"),
    ]  # fmt: skip


@pytest.mark.parametrize("hosts", ["4", "0:2", "3:2", "a:b"])
def test_a_wrong_range_of_hosts_is_an_error(hosts, capsys):
    words = ["plan", "gpt_quickstart", "--target", "cpu:8", "--no-compile", "--hosts", hosts]
    assert command(words) == 2
    assert "write MIN:MAX" in capsys.readouterr().err


def test_gpu_hosts_of_the_target_are_the_most(capsys):
    words = ["plan", "llama_8b", "--target", "h100:4x8", "--no-compile", "--hosts", "2:3"]
    assert command(words) == 2
    assert "target h100:4x8 has 4 hosts; use --hosts 2:4" in capsys.readouterr().err


@pytest.mark.slow
def test_three_of_four_hosts_train_as_all_do(tiny_config, devices):
    bindings = [
        "Mesh.data=2", "Mesh.fsdp=4", "Mesh.tensor=1", "Train.global_batch_size=16",
        "Precision.compute='float32'",
    ]  # fmt: skip
    config = load_config(tiny_config, bindings)
    three, four = elastic_layouts(config, 3, 4)
    losses = []
    for one in (three, four):
        trainer = Trainer(changed(tiny_config, bindings, one), devices=devices[: one.devices])
        trainer.train(steps=4)
        losses.append([line["loss"] for line in trainer.history if "loss" in line])
    assert len(losses[0]) >= 4
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
