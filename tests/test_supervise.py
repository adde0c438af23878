"""Commands that fail, hang, are killed or stopped, and what their supervisor makes of it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from without_jax import WITHOUT_JAX, Process

from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts.folder import QUICKSTART
from jaxtrain.run.attempts.lock import RunLock
from jaxtrain.run.attempts.records import newest_step
from jaxtrain.run.attempts.supervise import Supervision, supervise
from jaxtrain.run.commands.supervise import main, parse

# A stand-in for `train`: each attempt does what its entry in the plan says; the last one's repeats.
TRAIN = """
from jaxtrain.run.attempts.records import write_exit
from jaxtrain.run.attempts.supervise import report_to_supervisor
workdir, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
lock = RunLock.acquire(workdir)
def save(step, name="manifest.json"):
    folder = workdir / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / name).touch()
def end(status, reason="ended by itself"):
    write_exit(workdir, status=status, reason=reason, step=7, attempt=lock.attempt)
def kill(name="SIGKILL"):
    os.kill(os.getpid(), getattr(signal, name))
exec(plan[min(lock.attempt, len(plan)) - 1])
"""
SUPERVISOR = """
from jaxtrain.run.attempts.supervise import Supervision, supervise
workdir, settings, *command = sys.argv[1:]
settings = Supervision(**json.loads(settings))
sys.exit(supervise(command, workdir, settings=settings, report=tell))
"""
FAST = {"backoff_seconds": 0.001, "poll_seconds": 0.02}


def train(workdir, *plan):
    return [sys.executable, "-c", WITHOUT_JAX + TRAIN, str(workdir), json.dumps(plan)]


@pytest.fixture
def start(tmp_path):
    """Starts a supervisor of such a train in a process of its own: start(settings, *plan)."""
    started = []

    def one(changes, *plan):
        given = json.dumps({**FAST, **changes})
        started.append(Process(SUPERVISOR, tmp_path, given, *train(tmp_path, *plan)))
        return started[-1]

    yield one
    for process in started:
        process.kill()
    for file in (tmp_path / "attempts").glob("*.json"):
        claim = content(file)
        if "ended" not in claim and os.path.exists(f"/proc/{claim['pid']}"):
            os.kill(claim["pid"], signal.SIGKILL)


def run(workdir, *plan, **changes):
    """Supervises in this process: the exit status and the lines for people."""
    said = []
    given = Supervision(**{**FAST, **changes})
    return supervise(train(workdir, *plan), workdir, settings=given, report=said.append), said


def content(file):
    return json.loads(file.read_text())


def exit_of(workdir):
    return content(workdir / "exit.json")


def records(workdir):
    files = (workdir / "attempts").glob("*.json")
    return [content(file) for file in sorted(files, key=lambda file: int(file.stem))]


@pytest.mark.parametrize(("status", "word"), [(0, "done"), (2, "failed"), (75, "preempted")])
def test_final_statuses_pass_through(status, word, tmp_path):
    assert run(tmp_path, f"end({word!r}); sys.exit({status})") == (status, [])
    assert exit_of(tmp_path)["status"] == word
    assert [record["status"] for record in records(tmp_path)] == [status]


def test_failures_are_followed_by_another_start(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("API_KEY", "canary-in-the-environment")
    status, said = run(
        tmp_path,
        "save(3); end('failed', 'out of memory'); sys.exit(1)",
        "save(5); kill()",
        "save(8); end('done'); tell('trained')",
    )
    assert status == 0
    assert capfd.readouterr().out == "trained\n"
    assert said == [
        "attempt 1: ended with status 1: out of memory (newest checkpoint: step 3); restarting in "
        "0.001 s",
        "attempt 2: killed by SIGKILL (newest checkpoint: step 5); restarting in 0.001 s",
    ]
    first, second, third = records(tmp_path)
    assert first["exit"] == "ended with status 1: out of memory"
    assert (first["status"], first["signal"]) == (1, None)
    assert (second["status"], second["signal"]) == (None, "SIGKILL")
    steps = [(record["step_before"], record["step_after"]) for record in (first, second, third)]
    assert steps == [(None, 3), (3, 5), (5, 8)]
    assert all(record["seconds"] > 0 for record in records(tmp_path))
    assert exit_of(tmp_path)["attempt"] == 3
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or "canary" not in file.read_text(), file


def test_exit_json_never_claims_an_old_state(tmp_path):
    (tmp_path / "exit.json").write_text('{"status": "done", "step": 4, "attempt": 3}')
    seen = []
    status = supervise(
        train(tmp_path, *[""] * 3, "save(6); kill()", "end('done'); sys.exit(1)", "end('done')"),
        tmp_path,
        settings=Supervision(**FAST),
        report=lambda _: seen.append(exit_of(tmp_path)),
    )
    assert status == 0
    killed, contradicted = seen
    reason = "killed by SIGKILL"
    assert killed == {"status": "failed", "reason": reason, "step": 6, "attempt": 4}
    assert (contradicted["status"], contradicted["attempt"]) == ("failed", 5)
    assert (exit_of(tmp_path)["status"], exit_of(tmp_path)["attempt"]) == ("done", 6)


def test_a_restart_storm_ends(tmp_path):
    status, said = run(tmp_path, "sys.exit(1)", max_restarts_without_progress=2)
    assert status == 1
    assert len(records(tmp_path)) == 3
    reason = (
        "gave up after 2 restarts in a row without a newer checkpoint (no checkpoint yet); the "
        "last was attempt 3: ended with status 1"
    )
    assert said[-1] == reason
    assert exit_of(tmp_path) == {"status": "failed", "reason": reason, "step": 0, "attempt": 3}


def test_stops_without_progress_end_too(tmp_path):
    """A queue with a time limit that is too short would start it again indefinitely."""
    stopped = "end('preempted'); sys.exit(75)"
    plan = [stopped, stopped, f"save(5); {stopped}", *[stopped] * 5]
    statuses = [run(tmp_path, *plan, max_restarts_without_progress=2) for _ in plan[:6]]
    assert [status for status, _ in statuses] == [75, 75, 75, 75, 75, 1]
    reason = (
        "stopped 3 times in a row before a newer checkpoint was written: not to be queued again; "
        "give it a longer time limit, or save more often (Train.save_every)"
    )
    assert [said for _, said in statuses] == [[], [], [], [], [], [reason]]
    assert exit_of(tmp_path) == {"status": "failed", "reason": reason, "step": 5, "attempt": 6}


def test_a_storm_before_the_folder_is_taken_ends_too(tmp_path):
    said, folder = [], tmp_path / "new"
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    assert supervise(command, folder, settings=Supervision(**FAST), report=said.append) == 1
    assert len(said) == 4
    end = exit_of(folder)
    assert (end["status"], end["attempt"]) == ("failed", 0)
    assert "the last was a start: ended with status 1" in end["reason"]


def test_progress_counts_from_a_newer_complete_checkpoint(tmp_path):
    plan = [f"save({step}); kill()" for step in (1, 2, 3)]
    assert run(tmp_path, *plan, "", max_restarts_without_progress=1)[0] == 0
    assert len(records(tmp_path)) == 4


def test_a_torn_checkpoint_is_no_progress(tmp_path):
    plan = [f"save({step}, 'array'); kill()" for step in (1, 2, 3)]
    assert run(tmp_path, *plan, "", max_restarts_without_progress=1)[0] == 1
    assert len(records(tmp_path)) == 2


def test_the_newest_step_is_the_newest_sealed_one(tmp_path):
    assert newest_step(tmp_path) is None
    for name in ("2", "10", "9", "30.tmp", "damaged-40"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (tmp_path / "checkpoints" / "20").mkdir()
    assert newest_step(tmp_path) == 10
    for resumed, expected in ((12, 12), (8, 10), (None, 10), ("12", 10)):
        content = json.dumps({"id": "0" * 16, "resumed_step": resumed})
        (tmp_path / "checkpoints/local.json").write_text(content)
        assert newest_step(tmp_path) == expected


def test_the_wait_before_a_restart_doubles_to_a_minute():
    waits = [Supervision().backoff(restarts) for restarts in range(8)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert Supervision().backoff(10_000) == 60


def test_a_newer_attempt_s_end_stays(tmp_path):
    superseded = """
