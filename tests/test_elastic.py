"""Supervisors of an elastic run, one a host: hosts that are lost, leave and come back."""

import contextlib
import json
import os
import signal
import sys
import time

import pytest
from without_jax import WITHOUT_JAX, Process

from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts import records
from jaxtrain.run.attempts.elastic import Elastic, read_layouts
from jaxtrain.run.commands.supervise import main, parse

# A stand-in for `train`: prints its place, and ends as the file `end` says.
TRAIN = """
from jaxtrain.run.attempts.signals import attempt_to_supersede
from jaxtrain.run.attempts.supervise import report_to_supervisor
words = sys.argv[1:]
workdir = pathlib.Path(words[0])
def after(option):
    return words[words.index(option) + 1]
rank, count = int(after("--process-id")), int(after("--num-processes"))
if rank == 0:
    lock = RunLock.acquire(workdir, supersedes=attempt_to_supersede())
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
tell(f"process {rank} of {count}, {' '.join(w for w in words if w.startswith('layout'))}")
report_to_supervisor()
while not (workdir / "end").exists():
    time.sleep(0.02)
os._exit(int((workdir / "end").read_text()))
"""
SUPERVISOR = """
from jaxtrain.run.attempts.elastic import Elastic, supervise_elastic
from jaxtrain.run.attempts.supervise import Supervision
workdir, name, options, words, *command = sys.argv[1:]
words = {int(count): each for count, each in json.loads(words).items()}
options = {"address": "127.0.0.1", "notice_seconds": 2.0, **json.loads(options)}
elastic = Elastic(least=min(words), most=max(words), name=name, **options)
settings = Supervision(poll_seconds=0.02, backoff_seconds=0.01, max_restarts_without_progress=1)
sys.exit(supervise_elastic(
    command, pathlib.Path(workdir), elastic, words, settings=settings, report=tell))
"""
WORDS = {count: [f"layout{count}"] for count in (2, 3)}
# On a busy machine a supervisor may be silent for 2 s, which is a lost host here; the fast part has
# the decisions, with a clock of its own (test_membership.py).
real_hosts = pytest.mark.slow


class Run:
    """Supervisors of hosts on this machine, and the lines that they have printed."""

    def __init__(self, workdir):
        self.workdir, self.each, self.printed = workdir, {}, {}

    def start(self, name, words=WORDS, program=TRAIN, **options):
        train = [sys.executable, "-c", WITHOUT_JAX + program, self.workdir]
        texts = json.dumps(options), json.dumps(words)
        self.each[name] = Process(SUPERVISOR, self.workdir, name, *texts, *train)
        os.set_blocking(self.each[name].popen.stdout.fileno(), False)
        self.printed[name] = ""

    def read(self, name):
        with contextlib.suppress(BlockingIOError):
            self.printed[name] += os.read(self.each[name].popen.stdout.fileno(), 65536).decode()
        return self.printed[name]

    def wait_for(self, name, text, seconds=60):
        until = time.monotonic() + seconds
        while text not in self.read(name):
            assert time.monotonic() < until, (text, self.printed)
            time.sleep(0.02)

    def end(self, name, seconds=60):
        return self.each[name].popen.wait(seconds)

    def ends(self, names, status):
        """Expects these hosts to end with a status."""
        found = [self.end(name) for name in names]
        assert found == [status] * len(names), [self.read(name) for name in names]

    def lose(self, name):
        """Kills its supervisor and what that has started."""
        pid = self.each[name].popen.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
        for one in (pid, *children):
            os.kill(one, signal.SIGKILL)

    def save(self, step):
        folder = self.workdir / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    def finish(self, status=0):
        file = self.workdir / "end.part"
        file.write_text(str(status))
        file.rename(self.workdir / "end")


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    for name, process in found.each.items():
        if process.popen.poll() is None:
            found.lose(name)
            process.kill()


@pytest.fixture
def three(run):
    for name in "abc":
        run.start(name)
    for rank, name in enumerate("abc"):
        run.wait_for(name, f"process {rank} of 3, layout3")
    return run


@real_hosts
def test_all_hosts_train_to_the_end(three):
    three.finish()
    three.ends("abc", 0)
    token = three.workdir / "attempts" / "token"
    assert token.stat().st_mode & 0o077 == 0
    assert token.read_text().strip() not in "".join(three.printed.values())


