"""Whole runs of several processes, struck by faults, end as they should and lose nothing.

Every run is `jaxtrain train` as users start it, in real processes on loopback; what is compared is
the final state's fingerprint, array by array, with that of a run that nothing happened to.
"""

import json

import pytest
from survival import Runs, end_of, metrics_of, state_of, train_to_the_end, unharmed_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("survival"))


@pytest.fixture(scope="module")
def unharmed(runs):
    """The final state and metrics of the run that nothing happens to, on two processes."""
    return unharmed_run(runs)


# Where a signal comes, start after start of one run: all processes stop at the same step. The
# first step of a start is a compile.
SIGNALS = [
    "1:enter:compile:1:SIGTERM",
    "1:enter:step:5:SIGUSR1",
    "0:enter:evaluation:12:SIGTERM",
    "1:enter:save:14:SIGTERM 1:leave:save:14:SIGTERM",  # a second one while it saves
]


@pytest.mark.chaos  # five starts of two processes; CI's one signal is in test_chaos.py
def test_a_signal_to_one_process_saves_the_same_step_in_all(runs, unharmed):
    """While compiling, in a step, evaluating and saving; the same command goes on each time."""
    workdir, before = runs.folder / "signals", -1
    for attempt, fault in enumerate(SIGNALS, start=1):
        with runs.start("signals", faults=fault) as processes:
            ends = [process.end() for process in processes]
        assert ends == [75, 75], (fault, processes[0].log()[-5000:])
        ended, signal = end_of(workdir), fault.rpartition(":")[2]
        assert (ended["status"], ended["attempt"]) == ("preempted", attempt)
        assert f"{signal} on process {fault[0]} (host" in ended["reason"]
        assert before <= ended["step"] < 16
        before = ended["step"]
        if before:
            assert state_of(workdir)[0] == before
    train_to_the_end(runs, "signals")
    assert (state_of(workdir), metrics_of(workdir)) == unharmed
    assert end_of(workdir) == {
        "status": "done", "reason": "trained to step 16", "step": 16, "attempt": 5
    }  # fmt: skip


# What strikes one attempt after the other, and the words by which its end names it.
LOSSES = {
    "1:enter:step:2:SIGKILL": "process 1 (host",
    "1:enter:step:3:raise": "struck at enter step 3",
    "0:leave:save:4:SIGKILL": "process 0 (host",
    "1:enter:step:6:SIGSTOP": "process 1 (host",
    "1:enter:data:7:hang": "stalled in data, step 7",
}


@pytest.mark.chaos  # six starts of two processes under supervisors; CI's are in test_chaos.py
def test_supervised_processes_join_again_and_lose_nothing(runs, unharmed):
    """Whatever ends one process ends all, with the reason on disk; the restart goes on."""
    # The others of a process that hangs in its data wait for it in their step.
    bindings = ["Timeouts.step = 30", "Timeouts.data = 8"]
    faults = " ".join(LOSSES)
    train_to_the_end(runs, "losses", *bindings, faults=faults, supervised=True)
    workdir = runs.folder / "losses"
    assert (state_of(workdir), metrics_of(workdir)) == unharmed
    attempts = range(1, end_of(workdir)["attempt"] + 1)
    assert len(attempts) > len(LOSSES)
    told = {}
    for attempt in attempts:
        files = sorted(workdir.glob(f"attempts/reason-{attempt}-*"))
        ended = json.loads((workdir / f"attempts/{attempt}.json").read_text())["exit"]
        told[attempt] = [*(json.loads(file.read_text())["reason"] for file in files), ended]
    # A slow machine may end an attempt more, but each fault is named, in their order.
    named = iter(told.items())
    for fault, words in LOSSES.items():
        attempt = next((n for n, lines in named if any(words in line for line in lines)), None)
        assert attempt is not None, (fault, told)
        if fault.endswith(("SIGSTOP", "hang")):
            stacks = workdir.glob(f"attempts/stacks-{attempt}-*.txt")
            assert "run/commands/train.py" in "".join(file.read_text() for file in stacks)
    account = json.loads((workdir / "goodput.json").read_text())
    assert len(account["attempts"]) == len(attempts)
    assert sum(attempt.get("replay", 0) for attempt in account["attempts"]) > 0


@pytest.mark.chaos
def test_one_process_goes_on_where_two_stopped(runs, unharmed):
    """The same command on another number of hosts: same data, losses to the order of sums."""
    with runs.start("other hosts", faults="0:leave:step:5:SIGTERM") as processes:
        assert [process.end() for process in processes] == [75, 75], processes[0].log()
    train_to_the_end(runs, "other hosts", count=1)
    _, metrics = unharmed
    found = metrics_of(runs.folder / "other hosts")
    assert found.keys() == metrics.keys()
    assert list(found.values()) == pytest.approx(list(metrics.values()), rel=1e-5)
