"""Whole runs of several processes, struck by faults, end as they should and lose nothing.

Every run is `jaxtrain train` as users start it, in real processes on loopback; what is compared is
the final state's fingerprint, array by array, with that of a run that nothing happened to.
"""

import json

import pytest
from survival import Runs, end_of, metrics_of, state_of, train_to_the_end


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("survival"))


@pytest.fixture(scope="module")
def unharmed(runs):
    """The final state and metrics of the run that nothing happens to, on two processes."""
    train_to_the_end(runs, "unharmed")
    return state_of(runs.folder / "unharmed"), metrics_of(runs.folder / "unharmed")


POINTS = {
    "while compiling": "1:enter:compile:1:SIGTERM",
    "in a step": "1:enter:step:3:SIGUSR1",
    "evaluating": "0:enter:evaluation:4:SIGTERM",
    "saving, twice": "1:enter:save:4:SIGTERM 1:leave:save:4:SIGTERM",
}


@pytest.mark.parametrize("point", POINTS)
def test_a_signal_to_one_process_saves_the_same_step_in_all(point, runs, unharmed):
    name, struck = f"stopped {point}", int(POINTS[point][0])
    with runs.start(name, faults=POINTS[point]) as processes:
        assert [process.end() for process in processes] == [75, 75], processes[0].log()
        assert "STRUCK" in processes[struck].log()
    workdir = runs.folder / name
    ended = end_of(workdir)
    assert ended["status"] == "preempted"
    signal = POINTS[point].rpartition(":")[2]
    assert f"{signal} on process {struck}" in ended["reason"]
    assert state_of(workdir)[0] == ended["step"] < 8
    train_to_the_end(runs, name)
    assert (state_of(workdir), metrics_of(workdir)) == unharmed
    assert end_of(workdir) == {
        "status": "done", "reason": "trained to step 8", "step": 8, "attempt": 2
    }  # fmt: skip


# What strikes, and the words by which the first attempt's end names it.
LOSSES = {
    "a worker killed in a step": ("1:enter:step:5:SIGKILL", "process 1 (host"),
    "process 0 killed in a save": ("0:leave:save:4:SIGKILL", "process 0 (host"),
    "a worker frozen": ("1:enter:step:5:SIGSTOP", "process 1 (host"),
    "an error on a worker": ("1:enter:step:5:raise", "struck at enter step 5"),
    "a worker that hangs": ("1:enter:data:5:hang", "process 1"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_supervised_processes_join_again_and_lose_nothing(loss, runs, unharmed):
    """Whatever ends one process ends all, with the reason on disk; the restart goes on."""
    fault, words = LOSSES[loss]
    bindings = ["Deadlines.step = 6", "Deadlines.data = 6"]
    train_to_the_end(runs, loss, *bindings, faults=fault, supervised=True)
    workdir = runs.folder / loss
    assert (state_of(workdir), metrics_of(workdir)) == unharmed
    assert end_of(workdir)["attempt"] == 2
    files = workdir.glob("attempts/reason-1-*")
    reasons = [json.loads(file.read_text())["reason"] for file in files]
    first = json.loads((workdir / "attempts/1.json").read_text())["exit"]
    assert any(words in told for told in [*reasons, first]), [reasons, first]
    if fault.endswith(("SIGSTOP", "hang")):
        stacks = "".join(file.read_text() for file in workdir.glob("attempts/stacks-1-*.txt"))
        assert "train.py" in stacks
    account = json.loads((workdir / "goodput.json").read_text())
    assert len(account["attempts"]) == 2


def test_one_process_goes_on_where_two_stopped(runs, unharmed):
    """The same command on another number of hosts: same data, losses to the order of sums."""
    with runs.start("other hosts", faults="0:leave:step:5:SIGTERM") as processes:
        assert [process.end() for process in processes] == [75, 75], processes[0].log()
    train_to_the_end(runs, "other hosts", count=1)
    _, metrics = unharmed
    found = metrics_of(runs.folder / "other hosts")
    assert found.keys() == metrics.keys()
    assert list(found.values()) == pytest.approx(list(metrics.values()), rel=1e-5)
