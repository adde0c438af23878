"""A whole run multiplied out, and plans beside each other: machines times layouts."""

import json
import os
import types

import jax
import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from jaxtrain import load_config, plan
from jaxtrain.analysis.planning.machines.targets import target_config
from jaxtrain.analysis.planning.whole_run import project_run
from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.config.swept import combinations
from jaxtrain.parallel.chips import CHIPS
from jaxtrain.parallel.devices import other_gpu_memory, take_gpu_memory

SMALL = ["-b", "GPT.num_layers=2", "-b", "Train.steps=1000"]


def test_a_run_is_its_steps_multiplied_out():
    found = project_run(
        step_seconds=36.0, devices=8, per_step=1_000_000, steps=2400, price=2.5, watts=700
    )
    assert found.examples == 2_400_000_000
    assert found.days == pytest.approx(1)  # 2400 x 36 s
    assert found.device_hours == pytest.approx(8 * 24)
    assert found.dollars == pytest.approx(8 * 24 * 2.5)
    assert found.kilowatt_hours == pytest.approx(8 * 24 * 0.7)


def test_tokens_in_place_of_steps_end_with_a_whole_step():
    found = project_run(step_seconds=1.0, devices=1, per_step=1000, steps=5, examples=2001.0)
    assert (found.steps, found.examples) == (3, 3000)
    assert found.dollars is None
    assert found.kilowatt_hours is None


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["price", "tokens", "network"])
def test_an_amount_that_is_none_is_refused_before_anything_is_planned(name, wrong):
    with pytest.raises(UserError, match=f"--{name}="):
        plan(load_config("gpt2_124m"), "h100:1x8", compile=False, **{name: wrong})


def test_a_network_of_one_s_own_slows_what_crosses_it():
    config = load_config("llama_8b", ["Llama.num_layers=2"])
    fast = plan(config, "h100:8x8", compile=False)
    slow = plan(config, "h100:8x8", compile=False, network=100.0)
    assert slow.time.by_axis["fsdp"] == pytest.approx(
        fast.time.by_axis["fsdp"] * min(450, 8 * 50) / (8 * 100 / 8)
    )
    assert slow.time.compute == fast.time.compute


