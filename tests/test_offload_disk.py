"""State in files: the steps of one in memory, half an update that nobody resumes, and its bytes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cluster import start_processes
from conftest import needs_libtpu
from test_offload import LARGE, config_of

from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.offload import Offload, on_disk
from jaxtrain.training.offload.files import FileArray, Scratch
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

DISK = Offload(optimizer_state="disk")


def numbers(state: Any) -> dict[str, np.ndarray]:
    """Parameters and the optimizer's state by their paths."""
    tree = state.params, state.opt_state
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.history if "loss" in line]


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], **how: float) -> None:
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        if "bias" not in name:  # a key's bias has a gradient of rounding errors alone
            a, b = (np.asarray(one, np.float32) for one in (x, wanted[name]))
            np.testing.assert_allclose(a, b, err_msg=name, **how)


@pytest.mark.slow
def test_a_run_is_that_of_a_state_in_memory_and_half_an_update_is_never_resumed(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(on_disk, "BLOCK_BYTES", 1 << 12)  # several groups of a layer's parameters
    alone = Trainer(config_of(tiny_config, 4, Offload()))
    alone.train()
    whole = Trainer(config_of(tiny_config, 4, DISK), tmp_path / "whole")
    files = tmp_path / "whole/offload/process-0"
    arrays = [x for x in jax.tree.leaves(whole.state) if isinstance(x, FileArray)]
    assert len(arrays) == 32
    # Two moments, float32; what several devices hold alike has one file.
    sizes = sum(file.stat().st_size for file in files.iterdir())
    assert sizes == 2 * sum(x.nbytes for x in whole.weights().values())
    whole.train()
    np.testing.assert_allclose(losses(whole), losses(alone), rtol=1e-5)
    assert_close(numbers(whole.state), numbers(alone.state), rtol=1e-3, atol=2e-5)
    expected = numbers(whole.state)
    whole.close()

    half = Trainer(config_of(tiny_config, 4, DISK, **{"Train.save_every": 2}), tmp_path / "half")
    half.train(2)
    write, count = FileArray.write, iter(range(1000))

    def broken(self: FileArray, *args: Any) -> None:
        if next(count) == 20:
            raise OSError("the disk is gone")
        write(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(FileArray, "write", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            half.train()
    del half  # without a word, as a kill would

    again = Trainer(config_of(tiny_config, 4, DISK), tmp_path / "half")
    assert again.steps_done == 2
    again.train()
    found = numbers(again.state)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    again.close()
    without = Trainer(config_of(tiny_config, 4, Offload()), tmp_path / "half", read_only=True)
    restored = numbers(without.state)
    for name, x in expected.items():
        np.testing.assert_array_equal(restored[name], x, err_msg=name)


def test_a_folder_is_its_processs_own_and_goes_with_it(tmp_path):
    left = tmp_path / "offload/process-0/of_a_run_that_was_killed"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half an update")
    scratch = Scratch(tmp_path)
    assert left.exists(), "nothing is touched before it is needed"
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = FileArray(scratch, "x", jax.ShapeDtypeStruct((3, 4), np.float32, sharding=device))
    assert not left.exists()
    array.write(jax.numpy.arange(12.0).reshape(3, 4))
    array.write(jax.numpy.full((1, 4), -1.0), 1)
    np.testing.assert_array_equal(np.asarray(array), [[0, 1, 2, 3], [-1] * 4, [8, 9, 10, 11]])
    np.testing.assert_array_equal(np.asarray(array.read(2)), [[8, 9, 10, 11]])
    folder = scratch.folder
    del scratch
    assert folder.exists(), "the array needs it"
    del array
    assert not folder.exists()


def test_a_runs_end_leaves_the_folder_of_the_next_run_there(tmp_path):
    """A closed trainer is collected later than its successor is made."""
    first, second = Scratch(tmp_path), Scratch(tmp_path)
    (first.folder / "old").touch()
    assert second.folder == first.folder
    assert not (second.folder / "old").exists()
    (second.folder / "new").touch()
    del first
    assert (second.folder / "new").exists()
    folder = second.folder
    del second
    assert not folder.exists()


# Rules whose state has numbers alone, bytes, matrices and a curvature, and settings of AdamW. That
# every rule updates a part as it updates the whole, test_offload.py proves.
KINDS = ["schedule_free", "adam8bit", "soap", "sophia_h"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*KINDS, "average, bfloat16, zero1", "host"])
def test_every_rule_updates_in_blocks(tiny_config, rule, monkeypatch):
    monkeypatch.setattr(on_disk, "BLOCK_BYTES", 1 << 12)
    more: dict[str, Any] = {
        "average, bfloat16, zero1": {
            "Optimizer.average_decay": 0.9, "Optimizer.moments": "bfloat16", "Sharding.zero": 1,
        },
        "schedule_free": {"Schedule.warmup_steps": 1},
    }.get(rule, {})  # fmt: skip
    if rule in rules():
        more["Optimizer.name"] = rule
    offload = dataclasses.replace(DISK, parameters="host" if rule == "host" else "none")
    alone, found = (
        Trainer(config_of(tiny_config, 3, where, **more)) for where in (Offload(), offload)
    )
    one, other = (trainer.train()["eval_loss"] for trainer in (alone, found))
    np.testing.assert_allclose(losses(found), losses(alone), rtol=1e-4)
    np.testing.assert_allclose(other, one, rtol=1e-4)
    if "average" in rule:
        found.set_weights(found.weights())
        np.testing.assert_allclose(
            found.weights(evaluated=True)["token_embedding"], found.weights()["token_embedding"]
        )


@pytest.mark.slow
def test_ten_steps_with_rates_of_layers_are_those_of_a_state_in_memory(tiny_config, monkeypatch):
    monkeypatch.setattr(on_disk, "BLOCK_BYTES", 1 << 12)
    rates = {"layers/*[1:2]": 0.25, "layers/up*": 3.0, "embedding": 0.5}
    alone, found = (
        Trainer(config_of(tiny_config, 10, where, **{"Optimizer.learning_rates": rates}))
        for where in (Offload(), DISK)
    )
    for trainer in (alone, found):
        trainer.train()
    assert_close(numbers(found.state), numbers(alone.state), rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_a_bad_step_leaves_every_bit_of_it(tiny_config):
    trainer = Trainer(config_of(tiny_config, 4, DISK, **{"Guard.policy": "skip"}))
    trainer.train(2)
    before = numbers(trainer.state)
    batch = next(iter(trainer._feed.training(trainer.dataset, 0)))
    mask = jax.device_put(
        np.full(batch.loss_mask.shape, np.nan, np.float32), batch.loss_mask.sharding
    )
    with trainer.layout.active():
        metrics = trainer._loop.step(dataclasses.replace(batch, loss_mask=mask))
    assert metrics["bad"] == 1
    after = numbers(trainer.state)
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
    trainer.train(1)
    assert any(np.any(x != before[name]) for name, x in numbers(trainer.state).items())


@pytest.mark.slow
@pytest.mark.rotated("processes")
def test_two_processes_have_files_of_their_own_shards(tiny_config, tmp_path):
    """Two steps, a checkpoint, two more: the losses of one process with its state in memory."""
    mesh = {"Mesh.data": 1, "Mesh.fsdp": 2, "Mesh.tensor": 1}
    alone = Trainer(config_of(tiny_config, 4, Offload(), **mesh), devices=jax.devices()[:2])
    alone.train()
    for steps in (2, 4):
        config = config_of(tiny_config, steps, DISK, **mesh)
        (tmp_path / "run.gin").write_text(config.to_gin())
        words = ["train", str(tmp_path / "run.gin"), "--workdir", str(tmp_path / "run")]
        words += ["--coordinator", "{coordinator}", "--num-processes", "{count}"]
        words += ["--process-id", "{process}"]
        with start_processes(2, words, folder=tmp_path) as processes:
            for process in processes:
                assert process.end() == 0, process.log()
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(found, losses(alone), rtol=1e-5)
    assert not (tmp_path / "run/offload").exists()


@pytest.mark.parametrize(
    ("offload", "bindings", "says"),
    [
        (DISK, {"Mesh.pipe": 2, "Mesh.tensor": 1}, "optimizer_state='disk' with Mesh.pipe=2"),
        (Offload(parameters="disk"), {}, "parameters='disk': a step computes with all parameters"),
    ],
)
def test_what_it_does_not_go_together_with(tiny_config, offload, bindings, says):
    config = config_of(tiny_config, 2, offload, **bindings)
    with pytest.raises(UserError, match=re.escape(f"Offload.{says}")):
        preflight.check(config, device_count=8, platform="cpu")


def test_a_plan_has_its_bytes_on_disk_device_and_host():
    plain, config = (
        load_config(LARGE, [f"Offload.optimizer_state = {where!r}"]) for where in ("none", "disk")
    )
    layout = abstract_layout(config, 8)
    without, held = argument_bytes(plain, layout), argument_bytes(config, layout)
    counts = 8  # two numbers of 4 bytes that count updates
    assert held.disk == without.optimizer - counts == 2 * without.params
    assert held.optimizer == counts
    assert held.params == without.params
    # The largest block is a layer: 12 width^2 split over fsdp, 13 width that are not; two moments.
    block = 2 * 4 * (12 * 1024**2 // 8 + 13 * 1024)
    assert held.host == on_disk.BLOCKS_ALIVE * block
    found = plan(config, "v5e:2x4", compile=False)
    assert found.to_json()["memory"]["disk"] == held.disk
    assert "plus its host's disks" in found.table()
    assert any("disks" in one for one in found.time.assumptions)


@pytest.mark.slow
@needs_libtpu
def test_a_tpus_compiler_is_given_none_of_it():
    config = load_config(LARGE, ["Offload.optimizer_state = 'disk'"])
    layout = target_layout(config, parse_target("v5e:2x4"))
    quick = {"exec_time_optimization_effort": -1.0}
    stats: Any = lower(config, layout).compile(quick).memory_analysis()
    held = argument_bytes(config, layout)
    assert abs(stats.argument_size_in_bytes - held.total) < 1 << 16  # vectors fill no tile
    # The parameters go out where they came in; beside them, gradients in float32.
    gone = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert abs(gone - held.params) < 1 << 16


# -- a state that does not fit ---------------------------------------------------------------------

# 101 million parameters: 404 MB of them, as many of gradients, 808 MB of moments.
TOO_LARGE = """
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 2
Train.global_batch_size = 2
Train.eval_batches = 1
GPT.vocab_size = 256
GPT.num_layers = 32
GPT.embed_dim = 512
GPT.num_heads = 8
GPT.context_length = 32
TextData.source = 'synthetic'
TextData.synthetic_vocab_size = 256
TextData.sequence_length = 32
Optimizer.clip_norm = None
Schedule.name = 'constant'
"""
CHILD = """
import json, resource, sys, threading, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
import numpy as np
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

def data_bytes():
    with open("/proc/self/status") as file:
        return 1024 * int(next(x for x in file if x.startswith("VmData")).split()[1])

where, room, workdir, text = sys.argv[1:]
config = load_config(text, [f"Offload.optimizer_state = {where!r}"])
jax.jit(lambda x: x @ x)(np.ones((512, 512))).block_until_ready()
begun, most = data_bytes(), [0]
unlimited = resource.getrlimit(resource.RLIMIT_DATA)
if int(room):
    resource.setrlimit(resource.RLIMIT_DATA, (begun + int(room), unlimited[1]))

def watch():
    while True:
        most[0] = max(most[0], data_bytes() - begun)
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
trainer = Trainer(config, workdir)
trainer.train()
needed = most[0]
resource.setrlimit(resource.RLIMIT_DATA, unlimited)
arrays = {}  # of each the norm, and a sum in which every number has a weight of its own
for path, x in jax.tree_util.tree_leaves_with_path((trainer.state.params, trainer.state.opt_state)):
    x = np.asarray(x, np.float64).ravel()
    weights = np.cos(np.arange(x.size))
    arrays[jax.tree_util.keystr(path)] = float(np.linalg.norm(x)), float(x @ weights)
losses = [line["loss"] for line in trainer.history if "loss" in line]
trainer.close()
print(json.dumps({"arrays": arrays, "losses": losses, "most": needed}))
"""


def child(where: str, room: int, workdir: Path) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, as users compile it, with so many bytes beside its start's."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-c", CHILD, where, str(room), str(workdir), TOO_LARGE],
        env={**environment, "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts there")
@pytest.mark.rotated("processes")
def test_a_state_that_does_not_fit_into_memory_is_trained(tmp_path):
    """Under a limit that the run in memory needs more than, the one on disk has its numbers up to
    rounding, saving included."""
    room = 1900 << 20
    free, limited = child("none", 0, tmp_path / "free"), child("disk", room, tmp_path / "disk")
    assert free.returncode == 0, free.stderr[-2000:]
    assert limited.returncode == 0, limited.stderr[-2000:]
    one, other = (json.loads(x.stdout.splitlines()[-1]) for x in (free, limited))
    assert one["most"] > room > other["most"]
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-6)
    assert other["arrays"].keys() == one["arrays"].keys()
    assert len(one["arrays"]) == 50  # 16 parameters, two moments of each, two counts
    for name, (norm, weighted) in one["arrays"].items():
        found = np.array(other["arrays"][name])
        assert norm > 0
        np.testing.assert_array_less(np.abs(found - (norm, weighted)), 1e-6 * norm, err_msg=name)