(workdir / "attempts" / "2.json").write_text('{"attempt": 2}')
(workdir / "exit.json").write_text('{"status": "done", "attempt": 2}')
sys.exit(1)
"""
    assert run(tmp_path, superseded, max_restarts_without_progress=0)[0] == 1
    assert exit_of(tmp_path) == {"status": "done", "attempt": 2}


def test_a_start_that_is_not_process_0_writes_nothing_about_the_run(tmp_path):
    with RunLock.acquire(tmp_path):
        command = [sys.executable, "-c", "raise SystemExit(1)"]
        assert (
            supervise(command, tmp_path, settings=Supervision(**FAST), report=lambda _: None) == 1
        )
        assert not (tmp_path / "exit.json").exists()
        assert "exit" not in records(tmp_path)[0]


# -- signals -------------------------------------------------------------------------------------

SAVES = """
def stop(number, _):
    tell("saving")
    end("preempted")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
report_to_supervisor()
tell("ready")
while True:
    time.sleep(0.05)
"""
# With a process of its own that keeps the output open, as a data loader's workers would.
STUBBORN = """
import subprocess
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: tell("asked"))
report_to_supervisor()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
tell("ready")
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_lets_the_command_save(number, start, tmp_path):
    code = SAVES.replace("signal.SIGTERM", f"signal.{number.name}")
    process = start({}, code)
    assert process.line() == "ready"
    process.popen.send_signal(number)
    assert process.line() == f"{number.name}: waiting 120 s for it to save"
    assert process.popen.stdout.read() == "saving\n"
    assert process.popen.wait() == 75
    assert exit_of(tmp_path)["status"] == "preempted"