def test_one_plan_says_what_the_run_takes(tmp_path, capsys):
    file = tmp_path / "plan.json"
    words = ["plan", "gpt2_124m", *SMALL, "--target", "h100:1x8", "--no-compile", "--price", "3"]
    assert main([*words, "--tokens", "1e9", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    seconds, run = found["step_seconds"], found["run"]
    batch = 480 * 1024
    assert run["steps"] == -(-1_000_000_000 // batch)
    assert run["examples"] == run["steps"] * batch
    assert run["days"] == pytest.approx(run["steps"] * seconds / 86_400)
    assert run["dollars"] == pytest.approx(3 * 8 * 24 * run["days"])
    assert run["kilowatt_hours"] == pytest.approx(0.7 * 8 * 24 * run["days"])
    assert f"The run: {run['steps']:,} steps, " in capsys.readouterr().out


def test_machines_and_layouts_stand_side_by_side(tmp_path, capsys):
    file, picture = tmp_path / "plans.json", tmp_path / "plans.png"
    words = ["plan", "gpt2_124m", *SMALL, "--target", "h100:1x8", "--target", "v5e:2x4"]
    words += ["--no-compile", "-b", "Mesh.tensor=[1, 4, 5]", "--json", str(file)]
    assert main([*words, "--png", str(picture)]) == 0
    plans = json.loads(file.read_text())["plans"]
    asked = [(one["target"], one["values"]["Mesh.tensor"]) for one in plans]
    assert asked == [(name, size) for name in ("h100:1x8", "v5e:2x4") for size in "145"]
    for one in plans:
        if one["values"]["Mesh.tensor"] == "5":
            assert "Mesh.tensor=5" in one["refused"]
            continue
        alone = plan(
            load_config("gpt2_124m", [*SMALL[1::2], f"Mesh.tensor={one['values']['Mesh.tensor']}"]),
            one["target"],
            compile=False,
        )
        assert one["step_seconds"] == alone.time.seconds
        assert one["memory"]["total"] == alone.total
        assert one["mesh"]["tensor"] == int(one["values"]["Mesh.tensor"])
    out = capsys.readouterr().out
    assert out.count("refused") == 2
    assert out.count("fastest") == 1
    fastest = min((one for one in plans if "run" in one), key=lambda one: one["run"]["days"])
    row = next(line for line in out.splitlines() if "fastest" in line)
    assert fastest["target"] in row
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_where_nothing_can_run_the_command_is_refused(capsys):
    words = ["plan", "gpt2_124m", "--no-compile", "--target", "h100:1x8", "--target", "cpu:8"]
    assert main([*words, "-b", "Mesh.tensor=5"]) == 2
    assert capsys.readouterr().out.count("Mesh.tensor=5") >= 2


def test_a_budget_takes_one_machine(capsys):
    words = ["plan", "--budget", "1e21", "--target", "h100:1x8"]
    assert main([*words, "--target", "v5e:2x4", "--price", "2"]) == 2
    assert "leave out a second --target" in capsys.readouterr().err


def test_lists_of_values_become_one_choice_each():
    found = combinations(["A.x = [1, 2]", "B.y = 'z'", "A.w = [(1, 2), 'a,b']"])
    assert [one.values for one in found] == [
        {"A.x": x, "A.w": w} for x in ("1", "2") for w in ("(1, 2)", "'a,b'")
    ]
    assert found[1].bindings == ["B.y = 'z'", "A.x = 1", "A.w = 'a,b'"]
    assert [one.values for one in combinations(["B.y = 1"])] == [{}]
    with pytest.raises(UserError, match="the list is empty"):
        combinations(["A.x = []"])


def test_the_part_of_a_gpu_s_memory_is_what_programs_are_planned_into():
    some = plan(load_config("gpt2_124m", SMALL[1::2]), "h100:1x8", compile=False)
    more = [*SMALL[1::2], "Train.gpu_memory_fraction=0.9375"]
    most = plan(load_config("gpt2_124m", more), "h100:1x8", compile=False)
    sizes = [found.to_json()["hbm_bytes"] for found in (some, most)]
    assert sizes[1] == pytest.approx(sizes[0] * 0.9375 / 0.94, rel=1e-9)
    # The compiler is told of the whole board all the same.
    assert "device_memory_size: 84942979072\n" in target_config(most.target.chip)
    on_tpu = plan(load_config("gpt2_124m", more), "v5e:2x4", compile=False)
    assert on_tpu.to_json()["hbm_bytes"] == CHIPS["v5e"].hbm_bytes
    for wrong in ("0.0", "1.5"):
        with pytest.raises(UserError, match="Train.gpu_memory_fraction"):
            load_config("gpt2_124m", [f"Train.gpu_memory_fraction={wrong}"])


def test_jax_is_told_how_much_of_a_gpu_to_take_or_the_user_that_it_was_too_late(
    monkeypatch, tmp_path
):
    name, former = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, "")
    monkeypatch.setenv(former, "0.5")
    take_gpu_memory(None)  # leaves what the user set
    assert (os.environ[name], os.environ[former]) == ("", "0.5")
    take_gpu_memory(0.94)
    assert os.environ[name] == "0.94"
    assert former not in os.environ  # both at once are an error
    assert "memory_fraction': 0.94" in str(generate_pjrt_gpu_plugin_options())
    del os.environ[name]
    take_gpu_memory(None, tmp_path)
    assert os.environ[name] == "0.9"
    # What NVIDIA's driver lists: the smallest board decides, and one that is not known.
    for number, (model, fraction) in enumerate(
        [("NVIDIA H100 80GB HBM3", "0.94"), ("NVIDIA L4", "0.9"), ("NVIDIA H200", "0.9")]
    ):
        listed = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information"
        listed.parent.mkdir(parents=True)
        listed.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 130\n")
        del os.environ[name]
        take_gpu_memory(None, tmp_path)
        assert os.environ[name] == fraction

    whole = 84_942_979_072
    taken = types.SimpleNamespace(
        device_kind="NVIDIA H100 80GB HBM3",
        memory_stats=lambda: {"bytes_limit": int(0.75 * whole)},
    )
    assert other_gpu_memory(0.75, taken) is None
    assert other_gpu_memory(None, taken) is None
    assert "taken 75% of the GPUs' memory already" in other_gpu_memory(0.94, taken)
    assert other_gpu_memory(0.94, jax.devices()[0]) is None
