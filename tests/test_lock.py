"""One attempt at a time writes into a run's folder: real processes that are killed and frozen."""

import errno
import itertools
import json
import os
import re
import signal
import threading
import time

import pytest
from without_jax import Process

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.run.attempts import lock, records
from jaxtrain.run.attempts.lock import RunLock, Superseded

BEAT_SECONDS = 0.05
HOLDER = """
superseded = threading.Event()
lock = RunLock.acquire(
    sys.argv[1], host=sys.argv[2] or None, beat_seconds=float(sys.argv[3]),
    on_superseded=lambda _: superseded.set(),
)
tell(f"attempt {lock.attempt}")
for line in sys.stdin:
    if line == "write\\n":
        try:
            lock.check()
            tell("written")
        except Superseded as error:
            tell(error)
    if line == "noticed\\n":
        superseded.wait()
        tell("noticed")
    if line == "release\\n":
        lock.release()
        tell("released")
"""


@pytest.fixture
def start():
    """Starts programs, and ends them."""
    started = []

    def one(code, *arguments):
        started.append(Process(code, *arguments))
        return started[-1]

    yield one
    for process in started:
        process.kill()


@pytest.fixture
def holder(start, tmp_path):
    """A process that holds tmp_path: holder(host="", beat_seconds=...)."""

    def one(host="", beat_seconds=BEAT_SECONDS):
        process = start(HOLDER, tmp_path, host, beat_seconds)
        assert process.line() == "attempt 1"
        return process

    return one


def content(file):
    return json.loads(file.read_text())


def jump_at_every_look(monkeypatch, seconds):
    """The wall clock moves so much further whenever somebody looks at it."""
    wall, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: wall() + seconds * next(looks))


def no_waiting(_):
    pytest.fail("waited")


def test_every_start_takes_the_next_number(tmp_path):
    for number in (1, 2, 3):
        with RunLock.acquire(tmp_path) as held:
            assert held.attempt == number
            shown = content(tmp_path / "lock.json")
            assert shown["attempt"] == number
            assert shown["pid"] == os.getpid()
            held.check()
        assert not (tmp_path / "lock.json").exists()
    assert records.newest_attempt(tmp_path) == 3
    assert sorted(os.listdir(tmp_path / "attempts")) == ["1.json", "2.json", "3.json"]


def test_an_older_version_s_attempts_count(tmp_path):
    (tmp_path / "exit.json").write_text('{"status": "done", "step": 4, "attempt": 7}')
    assert RunLock.acquire(tmp_path).attempt == 8


def test_a_living_holder_is_named(holder, tmp_path):
    process = holder()
    with pytest.raises(UserError) as refused:
        RunLock.acquire(tmp_path)
    for words in (str(tmp_path), f"kill {process.popen.pid}", os.uname().nodename, "--workdir"):
        assert words in str(refused.value)
    assert process.ask("release") == "released"
    assert RunLock.acquire(tmp_path).attempt == 2


def test_a_dead_holder_is_followed_at_once(holder, tmp_path, monkeypatch):
    holder(beat_seconds=3600).kill()
    monkeypatch.setattr(time, "sleep", no_waiting)
    assert RunLock.acquire(tmp_path).attempt == 2


def test_a_killed_holder_that_nobody_reaped_is_dead(holder, tmp_path):
    process = holder(beat_seconds=3600)
    process.popen.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.popen.pid, os.WEXITED | os.WNOWAIT)
    assert RunLock.acquire(tmp_path).attempt == 2


def test_another_process_of_the_same_number_is_no_holder(holder, tmp_path):
    holder(beat_seconds=3600).kill()
    for file in (tmp_path / "lock.json", tmp_path / "attempts" / "1.json"):
        reused = {**content(file), "pid": os.getpid()}
        file.write_text(json.dumps(reused))
    assert RunLock.acquire(tmp_path).attempt == 2


@pytest.mark.parametrize("jump", [0, 86_400, -86_400])
def test_elsewhere_a_counter_that_moves_is_alive(holder, tmp_path, monkeypatch, jump):
    process = holder("elsewhere", beat_seconds=0.5)
    jump_at_every_look(monkeypatch, jump)
    with pytest.raises(UserError, match=f"process {process.popen.pid} on elsewhere"):
        RunLock.acquire(tmp_path)