@real_hosts
@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_others_resume_with_the_layout_of_two_hosts(three, lost):
    rest = [name for name in "abc" if name != lost]
    three.lose(lost)
    for rank, name in enumerate(rest):
        three.wait_for(name, f"process {rank} of 2, layout2")
    assert f"host {lost} is lost: silent for 2 s" in three.printed[rest[0]]
    three.finish()
    three.ends(rest, 0)
    # The second attempt took the folder at once, also from an attempt that never ended.
    assert records.newest_attempt(three.workdir) == 2


@real_hosts
def test_a_host_that_comes_back_is_taken_in_at_the_next_save(three):
    three.lose("b")
    three.wait_for("a", "process 0 of 2")
    three.save(10)
    time.sleep(2.5)  # the leader reads the folder once a second
    three.start("b")
    three.wait_for("b", "a, c train; this host is taken in at the next save")
    time.sleep(2.5)
    assert "taking in" not in three.read("a")
    three.save(20)
    three.wait_for("a", "taking in b after the save of step 20")
    for name in "abc":
        three.wait_for(name, "generation 3: a, b, c")
    three.finish()
    three.ends("abc", 0)


@real_hosts
def test_a_host_that_is_told_to_stop_leaves_the_others(three):
    three.each["c"].popen.send_signal(signal.SIGTERM)
    assert three.end("c") == 75
    for rank, name in enumerate("ab"):
        three.wait_for(name, f"process {rank} of 2, layout2")
    three.finish()
    three.ends("ab", 0)


def test_fewer_than_the_least_give_up_after_a_while(run):
    run.start("a", wait_seconds=1)
    assert run.end("a") == 1
    run.wait_for("a", "1 of 2 hosts are here (a); waiting for the rest; gave up after 1 s")


@real_hosts
def test_an_error_of_the_users_ends_all_hosts(three):
    three.finish(2)
    three.ends("abc", 2)


@real_hosts
def test_restarts_without_a_newer_checkpoint_end(three):
    three.finish(1)
    three.ends("abc", 1)
    three.wait_for("a", "gave up after 1 restarts of the same hosts in a row")


@real_hosts
def test_a_second_supervisor_of_a_host_replaces_the_first(three):
    first = three.each["c"]
    three.start("c")
    assert first.popen.wait(60) == 1
    three.finish()
    three.ends("abc", 0)


@real_hosts
def test_a_host_with_another_command_is_sent_away(three):
    three.start("d", words={2: ["layout2"], 3: ["other"]})
    assert three.end("d") == 2
    three.wait_for("d", "all hosts of a run need the same")
    three.finish()
    three.ends("abc", 0)


# A search for each number of devices; tests/test_elastic_layouts.py chooses among layouts in the
# fast part.
@pytest.mark.slow
def test_the_layouts_of_a_configuration():
    train = {"config": "gpt_quickstart", "allow_imports": False}
    train["bindings"] = ["Mesh.tensor=2", "Mesh.fsdp=2", "Mesh.simulated_devices=4"]
    words = read_layouts(Elastic(least=1, most=4), train)
    assert list(words) == [2, 4]  # a replica has two devices
    assert words[4] == []
    assert words[2][-2:] == ["--simulate-devices", "2"]
    assert "Train.accumulation = 2" in words[2]
    with pytest.raises(UserError, match="do not divide over 3 hosts"):
        read_layouts(Elastic(least=1, most=3), train)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts 4:2 -- train gpt_quickstart", "write MIN:MAX"),
        ("--hosts 2:4 --host-name ../x -- train gpt_quickstart", "--host-name '../x'"),
        ("--hosts 2:4 --notice-seconds 0 -- train gpt_quickstart", "--notice-seconds 0"),
        ("--address h -- train gpt_quickstart", "--address: only with --hosts MIN:MAX"),
        ("--host-name h -- train gpt_quickstart", "--host-name: only with --hosts MIN:MAX"),
        (
            "--hosts 2:4 -- train gpt_quickstart --num-processes 2",
            "supervise --hosts sets --num-processes itself",
        ),
        ("--hosts 1:2 -- train gpt2_124m", "Mesh.data=-1 takes the devices that there are"),
    ],
)
def test_wrong_options_are_one_message(words, message, capsys):
    assert main(words.split()) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_without_hosts_nothing_is_elastic():
    assert parse(["--", "train", "gpt_quickstart"]).elastic is None