def test_a_closed_terminal_lets_the_command_save(tmp_path):
    """The supervisor's own lines go to that terminal, too."""
    ours, theirs = pty.openpty()
    settings, plan = json.dumps(FAST), train(tmp_path, SAVES.replace("SIGTERM", "SIGHUP"))
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_JAX + SUPERVISOR.replace(", report=tell", ""), str(tmp_path),
         settings, *plan],
        stderr=theirs, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(theirs)
    assert process.stdout.readline() == "ready\n"
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.read() == "saving\n"
    assert process.wait(30) == 75
    assert exit_of(tmp_path)["status"] == "preempted"


@pytest.mark.parametrize("way", ["a second signal", "no end"])
def test_what_does_not_stop_is_killed_with_all_it_started(way, start, tmp_path):
    process = start({} if way == "a second signal" else {"grace_seconds": 0.5}, STUBBORN)
    assert process.line() == "ready"
    process.popen.send_signal(signal.SIGTERM)
    assert process.line().startswith("SIGTERM: waiting")
    assert process.line() == "asked"
    if way == "a second signal":
        process.popen.send_signal(signal.SIGTERM)
    # The output ends when nobody holds it any more.
    rest = process.popen.stdout.read()
    assert "asked" not in rest
    assert f"attempt 1: killed after SIGTERM and {way}" in rest
    assert process.popen.wait() == 1
    assert exit_of(tmp_path)["status"] == "failed"
    assert len(records(tmp_path)) == 1


def test_a_signal_ends_the_wait_for_a_restart(start, tmp_path):
    process = start({"backoff_seconds": 60}, "kill()")
    assert process.line().endswith("restarting in 60 s")
    process.popen.send_signal(signal.SIGTERM)
    assert "run the same command again" in process.popen.stdout.read()
    assert process.popen.wait() == 75
    assert exit_of(tmp_path)["status"] == "preempted"
    assert len(records(tmp_path)) == 1


