"""Commands that look and help, without JAX: configs, --version, --completion."""

import argparse
import re
import shutil
import subprocess
import sys

import pytest

from jaxtrain.cli import main, parser
from jaxtrain.config.shipped import configs_folder
from jaxtrain.run.commands.options import SHELLS
from jaxtrain.training.settings import load_config


def printed(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_configs_are_listed_a_line_each_out_of_their_headers(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = sorted(path.stem for path in configs_folder().glob("*.gin"))
    assert [line.split()[0] for line in lines] == names
    told = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert told["gpt2_124m"] == (
        "GPT-2 124M on OpenWebText, with the recipe of nanoGPT; for one GPU of 80 GB or more, or 8 "
        "GPUs or TPU chips of 16 GB or more"
    )
    for name, line in told.items():
        trains, _, hardware = line.partition("; for ")
        assert len(trains) > 20, name
        assert re.search(r"GPU|TPU|CPU", hardware), name
        assert not re.search(r"[(;#]", hardware), name


def test_looking_loads_no_jax():
    code = (
        "import sys; from jaxtrain.cli import main;"
        "assert main(['configs']) == 0; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_version_is_that_of_the_project(capsys):
    project = (configs_folder().parent / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', project, re.M)[1]
    assert printed(capsys, "--version") == f"jaxtrain {version}\n"


def completions(script, *words):
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _jaxtrain; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], check=True, capture_output=True, text=True, cwd="/"
    )
    return done.stdout.split()


def test_bash_completes_commands_options_and_configs(capsys):
    script = printed(capsys, "--completion", "bash")
    assert completions(script, "jaxtrain", "tr") == ["train"]
    assert {"train", "eval", "plan", "doctor"} <= set(completions(script, "jaxtrain", ""))
    assert completions(script, "jaxtrain", "train", "gpt_q") == ["gpt_quickstart"]
    assert completions(script, "jaxtrain", "train", "x.gin", "--work") == ["--workdir"]
    assert completions(script, "jaxtrain", "plan", "--targ") == ["--target"]
    assert completions(script, "jaxtrain", "eval", "gpt_q") == []
    words = ["jaxtrain", "supervise", "--", "train", "--simul"]
    assert completions(script, *words) == ["--simulate-devices"]
    assert "/tmp" in {"/" + one for one in completions(script, "jaxtrain", "train", "tm")}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_option_of_each_command_is_in_the_script(shell, capsys):
    script = printed(capsys, "--completion", shell)
    for command in ("train", "eval", "generate", "inspect", "plan", "verify", "timeline"):
        with pytest.raises(SystemExit):
            parser().parse_args([command, "--help"])
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out))
        case = re.search(rf"^ +{command}\) .*$", script, re.M)[0]
        assert options <= set(re.findall(r"--[a-z][\w-]*", case)), command
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


COMMANDS = next(one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))


@pytest.mark.parametrize("command", COMMANDS.choices)
def test_the_help_of_a_command_starts_with_one_sentence(command, capsys):
    """A capital, one period, the same sentence in the list of commands."""
    description = COMMANDS.choices[command].description
    assert re.fullmatch(r"[A-Z][^.]*(\.[a-z]+[^.]*)*\.", description), description
    [listed] = [one.help for one in COMMANDS._choices_actions if one.dest == command]
    assert listed == description
    text = " ".join(printed(capsys, command, "--help").split())
    if command != "supervise":  # its help has a sentence more, and the exit status
        assert f" {description} " in text
    assert ".." not in text.replace("...", "")


@pytest.mark.parametrize("command", COMMANDS.choices)
def test_each_option_of_a_command_has_a_help_text(command):
    silent = [
        one.option_strings
        for one in COMMANDS.choices[command]._actions
        if one.option_strings and not one.help
    ]
    assert silent == []


def test_the_program_to_go_on_with_is_the_environment_s(tmp_path, monkeypatch):
    from jaxtrain.run.commands.train import _program

    own = tmp_path / ".venv" / "bin" / "jaxtrain"
    own.parent.mkdir(parents=True)
    own.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert _program() == [str(own)]
    monkeypatch.chdir(tmp_path)
    assert _program() == [".venv/bin/jaxtrain"]
    other = tmp_path / "other" / "jaxtrain"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert _program() == [".venv/bin/jaxtrain"]
    monkeypatch.setenv("PATH", str(own.parent))
    assert _program() == ["jaxtrain"]
    own.unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    assert _program() == [sys.executable, "-m", "jaxtrain"]


def test_every_shipped_config_is_found_by_the_listed_name(capsys):
    main(["configs"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(file.stem for file in configs_folder().glob("*.gin"))
    for name in listed:
        assert load_config(name).train.steps > 0