@pytest.mark.parametrize("jump", [0, 86_400, -86_400])
def test_a_woken_zombie_finds_out_before_it_writes(holder, tmp_path, monkeypatch, jump):
    zombie = holder("elsewhere")
    assert zombie.ask("write") == "written"
    zombie.popen.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, zombie.popen.pid, os.WSTOPPED)
    said = []
    jump_at_every_look(monkeypatch, jump)
    held = RunLock.acquire(tmp_path, beat_seconds=BEAT_SECONDS, report=said.append)
    assert held.attempt == 2
    assert len(said) == 1
    assert re.search(r"taking over .*: attempt 1, process \d+ on elsewhere", said[0])

    zombie.popen.send_signal(signal.SIGCONT)
    assert "attempt 1 may no longer write" in zombie.ask("write")
    assert zombie.ask("noticed") == "noticed"
    assert zombie.ask("release") == "released"
    assert content(tmp_path / "lock.json")["attempt"] == 2
    assert held.still_owned()
    held.release()


def test_who_takes_no_lock_outlives_a_holder_that_went_with_its_machine(holder, tmp_path):
    """A notebook on the disk of a machine that is gone, or after this one was started again."""
    process = holder("elsewhere")
    with pytest.raises(UserError, match=f"process {process.popen.pid} on elsewhere"):
        lock.require_not_held(tmp_path, pytest.fail)
    process.kill()
    lines = []
    lock.require_not_held(tmp_path, lines.append)
    assert len(lines) == 1
    assert "on elsewhere, sent no heartbeat for 0.15 seconds" in lines[0]
    assert records.newest_attempt(tmp_path) == 1
    RunLock.acquire(tmp_path, report=lines.append).release()
    lock.require_not_held(tmp_path, pytest.fail)  # it said that it ended


def test_beats_into_a_replaced_lock_reach_nobody(tmp_path):
    held = RunLock.acquire(tmp_path, beat_seconds=3600)
    newer = tmp_path / "newer.json"
    newer.write_text('{"attempt": 2}')
    looked = held._holder._is_shown

    def replaced_after_the_look():
        shown = looked()
        newer.replace(tmp_path / "lock.json")
        return shown

    held._holder._is_shown = replaced_after_the_look
    held._holder._beat()
    assert (tmp_path / "lock.json").read_text() == '{"attempt": 2}'
    with pytest.raises(Superseded):
        held.check()


def test_readers_see_whole_beats_that_grow(tmp_path):
    with RunLock.acquire(tmp_path, beat_seconds=0.001):
        beats = []
        while len(set(beats)) < 50:
            beats.append(content(tmp_path / "lock.json")["beat"])
        assert beats == sorted(beats)


def test_a_removed_lock_comes_back(tmp_path):
    with RunLock.acquire(tmp_path, beat_seconds=0.01):
        (tmp_path / "lock.json").unlink()
        while not (tmp_path / "lock.json").exists():
            time.sleep(0.005)
        assert content(tmp_path / "lock.json")["attempt"] == 1


RACE = """
rounds, racers, me = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
held = []
for number in range(rounds):
    folder = pathlib.Path(sys.argv[1], str(number))
    (folder / "ready").mkdir(parents=True, exist_ok=True)
    (folder / "ready" / me).touch()
    while len(os.listdir(folder / "ready")) < racers:
        pass
    try:
        held.append(RunLock.acquire(folder, beat_seconds=3600))
        (folder / "won" ).open("a").write(f"{me} {held[-1].attempt}\\n")
    except UserError as error:
        (folder / "lost").open("a").write(f"{me}\\n")
tell("finished")
sys.stdin.read()
"""


