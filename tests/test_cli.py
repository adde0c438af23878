"""The command line as a user would try it: files, output, exit statuses and rejections."""

import contextlib
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.__main__ import main
from jaxtrain.config.buckets import to_path
from jaxtrain.run.attempts.folder import run_folder
from jaxtrain.training.settings import load_config

TINY = ["-b", "Train.steps = 4", "-b", "Train.eval_every = 2"]


def start(*arguments: str, **keywords) -> subprocess.Popen:
    """The program in a process of its own, without this one's JAX settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def finish(*arguments: str) -> str:
    """What the program prints in a process of its own, with no devices but those it makes."""
    process = start(*arguments)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return out


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory):
    """A finished run: its folder, what it printed, and its exit.json as it was then."""
    folder = tmp_path_factory.mktemp("cli")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["train", str(tiny_config), *TINY, "-b", "Train.save_every = 2"]) == 0
    workdir = folder / "runs" / "tiny"
    return workdir, out.getvalue(), json.loads((workdir / "exit.json").read_text())


@pytest.fixture
def run(finished):
    """A finished run's folder."""
    return finished[0]


def test_train_prints_what_a_run_shows(finished):
    _, out, exit_file = finished
    for words in (
        "Train.steps = 4",
        "Mesh: data=2 x fsdp=2 x tensor=2 over 8 cpu",
        "Attention: kernel 'blocked', the first choice on a cpu",
        "Device order",
        "logical axes",
        "layers, embed, mlp",
        "bytes per device",
        "step 4/4",
        "tokens/s",
        "eta",
        "unigram entropy",
        "A sample",
        "jaxtrain train",
    ):
        assert words in out, words
    assert "\x1b[" not in out  # plain where it is no terminal
    assert exit_file == {
        "status": "done", "reason": "trained to step 4", "step": 4, "attempt": 1,
    }  # fmt: skip


@pytest.mark.slow  # two runs; tests/test_train.py resumes one in the fast part
def test_the_command_printed_at_the_end_goes_on(finished, tmp_path, capsys, monkeypatch):
    shutil.copytree(finished[0], tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    printed = re.search(r"To continue: .*jaxtrain (train .*)", finished[1])
    assert main(shlex.split(printed.group(1))) == 0
    out = capsys.readouterr().out
    assert re.search(r"Resuming from the checkpoint of step 4\b(.|\n)*\bstep 8/8", out)
    workdir = tmp_path / "runs" / "tiny"
    steps = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 9))
    assert json.loads((workdir / "exit.json").read_text())["attempt"] == 2
    # From the peak of 0.01 to a tenth in three steps, and no second time from the peak.
    assert "The learning rate of step" not in out
    rates = [line["learning_rate"] for line in steps if "loss" in line]
    np.testing.assert_allclose(rates[3:], 1e-3, rtol=1e-6)
    assert rates[0] > rates[1] > rates[2] > rates[3]


def test_another_learning_rate_than_the_checkpoints_is_said_where_a_run_goes_on(run, capsys):
    bindings = ["-b", "Train.steps = 5", "-b", "Optimizer.learning_rate = 0.02"]
    copied = run.with_name("longer")
    shutil.copytree(run, copied)
    assert main(["train", str(copied / "config.gin"), "--workdir", str(copied), *bindings]) == 0
    # Step 5 is the last of 5, and past the last of 4: a tenth of either peak.
    line = (
        "The learning rate of step 5 is 0.002, by the checkpoint's schedule it would be 0.001: "
        "Train.steps = 5 (was 4), Optimizer.learning_rate = 0.02 (was 0.01); "
        "Schedule.decay_steps = 3 keeps the decay as it was"
    )
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.slow  # two more runs; the test before resumes with a changed setting, too
def test_settings_that_are_others_than_the_checkpoints_are_said_where_a_run_goes_on(run, capsys):
    """Some change what the same parameters compute, and no shape of an array tells."""
    copied = run.with_name("otherwise")
    shutil.copytree(run, copied)
    words = ["train", str(copied / "config.gin"), "--workdir", str(copied), "-b", "Train.steps = 5"]
    others = ["-b", "GPT.norm_eps = 0.1", "-b", "AdamW.b1 = 0.5", "-b", "Schedule.decay_steps = 3"]
    assert main([*words, *others]) == 0
    line = (
        "Settings that differ from those of the checkpoint of step 4: Train.steps = 5 (was 4), "
        "GPT.norm_eps = 0.1 (was 1e-05), AdamW.b1 = 0.5 (was 0.9), Schedule.decay_steps = 3 (was 0)"
    )
    assert line in capsys.readouterr().out.splitlines()
    assert main([*words, *others]) == 0  # as they are set now
    assert "Settings that differ from those" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_warm_up_longer_than_the_run_is_said_and_taken(tiny_config, tmp_path, capsys):
    workdir = tmp_path / "run"
    bindings = ["-b", "Train.steps = 2", "-b", "Schedule.warmup_steps = 8"]
    assert main(["train", str(tiny_config), "--workdir", str(workdir), *bindings]) == 0
    line = (
        "Schedule.warmup_steps=8 is more than Train.steps=2: the learning rate grows to 25% of "
        "Optimizer.learning_rate, and the run ends there"
    )
    assert line in capsys.readouterr().out.splitlines()
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    np.testing.assert_allclose(rates, [0.01 / 8, 0.02 / 8], rtol=1e-6)


