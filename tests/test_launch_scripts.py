"""tpu_scripts/*.sh: what they run, and the one sentence where something is wrong."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch_shell import COMMANDS, SCRIPTS, TRAIN, USER, Shell

from jaxtrain.run.cluster.authentication import RunToken


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


# -- the scripts as texts -------------------------------------------------------------------------


def test_the_scripts_are_short_and_strict():
    for script in SCRIPTS.iterdir():
        lines = script.read_text().splitlines()
        if script.suffix == ".sh" and script.stem != "common":
            assert "set -euo pipefail" in lines, script.name
            assert os.access(script, os.X_OK), script.name
            assert len(lines) <= 110, script.name
    assert {script.stem for script in SCRIPTS.glob("*.sh")} == {*COMMANDS, "common", "worker"}


# pip puts it beside this Python, which need not be on PATH.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(
    SHELLCHECK is None,
    reason="shellcheck reads the scripts: pip install 'jaxtrain[dev]'",
)
def test_shellcheck_has_nothing_to_say():
    scripts = [*SCRIPTS.glob("*.sh"), SCRIPTS / "slurm.sbatch"]
    done = subprocess.run(
        [SHELLCHECK, "-x", *scripts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_nothing_and_names_every_option_and_variable(shell, name):
    nothing = dict.fromkeys(USER)
    done = shell(name, "--help", **nothing)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{name}.sh ")
    text = (SCRIPTS / f"{name}.sh").read_text()
    needed = re.search(r"^need (.*)$", text, re.M)[1].split()
    taken = re.search(r'^options "(.*)" ', text, re.M)[1].split()
    if name == "watch":
        needed = []  # it names create.sh and run.sh
    for word in [*needed, *taken, "--dry-run"]:
        assert word in done.stdout, word


# -- dry runs -------------------------------------------------------------------------------------

SEEN_THROUGH = {
    "tpu-vm describe": ["preempted", "ready"],
    "queued-resources describe": ["suspended", "active"],
    "flock": ["none runs"],
    "storage cat": ["run done"],
}


@pytest.mark.slow_cases(
    "watch -- train gpt2_124m -b Train.data = @TextData() -b TextData.source='a b'-answers14-10"
)
@pytest.mark.parametrize(
    ("words", "answers", "calls"),
    [
        (["create"], {}, 1),
        (["create", "--spot"], {}, 1),
        (["create", "--firewall", "--slices", "2"], {"describe": ["active"]}, 4),
        (["create", "--queued"], {"describe": ["active"]}, 2),
        (["create", "--spot", "--slices", "3"], {"describe": ["active"]}, 2),
        (["setup"], {}, 2),
        (["setup", "--slices", "2"], {}, 4),
        (["setup", "--wheel", "a b.whl"], {}, 2),
        (["run", *TRAIN], {}, 1),
        (["run", "--slices", "3", *TRAIN], {}, 3),
        (["fetch", "--slices", "2"], {}, 3),
        (["delete", "--yes"], {}, 1),
        (["delete", "--yes", "--slices", "2"], {}, 1),
        (["delete", "--yes", "--firewall"], {}, 2),
        (["watch", *TRAIN], SEEN_THROUGH, 10),
        (["watch", "--spot", "--slices", "2", "--delete", *TRAIN], SEEN_THROUGH, 15),
        (["watch", "--firewall", "--delete", *TRAIN], SEEN_THROUGH, 14),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_dry_run_prints_exactly_what_is_run(shell, words, answers, calls):
    (shell.folder / "a b.whl").touch()
    done = shell(*words, answers=answers)
    assert done.returncode == 0, done.stderr
    ran = shell.calls()
    assert len(ran) == calls
    dry = shell(words[0], "--dry-run", *words[1:], answers=answers)
    assert (dry.returncode, dry.stderr) == (0, "")
    assert shell.calls() == []
    # Pasted, the printed lines are the same calls; nothing else is on PATH.
    pasted = shell(dry.stdout, answers=answers)
    assert pasted.returncode == 0, pasted.stderr
    assert shell.calls() == ran


def test_a_dry_run_does_without_gcloud(shell):
    (shell.bin / "gcloud").unlink()
    assert "tpu-vm create my-tpu --zone=us-west4-a" in shell("create", "--dry-run").stdout
    assert "delete" in shell("delete", "--dry-run").stdout


def test_what_is_asked_for_reaches_gcloud(shell):
    shell("create", "--slices", "2", "--spot", answers={"describe": ["provisioning", "active"]})
    create, *polls = shell.calls()
    assert create == [
        *shlex.split("compute tpus queued-resources create my-tpu --zone=us-west4-a"),
        *shlex.split("--project=my-project --accelerator-type=v5litepod-8 --spot --node-count=2"),
        *shlex.split("--node-prefix=my-tpu --runtime-version=v2-alpha-tpuv5-lite"),
    ]
    assert len(polls) == 2
    shell("create", ACCELERATOR_TYPE="v4-8", PROJECT="", NETWORK="mine")
    assert shell.calls()[0][4:] == [
        *shlex.split("my-tpu --zone=us-west4-a --accelerator-type=v4-8 --network=mine"),
        "--version=tpu-ubuntu2204-base",
    ]
    shell("create", SPOT="1", QUEUED="0", RUNTIME_VERSION="mine")
    assert shell.calls()[0][2:4] == ["tpu-vm", "create"]
    assert shell.calls()[0][-2:] == ["--spot", "--version=mine"]
    # gcloud hands the command to the worker's shell, which reads the words as they were given.
    shell("run", *TRAIN, RUN="second")
    command = shell.calls()[0][-1].removeprefix("--command=")
    assert shlex.split(command)[2:] == ["start", "my-bucket", "second", *TRAIN[1:]]


def test_a_firewall_lets_in_the_run_s_own_machines_and_leaves_ssh_to_the_network(shell):
    shell("create", "--firewall", NETWORK="mine")
    own, others, create = shell.calls()
    assert own == [
        *shlex.split("compute firewall-rules create jaxtrain-my-tpu-own --network=mine"),
        *shlex.split("--project=my-project --direction=INGRESS --target-tags=jaxtrain-my-tpu"),
        *shlex.split("--action=ALLOW --rules=all --source-tags=jaxtrain-my-tpu --priority=800"),
    ]
    assert others[3] == "jaxtrain-my-tpu-others"
    assert others[-4:] == shlex.split(
        "--action=DENY --rules=tcp:1-21,tcp:23-65535,udp --source-ranges=0.0.0.0/0 --priority=900"
    )
    assert "--tags=jaxtrain-my-tpu" in create
    # Made by an earlier TPU of this name, and gone before this one is deleted: both are well.
    there = {"firewall-rules create": ["rule there"], "firewall-rules delete": ["no rule"]}
    done = shell("create", "--firewall", answers=there)
    assert (done.returncode, done.stderr, len(shell.calls())) == (0, "", 3)
    done = shell("delete", "--yes", "--firewall", answers=there)
    assert (done.returncode, done.stderr, len(shell.calls())) == (0, "", 2)
    done = shell("create", "--firewall", answers={"firewall-rules": ["no right"]})
    assert (done.returncode, len(shell.calls())) == (1, 1)
    assert "jaxtrain: gcloud failed: ERROR: " in done.stderr
    assert "'compute.firewalls.create' permission" in done.stderr


# -- the token ------------------------------------------------------------------------------------


def test_setup_makes_a_token_once_and_gives_it_to_all_workers_as_a_file(shell):
    done = shell("setup", "--slices", "2")
    kept = shell.folder / ".jaxtrain" / "my-tpu" / "jaxtrain.token"
    token = kept.read_text().strip()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert RunToken({"JAXTRAIN_TOKEN": token}, kept).find() == token.encode()
    copies = [call for call in shell.calls() if "scp" in call]
    assert [str(kept) in call for call in copies] == [True, True]
    said = done.stdout + done.stderr + shell.record.read_text()
    shell("setup")
    assert kept.read_text().strip() == token
    shell("setup", TPU_NAME="another")
    other = shell.folder / ".jaxtrain" / "another" / "jaxtrain.token"
    assert other.read_text().strip() != token
    assert token not in said + shell("setup", "--dry-run").stdout


def test_a_slurm_job_makes_a_token_for_its_tasks_unless_there_is_one(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$JAXTRAIN_TOKEN" >>given\necho "$@" >>words\n')
    srun.chmod(0o755)
    words = ["bash", SCRIPTS / "slurm.sbatch", "train", "llama_1b", "--workdir", "x"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for more in ({}, {}, {"JAXTRAIN_TOKEN": "g" * 40}):
        done = subprocess.run(
            words, env=environment | more, cwd=tmp_path, check=True, capture_output=True
        )
        assert done.stdout + done.stderr == b""
    first, second, given = (tmp_path / "given").read_text().split()
    assert first != second
    assert given == "g" * 40
    for token in (first, second, given):
        assert RunToken({"JAXTRAIN_TOKEN": token}, tmp_path / "token").find() == token.encode()
        assert token not in (tmp_path / "words").read_text()


def test_a_clone_is_packed_without_what_does_not_belong(shell):
    shell("setup")
    package = shell.calls()[0][4]
    names = subprocess.run(
        ["tar", "-tzf", package], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"pyproject.toml", "jaxtrain/__main__.py", "configs/gpt_quickstart.gin"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_setups_at_one_time_do_not_write_one_package(shell):
    """Two clones, or two users of one machine: a worker would get the other's, or half of it."""
    packages = []
    for name in ("one", "another"):
        shell("setup", TPU_NAME=name)
        packages.append(Path(shell.calls()[0][4]))
        assert packages[-1].parent == shell.folder / ".jaxtrain" / name
        assert stat.S_IMODE(packages[-1].parent.stat().st_mode) == 0o700
    assert packages[0] != packages[1]


