"""Timeouts from known histories; a stuck process leaves stacks that name the place."""

import dataclasses
import json
import subprocess
import sys
import threading

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts.watchdog import Watchdog, dump_stacks, write_reason
from jaxtrain.run.phases import NAMES, Activity, Phases
from jaxtrain.training.settings import Timeouts

# Argument 1: a folder; argument 2: how to get stuck.
CHILD = """
import ctypes, os, pathlib, sys, threading, time
from jaxtrain.run.phases import NAMES, Phases
from jaxtrain.training.settings import Timeouts
from jaxtrain.run.attempts.watchdog import Watchdog, dump_stacks, write_reason

folder = pathlib.Path(sys.argv[1])

def stuck_in_sleep():
    time.sleep(600)

def stuck_in_c_without_the_lock():
    ctypes.CDLL(None).sleep(600)

def stuck_in_c_with_the_lock():
    ctypes.PyDLL(None).sleep(600)

def stuck_with_its_watchdog():
    time.sleep(600)

def other_thread_waits():
    threading.Event().wait()

def on_expiry(activity, deadline_seconds):
    if sys.argv[2] == "stuck_with_its_watchdog":
        time.sleep(600)
    dump_stacks(folder / "stacks.txt")
    write_reason(folder, 3, 2, f"longer than {deadline_seconds} s", activity)
    os._exit(42)

threading.Thread(target=other_thread_waits, name="the other one", daemon=True).start()
phases = Phases()
deadlines = Timeouts(**dict.fromkeys(NAMES, 0.5))
with Watchdog(phases, deadlines, on_expiry, last_resort=folder / "last.txt"):
    with phases.phase("step", 7):
        globals()[sys.argv[2]]()
"""
WAYS = (
    "stuck_in_sleep",
    "stuck_in_c_without_the_lock",
    "stuck_in_c_with_the_lock",
    "stuck_with_its_watchdog",
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Folder and exit status of a process stuck in each way; all run at the same time."""
    folders = {way: tmp_path_factory.mktemp(way) for way in WAYS}
    children = {
        way: subprocess.Popen([sys.executable, "-c", CHILD, str(folders[way]), way]) for way in WAYS
    }
    try:
        return {way: (folders[way], child.wait(timeout=60)) for way, child in children.items()}
    finally:
        for child in children.values():
            child.kill()


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_stuck_process_says_where_and_why(ended, way):
    folder, status = ended[way]
    assert status == 42
    stacks = (folder / "stacks.txt").read_text()
    assert way in stacks
    assert "other_thread_waits" in stacks
    assert "is the other one" in stacks
    reason = json.loads((folder / "reason-2-3.json").read_text())
    assert reason["reason"] == "longer than 0.5 s"
    assert (reason["process"], reason["attempt"]) == (3, 2)
    assert (reason["phase"], reason["step"]) == ("step", 7)
    assert reason["seconds"] > 0.5


@pytest.mark.parametrize("way", WAYS[2:])
def test_a_watchdog_that_cannot_act_leaves_the_last_resort(ended, way):
    folder, status = ended[way]
    assert status == 1
    stacks = (folder / "last.txt").read_text()
    assert way in stacks
    assert "other_thread_waits" in stacks
    assert not (folder / "stacks.txt").exists()


@pytest.mark.parametrize(
    ("phase", "recent", "seconds"),
    [
        ("step", [], 300),  # not known yet: as given
        ("step", [0.25] * 4, 300),
        ("step", [0.25] * 5, 60),  # 2.5 s, but never below the minimum
        ("step", [8, 7, 9, 8, 1000], 80),  # one outlier changes nothing
        ("step", [100] * 5, 1000),  # steps slower than the number given are left their time
        ("evaluation", [7, 9] * 3, 80),
        ("data", [0.001] * 64, 300),  # batches that lay ready foretell no wait for a disk
        ("data", [50] * 64, 500),
        ("save", [1] * 5, 1800),
        ("save", [1000] * 5, 10000),
        ("compile", [30], 3600),
        ("start", [], 1800),
        ("restore", [], 1800),
        ("idle", [], None),
    ],
)
def test_a_deadline_is_learned_from_the_phases_own_history(phase, recent, seconds):
    assert Timeouts().of(phase, recent) == seconds


def test_zero_switches_a_deadline_off():
    deadlines = Timeouts(data=0)
    assert deadlines.of("data", [1] * 64) is None
    assert deadlines.longest() == 3600
    assert Timeouts(**dict.fromkeys(NAMES, 0)).longest() is None


@pytest.mark.parametrize(
    ("name", "value"), [("step", -1.0), ("factor", 0.5), ("minimum_seconds", 0.0)]
)
def test_impossible_deadlines_are_refused(name, value):
    with pytest.raises(UserError, match=rf"Timeouts.{name}={value}; use "):
        Timeouts(**{name: value})


def test_the_watchdog_looks_ten_times_in_the_shortest_deadline():
    assert Timeouts().check_seconds() == 1
    assert Timeouts(step=2).check_seconds() == 0.2
    assert Timeouts(step=0, minimum_seconds=1).check_seconds() == 0.1


class Stalls:
    """A watchdog on a clock moved by hand, and what it reported."""

    def __init__(self, **deadlines):
        self.now = 0
        self.phases = Phases(lambda: self.now)
        self.reported = []
        self.watchdog = Watchdog(
            self.phases, Timeouts(**deadlines), lambda *report: self.reported.append(report)
        )

    def after(self, seconds):
        self.now += seconds
        self.watchdog.check()
        return [(activity.phase, limit) for activity, limit in self.reported]


def test_a_stall_is_reported_once_and_the_next_one_again():
    stalls = Stalls(step=10, data=20)
    with stalls.phases.phase("data"):
        assert stalls.after(20) == []
        assert stalls.after(1) == [("data", 20)]
        assert stalls.after(100) == [("data", 20)]
    with stalls.phases.phase("step", 5):
        assert stalls.after(10) == [("data", 20)]
        assert stalls.after(1) == [("data", 20), ("step", 10)]
    assert stalls.after(10_000) == [("data", 20), ("step", 10)]  # idle
    assert stalls.reported[1][0] == Activity("step", 5, 11, stalls.reported[1][0].beats)


def test_an_evaluation_that_gets_on_has_no_end():
    stalls = Stalls(evaluation=10)
    with stalls.phases.phase("evaluation", 5):
        for _ in range(100):
            assert stalls.after(10) == []
            stalls.phases.beat()


def test_steps_teach_the_watchdog_their_deadline():
    stalls = Stalls(step=300, minimum_seconds=1)
    for step in range(5):
        with stalls.phases.phase("step", step):
            assert stalls.after(4) == []
    with stalls.phases.phase("step", 5):
        assert stalls.after(40) == []
        assert stalls.after(1) == [("step", 40)]


def test_the_thread_reports_and_ends():
    expired = threading.Event()
    phases = Phases()
    deadlines = Timeouts(step=0.05)
    with Watchdog(phases, deadlines, lambda *_: expired.set()), phases.phase("step"):
        assert expired.wait(60)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_run_without_a_stall_leaves_no_file(tmp_path):
    file = tmp_path / "stacks" / "last.txt"
    with Watchdog(Phases(), Timeouts(), pytest.fail, last_resort=file):
        assert file.exists()
    assert not file.exists()


def test_reasons_of_processes_and_attempts_stand_side_by_side(tmp_path):
    activity = Activity("save", 40, 1.23456, 9)
    files = {
        write_reason(tmp_path, process, attempt, "it stalled", activity)
        for process in (0, 1)
        for attempt in (1, 2)
    }
    assert set(tmp_path.iterdir()) == files
    assert len(files) == 4


def test_stacks_of_this_process_name_this_function(tmp_path):
    dump_stacks(tmp_path / "stacks.txt")
    text = (tmp_path / "stacks.txt").read_text()
    assert "test_stacks_of_this_process_name_this_function" in text
    assert "is MainThread" in text


def test_every_phase_has_a_deadline():
    given = {field.name for field in dataclasses.fields(Timeouts)}
    assert set(NAMES) == given - {"factor", "minimum_seconds"}