@pytest.mark.slow
def test_a_run_of_an_imported_model_is_evaluated_and_repeated(
    tiny_config, tmp_path, capsys, monkeypatch
):
    (tmp_path / "model_beside.py").write_text(
        "import dataclasses\nfrom jaxtrain.config import configurable\n"
        "from jaxtrain.models.transformers.gpt import GPT\n"
        "@configurable\n@dataclasses.dataclass(frozen=True, kw_only=True)\nclass MyGPT(GPT): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config, workdir = tmp_path / "my.gin", tmp_path / "run"
    config.write_text("import model_beside\n" + tiny_config.read_text().replace("GPT", "MyGPT"))
    arguments = ["train", str(config), "--workdir", str(workdir), *TINY]
    assert main([*arguments, "--allow-imports"]) == 0
    printed = re.search(r"To continue: .*jaxtrain (train .*)", capsys.readouterr().out)
    assert "--allow-imports" in shlex.split(printed.group(1))
    # Here the model is known by now: only a process of its own needs what the file imports.
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "8"}
    process = start("eval", "--workdir", str(workdir), "--allow-imports", env=environment)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(out)["step"] == 4
    capsys.readouterr()
    assert main(["eval", "--workdir", str(workdir)]) == 2
    assert "config.gin:1: import model_beside: a config does not run" in capsys.readouterr().err


def test_a_finished_run_says_so(run, tiny_config, capsys):
    assert main(["train", str(tiny_config), "--workdir", str(run), *TINY]) == 0
    assert "trained to step 4 already; raise Train.steps" in capsys.readouterr().out
    arguments = ["train", str(tiny_config), "--workdir", str(run), *TINY, "-b", "Train.steps = 2"]
    assert main(arguments) == 0
    assert "-b 'Train.steps = 8'" in capsys.readouterr().out  # not twice the 2, which are done


def test_a_finished_run_that_is_too_short_to_profile_stays_as_it_is(run, tiny_config, capsys):
    before = {path: path.read_bytes() for path in run.glob("*.*")}
    arguments = ["train", str(tiny_config), "--workdir", str(run), *TINY]
    assert main([*arguments, "-b", "Train.steps = 6", "--profile"]) == 2
    assert "2 are left of Train.steps=6; use Train.steps=10" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.glob("*.*")} == before