def test_fetched_logs_stand_by_node_and_worker(shell):
    shell("fetch", "--slices", "2")
    logs = sorted(path.relative_to(shell.folder) for path in shell.folder.rglob("*.log"))
    places = [f"runs/my-tpu/logs/my-tpu-{n}/{w}.log" for n in range(2) for w in range(2)]
    assert [str(log) for log in logs] == places


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "answer", "sentence", "status"),
    [
        (["create"], "name taken", "TPU_NAME=my-tpu is taken in ZONE=us-west4-a", 2),
        (["create"], "wrong zone", "ZONE=us-west4-a does not exist or is not open to this", 2),
        (["create"], "wrong type", "ACCELERATOR_TYPE=v5litepod-8 is not offered in ZONE", 2),
        (["create"], "quota", "'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted, Limit 4", 2),
        (["create", "--queued"], "quota", "no quota for this in ZONE=us-west4-a", 2),
        (["create"], "no capacity", "has no v5litepod-8 to spare now; try later", 1),
        (["create"], "logged out", "You do not currently have an active account", 2),
        (["setup"], "unreachable", "a worker of my-tpu cannot be reached by ssh", 2),
        (["run", *TRAIN], "unreachable", "a worker of my-tpu cannot be reached by ssh", 2),
        (["run", *TRAIN], "taken away", "my-tpu was taken away", 2),
        (["fetch"], "unreachable", "a worker of my-tpu cannot be reached by ssh", 2),
        (["delete", "--yes"], "gone", "there is no TPU called my-tpu in ZONE=us-west4-a", 2),
        (["watch", *TRAIN], "wrong zone", "ZONE=us-west4-a does not exist", 2),
    ],
)
def test_a_refusal_is_one_sentence(shell, words, answer, sentence, status):
    # After a rejection nothing of ours is there; a taken name is somebody's.
    there = {"name taken": "ready", "wrong zone": "wrong zone"}.get(answer, "gone")
    answers = {"describe": [there]} if words[0] == "create" else {}
    done = shell(*words, answers={**answers, "": [answer]})
    assert done.returncode == status, done
    assert sentence in done.stderr
    assert done.stderr.startswith("jaxtrain: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "sentence"),
    [
        (["create"], {"TPU_NAME": None}, "TPU_NAME is not set; write: export TPU_NAME=..."),
        (["setup"], {"ZONE": ""}, "ZONE is not set"),
        (["run", *TRAIN], {"BUCKET": None}, "BUCKET is not set"),
        (["create", "--slices", "two"], {}, "--slices two: a whole number from 1"),
        (["create", "--slices"], {}, "--slices needs a value"),
        (["create", "--cheap"], {}, "--cheap is not an option of create.sh; it takes: --help"),
        (["delete", "--spot"], {}, "--spot is not an option of delete.sh"),
        (["setup", "--wheel", "no.whl"], {}, "--wheel no.whl: there is no such file"),
        (["run"], {}, "the command goes after --; write for example"),
        (["watch", "--", "eval"], {}, "the command goes after --; write for example"),
        (["run", "--", "train", "--workdir=x"], {}, "the run's folder is gs://my-bucket/my-tpu"),
        (["watch", "--retries", "many", *TRAIN], {}, "--retries many: a whole number"),
    ],
)
def test_a_mistake_is_one_sentence_and_calls_nobody(shell, words, variables, sentence):
    done = shell(*words, **variables)
    assert (done.returncode, shell.calls()) == (2, [])
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_machine_without_gcloud_is_told_so(shell, name):
    (shell.bin / "gcloud").unlink()
    done = shell(name, *(TRAIN if name in ("run", "watch") else []))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "jaxtrain: gcloud is not on PATH: install the Google Cloud CLI "
        "(https://cloud.google.com/sdk/docs/install)"
    ]


