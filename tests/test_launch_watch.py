"""watch.sh: runs that go on after a preemption; worker.sh: supervisors that outlive their ssh."""

import os
import signal
import subprocess
import time

import pytest
from launch_shell import SCRIPTS, TRAIN, Shell


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


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
    assert started[0].startswith("--command=bash worker.sh start my-bucket my-tpu train gpt2_124m")
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
        "home/jaxtrain-env/bin/jaxtrain": 'echo "$JAXTRAIN_TOKEN" >given\n'
        'echo "$$ $*"; read -r word <go',
    }
    for name, text in stubs.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    os.mkfifo(home / "go")
    (home / "jaxtrain.token").write_text("the-token\n")
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
            timeout=120,
            start_new_session=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    start = f"bash {SCRIPTS}/worker.sh start my-bucket first train -b 'Train.steps = 2'"
    assert ssh(look) == "stopped\n"
    assert ssh(start) == ""
    log = home / "jaxtrain.log"
    until = time.monotonic() + 120
    while "supervise" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    pid, _, words = log.read_text().strip().partition(" ")
    try:
        # By the environment, and on no command line and in no log.
        assert (home / "given").read_text() == "the-token\n"
        assert "the-token" not in log.read_text()
        assert words == "supervise -- train -b Train.steps = 2 --workdir gs://my-bucket/first"
        assert os.getsid(int(pid)) not in (os.getsid(0), int(pid) + 1)
        assert ssh(look) == "running\n"
        assert "jaxtrain runs already" in ssh(start)
        os.kill(int(pid), signal.SIGHUP)  # as a lost terminal does
        # Opened to read as well, so that nobody waits here for a reader that is gone.
        go = os.open(home / "go", os.O_RDWR)
        os.write(go, b"on\n")
        while ssh(look) == "running\n":
            assert time.monotonic() < until
    finally:
        if ssh(look) == "running\n":
            os.kill(int(pid), signal.SIGKILL)
    assert len(log.read_text().splitlines()) == 1