@pytest.mark.parametrize("links", [True, False])
def test_of_racing_starters_one_wins(start, tmp_path, links):
    rounds, racers = 12, 3
    for number in range(0, rounds, 2):  # every other folder has a dead holder
        folder = tmp_path / str(number)
        RunLock.acquire(folder, beat_seconds=3600)._holder._stopped.set()
        for file in (folder / "lock.json", folder / "attempts" / "1.json"):
            file.write_text(json.dumps({**content(file), "process_start": "another time"}))
    code = RACE if links else NO_LINKS + RACE
    processes = [start(code, tmp_path, rounds, racers, racer) for racer in range(racers)]
    assert [process.line() for process in processes] == ["finished"] * racers
    for number in range(rounds):
        folder = tmp_path / str(number)
        won = (folder / "won").read_text().splitlines()
        assert [line.split()[1] for line in won] == ["2" if number % 2 == 0 else "1"]
        assert len((folder / "lost").read_text().splitlines()) == racers - 1


# As a file system without hard links answers. A claim is then read as unknown for a moment, and
# the next look waits for a beat: a short one, so that the race does not wait for the real one.
NO_LINKS = """
import dataclasses, errno
from jaxtrain.run.attempts import records
records._UNKNOWN = dataclasses.replace(records._UNKNOWN, beat_seconds=1.0)
def link(*_):
    raise OSError(errno.EPERM, "no links here")
os.link = link
"""


def test_who_judged_an_older_attempt_loses(holder, tmp_path):
    zombie = holder("elsewhere")
    zombie.kill()
    winners = []

    def another_is_faster(_):
        winners.append(RunLock.acquire(tmp_path, report=lambda _: None))

    # Between judging the dead holder and taking the folder, somebody else takes it.
    with pytest.raises(UserError, match="attempt 2, process"):
        RunLock.acquire(tmp_path, report=another_is_faster)
    assert [winner.attempt for winner in winners] == [2]
    assert records.newest_attempt(tmp_path) == 2
    winners[0].check()
    winners[0].release()


def test_other_processes_of_the_run_check_and_hold_nothing(tmp_path):
    held = RunLock.acquire(tmp_path)
    joined = RunLock.join(tmp_path, held.attempt)
    threads = threading.active_count()
    joined.check()
    joined.release()
    assert content(tmp_path / "lock.json")["attempt"] == 1
    assert threading.active_count() == threads
    held.release()
    joined.check()  # an orderly end is no takeover
    with RunLock.acquire(tmp_path), pytest.raises(Superseded, match="attempt 2 took it over"):
        joined.check()


def test_a_claim_that_a_crash_left_unreadable_is_outlived(tmp_path, monkeypatch):
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "1.json").write_text("")
    waited = []
    clock = time.monotonic
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(waited))
    assert RunLock.acquire(tmp_path, report=lambda _: None).attempt == 2
    assert sum(waited) >= 3 * lock.BEAT_SECONDS


def test_a_full_disk_stops_no_run(tmp_path, monkeypatch):
    held = RunLock.acquire(tmp_path, beat_seconds=0.001)
    tried = threading.Semaphore(0)

    def full(*_):
        tried.release()
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for _ in range(3):
            assert tried.acquire(timeout=60)
    before = content(tmp_path / "lock.json")["beat"]
    while content(tmp_path / "lock.json")["beat"] == before:
        time.sleep(0.001)
    held.release()


def test_an_older_attempt_does_not_say_how_it_all_ended(tmp_path):
    RunLock.acquire(tmp_path).release()
    end = {"status": "done", "reason": "trained", "step": 4}
    assert records.write_exit(tmp_path, **end, attempt=1)
    assert content(tmp_path / "exit.json") == {**end, "attempt": 1}
    with RunLock.acquire(tmp_path):
        assert not records.write_exit(tmp_path, **{**end, "status": "failed"}, attempt=1)
    assert content(tmp_path / "exit.json")["status"] == "done"


def test_what_is_written_replaces_whole_and_leaves_nothing_beside(tmp_path):
    file = tmp_path / "file"
    for text in (b"one", b"two"):
        write_atomically(file, text)
        assert file.read_bytes() == text
    assert os.listdir(tmp_path) == ["file"]


def test_neither_lock_nor_supervisor_imports_jax(start):
    process = start(
        "from jaxtrain.run.attempts import lock, signals\n"
        "from jaxtrain.run.commands import supervise\n"
        "tell([name for name in sys.modules if name.split('.')[0] in ('jax', 'numpy', 'rich')])"
    )
    assert process.line() == "[]"