@pytest.mark.parametrize(
    ("words", "answers", "state"),
    [
        (["create"], {"create": ["interrupted"], "describe": ["creating"]}, "CREATING"),
        (["create"], {"create": ["quota"], "describe": ["preempted"]}, "PREEMPTED"),
        (["create", "--queued"], {"describe": ["waiting_for_resources", "failed"]}, "FAILED"),
        (["create", "--slices", "2"], {"describe": ["provisioning", "suspended"]}, "SUSPENDED"),
    ],
)
def test_what_a_failure_half_way_leaves_is_said_with_its_end(shell, words, answers, state):
    done = shell(*words, answers=answers)
    assert done.returncode in (1, 2)
    sentence, left = done.stderr.splitlines()
    assert "jaxtrain: " in sentence
    assert f"my-tpu is there ({state}) and costs money" in left
    shell(left.partition("delete it with: ")[2])
    deleted = shell.calls()
    shell("delete", "--yes", *words[1:])
    assert shell.calls() == deleted


def test_an_end_that_cannot_be_looked_at_is_said(shell):
    done = shell("create", answers={"create": ["interrupted"], "describe": ["interrupted"]})
    assert "may be there, which gcloud does not tell" in done.stderr


def test_delete_asks(shell):
    for answer in ("", "n\n", "no\n"):
        done = shell("delete", stdin=answer)
        assert (done.returncode, shell.calls()) == (1, [])
        assert "not deleted: my-tpu costs money" in done.stderr
    assert shell("delete", stdin="y\n").returncode == 0
    assert shell.verbs() == ["delete"]
