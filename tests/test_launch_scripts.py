"""tpu_scripts/*.sh against a stand-in for gcloud: what they run, say, and leave behind."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tpu_scripts"
COMMANDS = ["create", "setup", "run", "watch", "fetch", "delete"]
USER = {
    "TPU_NAME": "my-tpu",
    "ZONE": "us-west4-a",
    "PROJECT": "my-project",
    "ACCELERATOR_TYPE": "v5litepod-8",
    "BUCKET": "gs://my-bucket/",
    "POLL_SECONDS": "0",
}
TRAIN = [
    "--",
    "train",
    "gpt2_124m",
    "-b",
    "Train.data = @TextData()",
    "-b",
    "TextData.source='a b'",
]
TOOLS = "bash cat dirname env grep gzip head mkdir mktemp rm sed sleep tail tar tr".split()


@dataclasses.dataclass
class Shell:
    """Runs scripts with nothing but the tools they name and the stand-in on PATH."""

    folder: Path

    def __post_init__(self) -> None:
        self.record = self.folder / "record.jsonl"
        self.answers = self.folder / "answers.json"
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        gcloud = self.bin / "gcloud"
        stand_in = ROOT / "tests" / "gcloud_stand_in.py"
        gcloud.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{stand_in}" "$@"\n')
        gcloud.chmod(0o755)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        places = {"PATH": str(self.bin), "TMPDIR": str(self.folder), "HOME": str(self.folder)}
        record = {"GCLOUD_RECORD": str(self.record), "GCLOUD_ANSWERS": str(self.answers)}
        return places | record | USER | dict(more or {})

    def __call__(self, *words, answers=None, stdin="", **more) -> subprocess.CompletedProcess:
        """Runs `NAME.sh WORDS`, or a shell text where the first word has blanks."""
        self.record.write_text("")
        self.answers.write_text(json.dumps(answers or {}))
        script = SCRIPTS / f"{words[0]}.sh"
        command = [script, *words[1:]] if words[0] in COMMANDS else ["bash", "-euc", words[0]]
        return subprocess.run(
            command,
            input=stdin,
            cwd=self.folder,
            env={k: v for k, v in self.environment(more).items() if v is not None},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def verbs(self) -> list[str]:
        """The calls in a word or two, `create` or `ssh install`."""
        found = []
        for call in self.calls():
            told = re.search(r"worker\.sh (\w+)|(flock)", " ".join(call))
            verb = call[1] if call[0] == "storage" else call[3]
            found.append(f"{verb} {told[1] or 'look'}" if told and verb == "ssh" else verb)
        return found


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


# -- the scripts as texts --------------------------------------------------------------------------


def test_the_scripts_are_short_and_strict():
    for script in SCRIPTS.iterdir():
        lines = script.read_text().splitlines()
        if script.suffix == ".sh" and script.stem != "common":
            assert "set -euo pipefail" in lines, script.name
            assert os.access(script, os.X_OK), script.name
            assert len(lines) <= 110, script.name
    assert {script.stem for script in SCRIPTS.glob("*.sh")} == {*COMMANDS, "common", "worker"}


@pytest.mark.skipif(
    shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None,
    reason="shellcheck reads the scripts: pip install 'jaxtrain[dev]'",
)
def test_shellcheck_has_nothing_to_say():
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    scripts = [*SCRIPTS.glob("*.sh"), SCRIPTS / "slurm.sbatch"]
    done = subprocess.run(
        [shutil.which("shellcheck", path=path), "-x", *scripts],
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


# -- dry runs --------------------------------------------------------------------------------------

SEEN_THROUGH = {
    "tpu-vm describe": ["preempted", "ready"],
    "queued-resources describe": ["suspended", "active"],
    "flock": ["none runs"],
    "storage cat": ["run done"],
}


@pytest.mark.parametrize(
    ("words", "answers", "calls"),
    [
        (["create"], {}, 1),
        (["create", "--spot"], {}, 1),
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
        (["watch", *TRAIN], SEEN_THROUGH, 10),
        (["watch", "--spot", "--slices", "2", "--delete", *TRAIN], SEEN_THROUGH, 15),
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
        *"compute tpus queued-resources create my-tpu --zone=us-west4-a".split(),
        *"--project=my-project --accelerator-type=v5litepod-8 --spot --node-count=2".split(),
        *"--node-prefix=my-tpu --runtime-version=v2-alpha-tpuv5-lite".split(),
    ]
    assert len(polls) == 2
    shell("create", ACCELERATOR_TYPE="v4-8", PROJECT="", NETWORK="mine")
    assert shell.calls()[0][4:] == [
        *"my-tpu --zone=us-west4-a --accelerator-type=v4-8 --network=mine".split(),
        "--version=tpu-ubuntu2204-base",
    ]
    shell("create", SPOT="1", QUEUED="0", RUNTIME_VERSION="mine")
    assert shell.calls()[0][2:4] == ["tpu-vm", "create"]
    assert shell.calls()[0][-2:] == ["--spot", "--version=mine"]
    # gcloud hands the command to the worker's shell, which reads the words as they were given.
    shell("run", *TRAIN, RUN="second")
    command = shell.calls()[0][-1].removeprefix("--command=")
    assert shlex.split(command)[2:] == ["start", "my-bucket", "second", *TRAIN[1:]]


def test_a_clone_is_packed_without_what_does_not_belong(shell):
    shell("setup")
    package = shell.calls()[0][4]
    names = subprocess.run(
        ["tar", "-tzf", package], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"pyproject.toml", "jaxtrain/__main__.py", "configs/gpt_quickstart.gin"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_fetched_logs_stand_by_node_and_worker(shell):
    shell("fetch", "--slices", "2")
    logs = sorted(path.relative_to(shell.folder) for path in shell.folder.rglob("*.log"))
    places = [f"runs/my-tpu/logs/my-tpu-{n}/{w}.log" for n in range(2) for w in range(2)]
    assert [str(log) for log in logs] == places


# -- what goes wrong -------------------------------------------------------------------------------


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
    # After a refusal nothing is there.
    answers = {"describe": ["gone"]} if words[0] == "create" else {}
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
        (["run"], {}, "the command stands after --; write for example"),
        (["watch", "--", "eval"], {}, "the command stands after --; write for example"),
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


# -- watching --------------------------------------------------------------------------------------

ANEW = ["delete", "create", "scp", "ssh install", "ssh start"]


def test_a_preempted_run_goes_on_in_the_same_folder(shell):
    answers = {
        "describe": ["ready", "preempted", "creating", "ready", "preempted", "ready"],
        "flock": ["all run", "all run", "some run", "none runs"],
        "storage cat": ["no object", "run preempted", "run done", "run done"],
    }
    done = shell("watch", *TRAIN, answers=answers)
    assert done.returncode == 0, done.stderr
    look = ["describe", "ssh look", "cat"]
    assert shell.verbs() == [
        *look,
        *("describe", *ANEW),
        "describe",  # CREATING
        *look,
        *("describe", *ANEW),
        *look,  # some have ended, exit.json says done: the others are about to
        *look,
        "describe",  # what is left
    ]
    started = [call[-1] for call in shell.calls() if "worker.sh start" in call[-1]]
    assert len(started) == 2
    assert len(set(started)) == 1
    assert "the run in gs://my-bucket/my-tpu is done" in done.stdout
    assert "my-tpu is there (READY) and costs money" in done.stderr


def test_the_first_tpu_may_be_made_by_watching(shell):
    answers = {"describe": ["gone", "ready"], "flock": ["none runs"], "storage cat": ["run done"]}
    done = shell("watch", "--delete", *TRAIN, answers=answers)
    assert done.returncode == 0, done.stderr
    assert shell.verbs()[:5] == ["describe", *ANEW[1:]]
    assert shell.verbs()[-1] == "delete"
    assert done.stderr == ""


def test_a_queued_resource_that_was_suspended_is_queued_again(shell):
    answers = {"describe": ["suspended", "provisioning", "active"], "flock": ["none runs"]}
    done = shell("watch", *TRAIN, answers={**answers, "storage cat": ["run done"]}, SLICES="2")
    assert done.returncode == 0, done.stderr
    calls = shell.calls()
    assert calls[1][2:4] == ["queued-resources", "delete"]
    assert "--force" in calls[1]
    assert "--node-count=2" in calls[2]
    assert shell.verbs().count("ssh start") == 2


def test_retries_in_a_row_are_limited(shell):
    done = shell("watch", "--retries", "2", *TRAIN, answers={"describe": ["preempted"]})
    assert done.returncode == 1
    assert shell.verbs().count("create") == 2
    gave_up, left = done.stderr.splitlines()
    assert "gave up after 2 retries in a row; my-tpu is PREEMPTED" in gave_up
    assert "delete it with: gcloud compute tpus tpu-vm delete my-tpu" in left
    # A run that was seen running again begins a new row.
    answers = {"describe": ["preempted", "ready"] * 3 + ["ready"], "flock": ["all run"] * 3}
    answers["flock"].append("none runs")
    done = shell("watch", "--retries", "1", *TRAIN, answers={**answers, "cat": ["run done"]})
    assert done.returncode == 0, done.stderr
    assert shell.verbs().count("create") == 3


def test_what_waiting_mends_is_tried_again_and_a_mistake_is_not(shell):
    answers = {"create": ["no capacity", "no capacity", "ok"], "flock": ["none runs"]}
    answers |= {"describe": ["preempted", "gone", "gone", "gone", "gone", "ready"]}
    done = shell("watch", *TRAIN, answers={**answers, "cat": ["run done"]})
    assert done.returncode == 0, done.stderr
    assert shell.verbs().count("create") == 3
    assert shell.verbs().count("delete") == 1
    done = shell("watch", *TRAIN, answers={"create": ["quota"], "describe": ["gone"]})
    assert done.returncode == 2
    assert shell.verbs().count("create") == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_failed_run_is_not_repeated(shell):
    answers = {"describe": ["ready"], "flock": ["none runs"], "cat": ["run failed"]}
    done = shell("watch", *TRAIN, answers=answers)
    assert done.returncode == 1
    assert "the loss is nan" in done.stdout
    assert "ssh start" not in shell.verbs()
    # While it runs, what the attempt before left behind does not count.
    done = shell("watch", *TRAIN, answers={**answers, "flock": ["all run", "none runs"]})
    assert shell.verbs().count("ssh look") == 2


def test_workers_that_stopped_are_started_and_silent_ones_waited_for(shell):
    answers = {
        "describe": ["ready"],
        "flock": ["none runs", "some run", "unreachable", "none runs", "none runs"],
        "cat": ["no object", "run preempted", "interrupted", "run done"],
    }
    done = shell("watch", *TRAIN, answers=answers)
    assert done.returncode == 0, done.stderr
    assert shell.verbs().count("ssh install") == 1  # not under those that run
    assert shell.verbs().count("ssh start") == 2
    for why in ("no worker was running", "some workers had stopped", "a worker did not answer",
                "exit.json could not be read"):  # fmt: skip
        assert why in done.stdout


# -- on a worker -----------------------------------------------------------------------------------


def test_a_worker_starts_one_supervisor_that_outlives_the_connection(tmp_path):
    """worker.sh itself, with stand-ins for what it starts."""
    home = tmp_path / "home"
    stubs = {
        "bin/mountpoint": "[ -f mounted ]",
        "bin/gcsfuse": 'echo "$@" >mounted',
        "home/jaxtrain-env/bin/jaxtrain": 'echo "$$ $*"; read -r word <go',
    }
    for name, text in stubs.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    os.mkfifo(home / "go")
    environment = {"HOME": str(home), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    look = "flock -n jaxtrain.lock echo stopped || echo running"
    assert f"'--command={look}'" in (SCRIPTS / "watch.sh").read_text()

    def ssh(command):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            start_new_session=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    start = f"bash {SCRIPTS}/worker.sh start my-bucket first train -b 'Train.steps = 2'"
    assert ssh(look) == "stopped\n"
    assert ssh(start) == ""
    log = home / "jaxtrain.log"
    until = time.monotonic() + 30
    while "supervise" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    pid, _, words = log.read_text().strip().partition(" ")
    try:
        assert words == f"supervise -- train -b Train.steps = 2 --workdir {home}/bucket/first"
        assert (home / "mounted").read_text().split()[-2:] == ["my-bucket", "bucket"]
        assert os.getsid(int(pid)) not in (os.getsid(0), int(pid) + 1)
        assert ssh(look) == "running\n"
        assert "jaxtrain runs already" in ssh(start)
        os.kill(int(pid), signal.SIGHUP)  # as a lost terminal does
        with (home / "go").open("w") as go:
            go.write("on\n")
        while ssh(look) == "running\n":
            assert time.monotonic() < until
    finally:
        if ssh(look) == "running\n":
            os.kill(int(pid), signal.SIGKILL)
    assert len(log.read_text().splitlines()) == 1
