"""The warm standby interpreter: what it runs, what it holds, and when it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from survival import TINY, metrics_of, state_of

from jaxtrain.run.attempts import standby
from jaxtrain.run.attempts.standby import PROGRAM, Reserve, Standby
from jaxtrain.run.attempts.supervise import Child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
def waiting():
    """A standby; ended after the test."""
    one = Standby()
    yield one
    one.process.kill()
    one.process.wait()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
    return value


# The case that is left ends with an error, which is the harder one.
@pytest.mark.slow_cases("words0", "words2")
@pytest.mark.parametrize("words", [["configs"], ["train", "no_such_config"], ["--version"]])
def test_it_runs_a_command_as_a_fresh_process_does(words, capfd, tmp_path, monkeypatch):
    fresh = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=False)
    waiting = Standby()
    monkeypatch.chdir(tmp_path)
    child = Child([*PROGRAM, *words], beat_seconds=1, grace_seconds=1, standby=waiting)
    status = wait_for(lambda: (child.status(),) if child.status() is not None else None)[0]
    assert child.pid == waiting.process.pid
    assert (status, *capfd.readouterr()) == (fresh.returncode, fresh.stdout, fresh.stderr)
    child.close()


def test_it_ends_with_the_supervisor(waiting):
    waiting.line.close()
    assert waiting.process.wait(60) == 0


def test_it_holds_no_device_lock_or_port(waiting):
    code = (
        "import importlib\n"
        "import jax\n"
        "from jaxtrain.run.attempts import standby\n"
        "for name in standby._MODULES:\n"
        "    importlib.import_module(name)\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # an error once a backend is there
        "print(jax.config.jax_num_cpu_devices)\n"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "3\n"
    folder = Path(f"/proc/{waiting.process.pid}")
    wait_for(lambda: "jaxlib" in (folder / "maps").read_text())
    held = [os.readlink(one) for one in (folder / "fd").iterdir()]
    assert len([one for one in held if one.startswith("socket")]) == 1
    assert not [one for one in held if "lock" in one or "nvidia" in one]


def test_a_dead_one_or_one_of_another_environment_is_not_taken(monkeypatch):
    reserve = Reserve(PROGRAM)
    assert reserve.take() is None
    reserve.prepare()
    kept = reserve._standby
    kept.process.kill()
    kept.process.wait()
    assert reserve.take() is None
    reserve.prepare()
    other = reserve._standby
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=elsewhere")
    assert reserve.take() is None
    assert other.process.returncode == -signal.SIGKILL
    reserve.prepare()
    updated = reserve._standby
    monkeypatch.setattr(standby, "_versions", lambda: "another")
    assert reserve.take() is None
    assert updated.process.returncode == -signal.SIGKILL


def test_one_is_kept_for_this_program_alone_and_only_one():
    reserve = Reserve([sys.executable, "-c", "pass"])
    reserve.prepare()
    assert reserve.take() is None
    reserve = Reserve([*PROGRAM, "train"])
    reserve.prepare()
    first = reserve._standby
    reserve.prepare()
    assert reserve.take() is first
    first.close()
    reserve.close()
    assert first.process.returncode is not None


# -- whole runs ------------------------------------------------------------------------------------

BINDINGS = ["Train.steps = 500", "Train.save_every = 50", "Train.eval_every = 250"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standby")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number:02}.txt").write_text(f"document {number} " * 40)
    (folder / "tiny.gin").write_text(TINY.format(text=str(folder / "text")))
    return folder / "tiny.gin"


def words_of(config, workdir):
    words = ["train", str(config), "--workdir", str(workdir), "--simulate-devices", "4"]
    return words + [word for one in BINDINGS for word in ("-b", one)]


class Supervised:
    """A run under `jaxtrain supervise`, with the processes that the supervisor has started."""

    def __init__(self, config, workdir):
        self.workdir = workdir
        words = [*PROGRAM, "supervise", "--stall-seconds", "10", "--"]
        self.popen = subprocess.Popen([*words, *words_of(config, workdir)])

    def standby(self):
        """Waits for the pid of the standby that waits now."""

        def find():
            for pid in self.children():
                named = standby.__name__ in Path(f"/proc/{pid}/cmdline").read_text()
                if named and pid != self.attempt()["pid"]:
                    return pid
            return None

        return wait_for(find, 120)

    def children(self):
        listed = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text()
        return [int(word) for word in listed.split()]

    def attempt(self):
        files = (self.workdir / "attempts").glob("[0-9]*.json")
        return json.loads(max(files, key=lambda file: int(file.stem)).read_text())

    def kill_attempt(self):
        """Kills the attempt that runs; returns the next one, as soon as it has its number."""
        old = self.attempt()
        os.kill(old["pid"], signal.SIGKILL)
        return wait_for(lambda: (new := self.attempt())["attempt"] > old["attempt"] and new, 120)


@pytest.mark.slow
@pytest.mark.rotated("processes")
def test_a_killed_attempt_restarts_through_it_and_ends_as_if_never_killed(config, tmp_path):
    subprocess.run([*PROGRAM, *words_of(config, tmp_path / "unharmed")], check=True)
    run = Supervised(config, tmp_path / "run")
    try:
        ready = run.standby()
        assert run.kill_attempt()["pid"] == ready
        os.kill(run.standby(), signal.SIGKILL)
        killed = run.attempt()["pid"]
        assert run.kill_attempt()["pid"] not in (ready, killed)
        assert run.popen.wait(240) == 0
    finally:
        run.popen.kill()
        run.popen.wait()
    assert state_of(tmp_path / "run") == state_of(tmp_path / "unharmed")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "unharmed")


@pytest.mark.slow
def test_a_killed_supervisor_leaves_none(config, tmp_path):
    run = Supervised(config, tmp_path / "run")
    ready = Path(f"/proc/{run.standby()}")
    attempt = Path(f"/proc/{run.attempt()['pid']}")
    assert ready.exists()
    assert attempt.exists()
    run.popen.kill()
    run.popen.wait()
    wait_for(lambda: not ready.exists())
    wait_for(lambda: not attempt.exists(), 120)