def last_evaluation(run):
    """The last line of metrics.jsonl, without the account of the time."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: last[name] for name in ("step", "eval_loss", "eval_perplexity")}


def test_eval_prints_one_json_line_equal_to_the_run_s(run, capsys):
    assert main(["eval", "--workdir", str(run)]) == 0
    out = capsys.readouterr().out
    values = json.loads(out)
    assert out.count("\n") == 1
    assert values == last_evaluation(run)


def test_eval_says_nothing_of_the_run_s_own_data(run, capsys):
    bindings = ["-b", "Train.eval_batches = 1", "-b", "Schedule.warmup_steps = 100"]
    assert main(["eval", "--workdir", str(run), *bindings]) == 0  # which trains no step
    assert capsys.readouterr().err == ""


def test_a_step_s_checkpoint_is_evaluated_sampled_and_inspected(finished, capsys):
    folder = finished[0]
    run = ["--workdir", str(folder)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    for step in (2, 4):
        assert main(["eval", *run, "--step", str(step)]) == 0
        values = json.loads(capsys.readouterr().out)
        assert (values["step"], values["eval_loss"]) == (step, losses[step])
    assert losses[2] != losses[4]
    assert main(["inspect", *run, "--step", "2"]) == 0
    assert "Checkpoint of step 2 in" in capsys.readouterr().out
    samples = set()
    for step in ("2", "4"):
        words = ["--prompt", "def", "--max-new-tokens", "9", "--step", step, "--log-probabilities"]
        assert main(["generate", *run, *words]) == 0
        samples.add(capsys.readouterr().out)
    assert len(samples) == 2
    for command in (["eval"], ["inspect"], ["generate", "--prompt", "x"]):
        assert main([*command, *run, "--step", "5"]) == 2
        told = f"no checkpoint of step 5 in {folder}/checkpoints; there are 2, 4; the nearest "
        assert capsys.readouterr().err == f"jaxtrain: {told}is 4\n"


@pytest.mark.slow  # a run of its own; a step's checkpoint is evaluated in the fast part
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_eval_of_a_diverged_run_is_json_like_the_run_s_own_line(tiny_config, tmp_path, capsys):
    diverged = ["Train.steps = 1", "Optimizer.name = 'sgd'", "Optimizer.learning_rate = 3000.0",
                "Optimizer.clip_norm = None", "Schedule.warmup_steps = 0"]  # fmt: skip
    words = [word for binding in diverged for word in ("-b", binding)]
    assert main(["train", str(tiny_config), "--workdir", str(tmp_path), *words]) == 0
    capsys.readouterr()
    assert main(["eval", "--workdir", str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert values["eval_loss"] > 1000
    assert values["eval_perplexity"] is None
    assert values == last_evaluation(tmp_path)


def test_eval_takes_other_text(run, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("sum = x + y\n" * 400)
    binding = f"TextData.source = {str(other)!r}"
    assert main(["eval", "--workdir", str(run), "-b", binding]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == printed.err.count("\n") == 1
    assert "differ from those that the run was trained on: TextData.source was " in printed.err
    assert printed.err.endswith(f", is {str(other)!r}\n")
    values = json.loads(printed.out)
    assert values["step"] == 4
    assert values.keys() == last_evaluation(run).keys()
    assert values["eval_loss"] != last_evaluation(run)["eval_loss"]


@pytest.mark.slow
def test_a_run_on_simulated_devices_is_read_in_processes_of_their_own(tiny_config, tmp_path):
    mesh = ["-b", "Mesh.data = 1", "-b", "Mesh.tensor = 1", "-b", "Train.steps = 1"]
    run = ["--workdir", str(tmp_path / "run")]
    finish("train", str(tiny_config), "--simulate-devices", "2", *mesh, *run)
    values = json.loads(finish("eval", *run))
    assert values == last_evaluation(tmp_path / "run")
    assert finish("generate", *run, "--prompt", "x", "--max-new-tokens", "2").startswith("x")


def test_a_workdir_at_home_is_found(run, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    assert run_folder("tiny", f"~/{run.name}") == to_path(Path("~", run.name)) == run
    assert to_path("a/~") == Path("a/~")
    assert main(["inspect", f"--workdir=~/{run.name}"]) == 0
    assert f"{run}/checkpoints/4" in capsys.readouterr().out.replace("\n", "")


def test_generate_reads_no_text(run, tmp_path, capsys):
    binding = f"TextData.source = {str(tmp_path / 'gone')!r}"
    arguments = ["--workdir", str(run), "--prompt", "x", "--max-new-tokens", "2", "-b", binding]
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out.startswith("x")


def test_generate_prints_the_prompt_and_what_follows(run, capsys):
    arguments = ["generate", "--workdir", str(run), "--prompt", "return", "--max-new-tokens", "8"]
    assert main([*arguments, "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("return")
    assert main([*arguments, "--temperature", "0", "--top-k", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


def test_a_sample_s_control_characters_do_not_reach_a_terminal(run, capsys, monkeypatch):
    prompt = "\x1b[2Jdef\r\tx\n\x9b"
    arguments = ["generate", "--workdir", str(run), "--prompt", prompt, "--max-new-tokens", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(prompt)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("\\x1b[2Jdef\\r\tx\n\\x9b")


def test_another_size_is_named_and_not_its_arrays(run, tiny_config, capsys):
    for changed, line in (
        ("GPT.num_layers = 3", "GPT.num_layers = 2 when it was written, 3 in this"),
        ("Optimizer.name = 'sgd'", "Optimizer.name = 'adamw' when it was written,"),
    ):
        arguments = ["-b", changed, "-b", "Train.log_every = 3"]
        assert main(["eval", "--workdir", str(run), *arguments]) == 2
        # Before it stands what is left of the other optimizer's settings.
        head, *lines = capsys.readouterr().err.split("jaxtrain: ")[1].splitlines()
        assert "leaves differ); use " in head
        assert len(lines) == 1
        assert line in lines[0]


def test_inspect_shows_what_a_checkpoint_holds(run, capsys):
    assert main(["inspect", "--workdir", str(run)]) == 0
    out = capsys.readouterr().out
    words = [
        "Checkpoint of step 4",
        "jax ",
        "GPT.num_layers = 2",
        "params/layers/up",
        "2 x 32 x 128",
    ]
    assert [word for word in words if word not in out] == []


def test_inspect_verify_finds_a_flipped_bit(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["inspect", "--workdir", str(copy), "--verify"]) == 0
    assert "Verified: every array" in capsys.readouterr().out
    # Some bytes of a checkpoint's files belong to no array: one of the largest files has one that
    # does in its middle.
    files = sorted(copy.glob("checkpoints/4/state/**/d/*"), key=lambda path: -path.stat().st_size)
    for data in files[:4]:
        content = data.read_bytes()
        middle = len(content) // 2
        data.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        if main(["inspect", "--workdir", str(copy), "--verify"]) == 1:
            break
        data.write_bytes(content)
    else:
        pytest.fail("no flipped bit was found")
    assert "step 4" in capsys.readouterr().err


def test_doctor_prints_versions_devices_and_extras(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(
        word in out
        for word in ("jaxtrain", "optax", "8 cpu", "One process", "cuda13", "tpu", "gguf")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "gpt_quikstart"], "did you mean 'gpt_quickstart'?"),
        (["train", "CONFIG", "--profile", "-b", "Train.steps = 2"], "use Train.steps=6 or more"),
        (["train", "~nobody-here/tiny.gin"], "no home folder of '~nobody-here'"),
        (["train", "CONFIG", "-b", "GPT.num_layer = 2"], "did you mean 'num_layers'?"),
        (["train", "CONFIG", "-b", "Mesh.fsdp = 3"], "the product 12 does not equal the 8 devices"),
        (["train", "CONFIG", "-b", "TextData.source = '/nowhere/x.txt'"], "no such file"),
        (["train", "CONFIG", "-b", "Llama.num_layers = 2"], "nothing in this configuration uses"),
        (["train", "CONFIG", "--workdir", ""], "--workdir is empty; give a name, or leave it out"),
        (["train", "", "--workdir", "RUNN"], "CONFIG is empty; give a name, or leave it out"),
        (["eval", "--workdir", "RUNN"], "no run there"),
        (["generate", "--workdir", "RUN", "--prompt", ""], "--prompt is empty"),
        (["generate", "--workdir", "RUN", "--prompt", "x", "--top-p", "2"], "--top-p 2.0"),
        (
            ["generate", "--workdir", "RUN", "--prompt", "x", "--seed", str(2**32)],
            "0 to 4294967295",
        ),
        (["generate", "--workdir", "RUN", "--prompt", "x", "--seed", "-1"], "--seed -1: use 0 to"),
        (
            ["generate", "--workdir", "RUN", "--prompt", "x\udcff"],
            "is not UTF-8 text (character 1)",
        ),
        (["train", "CONFIG", "-b", f"Train.seed = {2**32}"], "use at most 4294967295"),
        (
            ["train", "CONFIG", "-b", f"Train.steps = {2**31}"],
            "Train.steps=2147483648; use at",
        ),
        (["train", "CONFIG", "-b", "Train.start_from = '/nowhere'"], "no run with a complete"),
        (["train", "CONFIG", "-b", f"GPT.num_layers = {10**9}"], "TiB per device, and no device"),
        (["plan", "CONFIG", "--target", "cpu:8", "-b", "Mesh.fsdp = 15"], "of a CPU by --simulate"),
        (["train", "CONFIG", "-b", "Train.model = @Train()"], "@Train() would contain itself"),
        (["train", "CONFIG", "--workdir", "RUN/x\udcff"], "x\\udcff' is not UTF-8"),
        (["inspect", "--workdir", "RUNN"], "no run there"),
        (["train", "CONFIG", "--workdir", "CONFIG"], "Not a directory"),
        (["train", "CONFIG", "--workdir", "CONFIG/run"], "use a folder that can be made"),
        (["train", "CONFIG", "--workdir", "RUN/" + 300 * "x"], "File name too long"),
        (["supervise", "--", "train", "CONFIG", "--workdir", "CONFIG"], "Not a directory"),
        (["eval", "--workdir", "CONFIG"], "no run there"),
        (["train", "CONFIG", "--workdir", "BLOCKED"], "Not a directory"),
        (["eval", "--workdir", "BLOCKED"], "Not a directory"),
        (["inspect", "--workdir", "BLOCKED"], "use a run's folder that can be read"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(arguments, words, run, tiny_config, tmp_path, capsys):
    blocked = tmp_path / "blocked"  # a file where the checkpoints should be
    blocked.mkdir()
    shutil.copy(run / "config.gin", blocked)
    (blocked / "checkpoints").touch()
    names = {"CONFIG": tiny_config, "RUNN": f"{run}n", "RUN": run, "BLOCKED": blocked}
    for name, value in names.items():
        arguments = [re.sub(rf"^{name}(?=/|$)", str(value), argument) for argument in arguments]
    if arguments[0] == "train" and "--workdir" not in arguments:
        arguments += ["--workdir", str(tmp_path / "new")]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("jaxtrain: ")
    assert "Traceback" not in captured.err
    assert not (tmp_path / "new").exists()  # nothing half written


def test_errors_of_reading_are_said_together_and_then_those_of_the_whole(
    tiny_config, tmp_path, capsys
):
    """Each is found by another part: names, types, a section itself; the batch, data and layers."""
    unread = {
        "Train.stepss = 1": "Train has no setting 'stepss'",
        "Remat.policy = 1": "Remat.policy = 1 is an int",
        "GPT.num_heads = 3": "GPT.embed_dim=32 does not divide by GPT.num_heads=3",
    }
    wrong = {
        "Train.global_batch_size = 30": "Train.global_batch_size=30 does not divide over the 4",
        "TextData.sequence_length = 64": "TextData.sequence_length=64 is longer than GPT.context_",
        "Scan.layers_per_iteration = 3": "Scan.layers_per_iteration=3 does not divide GPT.num_la",
    }
    arguments = ["train", str(tiny_config), "--workdir", str(tmp_path / "new")]
    for given, expected in (({**unread, **wrong}, unread), (wrong, wrong)):
        assert main([*arguments, *(word for one in given for word in ("-b", one))]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(expected)
        for words in expected.values():
            assert sum(words in line for line in lines) == 1, words
    assert not (tmp_path / "new").exists()


def test_an_unknown_command_exits_with_2():
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2


def test_the_second_interrupt_stops_at_once_and_says_so(tiny_config, tmp_path):
    run = ["--workdir", str(tmp_path), "--simulate-devices", "8"]
    process = start("train", str(tiny_config), *run)
    for line in process.stdout:
        if line.startswith("State per device"):
            break
    process.send_signal(signal.SIGINT)  # into the compilation
    answer = "jaxtrain: stopping after this step and saving; press Ctrl-C again to stop without"
    for line in process.stderr:
        if line.startswith(answer):
            break
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    assert process.wait(60) == 1
    told = "stopped by a second Ctrl-C before the first step, without saving"
    assert errors == f"jaxtrain: {told}\n"
    saved = json.loads((tmp_path / "exit.json").read_text())
    assert saved == {"status": "failed", "reason": told, "step": 0, "attempt": 1}


def test_an_interrupt_outside_a_run_is_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxtrain.analysis.commands.show_doctor", interrupted)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "jaxtrain: interrupted by Ctrl-C\n"


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_saves_and_says_so(tiny_config, tmp_path):
    process = start("train", str(tiny_config), "--workdir", str(tmp_path), "--simulate-devices",
                    "8", "-b", "Train.steps = 100000", "-b", "Train.log_every = 1")  # fmt: skip
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 1
    saved = json.loads((tmp_path / "exit.json").read_text())
    assert saved["status"] == "failed"
    assert saved["step"] >= 3
    told = f"stopped by closed standard output after saving step {saved['step']}"
    assert saved["reason"] == told
    assert (tmp_path / "checkpoints" / str(saved["step"])).is_dir()
    assert errors.endswith(f"jaxtrain: {told}; run the same command again to resume\n")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_exits_with_75(tiny_config, tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "train", str(tiny_config), "--workdir", str(tmp_path),
         "--simulate-devices", "8", "-b", "Train.steps = 100000", "-b", "Train.log_every = 1"],
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    printed = b""
    # Any step but the first: a live line does not show each of them.
    while not re.search(rb"step ([2-9]|\d\d+)/", printed):
        printed += os.read(ours, 4096)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 75, printed.decode()
    saved = json.loads((tmp_path / "exit.json").read_text())
    assert saved["status"] == "preempted"
    assert (tmp_path / "checkpoints" / str(saved["step"])).is_dir()


def test_another_command_ends_with_1_where_nobody_reads_it(run):
    process = start("inspect", "--workdir", str(run))
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 1
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


@pytest.mark.slow  # starts Python twice; test_train.py preempts and resumes in this process
def test_a_signal_saves_exits_with_75_and_the_same_command_goes_on(tiny_config, tmp_path):
    arguments = ["train", str(tiny_config), "--workdir", str(tmp_path), "--simulate-devices", "8",
                 "-b", "Train.steps = 100000", "-b", "Train.log_every = 1"]  # fmt: skip
    process = start(*arguments)
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(60) == 75, process.stderr.read()
    saved = json.loads((tmp_path / "exit.json").read_text())
    assert saved["status"] == "preempted"
    assert "SIGTERM" in saved["reason"]
    assert (tmp_path / "checkpoints" / str(saved["step"])).is_dir()
    again = start(*arguments)
    for line in again.stdout:
        if "Resuming from" in line:
            assert f"step {saved['step']}" in line
            break
    else:
        pytest.fail(again.stderr.read())
    again.kill()
    again.wait()


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["gpt_quickstart"], True),
        ([], True),
        (["gpt_quickstart", "--simulate-devices", "8"], False),
        (["gpt_quickstart", "-b", "Mesh.simulated_devices = 8"], False),
        (["gpt_quickstart", "--coordinator", "localhost:1", "--num-processes", "2",
          "--process-id", "0"], False),
        (["lstm_quickstart"], False),
    ],
)  # fmt: skip
def test_the_quickstart_by_name_chooses_its_devices_as_without_a_name(words, chosen, capsys):
    assert main(["train", *words, "-b", "Train.stepss = 1"]) == 2
    said = "No accelerator here: simulating 8 devices on the CPU"
    assert (said in capsys.readouterr().out) == chosen


@pytest.mark.slow
def test_without_a_config_it_trains_the_quickstart_on_simulated_devices(tmp_path):
    bindings = ["Train.steps = 2", "Schedule.warmup_steps = 1", "Train.eval_batches = 1",
                "GPT.num_layers = 1", "TextData.source = 'tiny.txt'"]  # fmt: skip
    (tmp_path / "tiny.txt").write_text("import this\n" * 2000)
    words = [word for binding in bindings for word in ("-b", binding)]
    environment = {key: value for key, value in os.environ.items() if "XLA" not in key}
    process = start("train", *words, cwd=tmp_path, env=environment)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "simulating 8 devices" in out
    assert "fsdp=4 x tensor=2 over 8 cpu" in out
    saved = load_config(tmp_path / "runs" / "gpt_quickstart" / "config.gin")
    assert saved.mesh.simulated_devices == 8
    assert time.time() - (tmp_path / "runs/gpt_quickstart/loss.png").stat().st_mtime < 300