def test_a_signal_before_anything_was_begun_loses_nothing(tmp_path):
    process = Process(
        SUPERVISOR,
        tmp_path,
        json.dumps(FAST),
        *[sys.executable, "-c", "import time; print('importing', flush=True); time.sleep(600)"],
    )
    assert process.line() == "importing"
    process.popen.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM before anything was started" in process.popen.stdout.read()
    assert process.popen.wait() == 75
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [SAVES, STUBBORN], ids=["saves", "stubborn"])
def test_a_killed_supervisor_takes_the_command_with_it(code, start):
    process = start({"grace_seconds": 0.5}, code)
    assert process.line() == "ready"
    process.kill()
    assert process.popen.stdout.read() == ("saving\n" if code == SAVES else "asked\n")


# -- stalls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stall",
    ["kill('SIGSTOP')", "import ctypes; ctypes.PyDLL(None).sleep(600)"],
    ids=["frozen", "holds the interpreter's lock"],
)
def test_a_stalled_command_is_killed_and_started_again(stall, tmp_path):
    status, said = run(tmp_path, f"report_to_supervisor(); {stall}", "", stall_seconds=0.5)
    assert status == 0
    assert said[0].startswith("attempt 1: stalled, killed: no progress for 0.5 s")
    assert records(tmp_path)[0]["signal"] == "SIGKILL"
    assert len(records(tmp_path)) == 2


# Waits; a stalled command is in the fast part.
@pytest.mark.slow
def test_a_busy_command_is_not_stalled(tmp_path):
    busy = "report_to_supervisor(); time.sleep(4)"
    assert run(tmp_path, busy, stall_seconds=2.0) == (0, [])


def test_a_command_that_does_not_report_yet_is_not_watched(tmp_path):
    assert run(tmp_path, "time.sleep(0.5)", stall_seconds=0.1) == (0, [])


def test_a_machine_that_was_suspended_is_not_stalled(start, tmp_path):
    code = """
report_to_supervisor()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
tell(os.getpid())
while True:
    time.sleep(0.05)
"""
    process = start({"stall_seconds": 1.0}, code)
    child = int(process.line())
    os.kill(child, signal.SIGSTOP)
    process.popen.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.popen.pid, os.WSTOPPED)
    time.sleep(1.5)  # what passes is what the supervisor must not count
    process.popen.send_signal(signal.SIGCONT)
    time.sleep(0.2)  # the supervisor looks before the command is back
    os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGUSR1)
    assert process.popen.stdout.read() == ""
    assert process.popen.wait() == 0
    assert len(records(tmp_path)) == 1


# -- the command line ----------------------------------------------------------------------------


def test_the_command_line_is_read():
    options = [
        "--max-restarts-without-progress",
        "5",
        "--grace-seconds",
        "30",
        "--stall-seconds",
        "60",
    ]
    request = parse([*options, "--", "train", "llama_8b", "-b", "Train.steps = 4"])
    assert request.settings == Supervision(
        max_restarts_without_progress=5, grace_seconds=30, stall_seconds=60
    )
    assert request.train == ["train", "llama_8b", "-b", "Train.steps = 4"]
    assert parse(["--", "train"]).settings == Supervision()


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("train", f"runs/{QUICKSTART}"),
        ("train configs/gpt_124m.gin", "runs/gpt_124m"),
        ("train gpt_124m --workdir /tmp/here", "/tmp/here"),
    ],
)
def test_the_folder_is_the_one_of_train(words, folder):
    assert str(parse(["--", *words.split()]).workdir) == folder


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train gpt_124m", "the command goes after --"),
        ("", "the command goes after --"),
        ("--", "the command goes after --"),
        ("-- eval --workdir x", "supervise -- eval: only train is supervised"),
        ("--max-restarts-without-progress -1 -- train", "--max-restarts-without-progress -1: use"),
        ("--grace-seconds -2 -- train", "--grace-seconds -2: use 0"),
        ("--grace-seconds nan -- train", "--grace-seconds nan: use 0"),
        ("--stall-seconds 0 -- train", "--stall-seconds 0: use more than 0"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(words, sentence, capsys):
    with pytest.raises(UserError) as refused:
        parse(words.split())
    assert sentence in str(refused.value)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"jaxtrain: {refused.value}\n"


@pytest.mark.parametrize("words", ["--stall 3x -- train", "--nope -- train", "-- train --nope"])
def test_unknown_options_are_refused_before_anything_starts(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert "usage" in capsys.readouterr().err
