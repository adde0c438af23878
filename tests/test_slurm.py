"""Slurm jobs whose time limit is too short: requeued a bounded number of times, with the reason."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from without_jax import WITHOUT_JAX, Process

from jaxtrain.run.attempts.lock import RunLock
from jaxtrain.run.attempts.slurm import SlurmJob
from jaxtrain.run.attempts.supervise import Supervision, supervise

SCRIPT = Path(__file__).parent.parent / "tpu_scripts" / "slurm.sbatch"
FAST = {"backoff_seconds": 0.001, "poll_seconds": 0.02}
TIMES = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1120"}
SUPERVISOR = """
from jaxtrain.run.attempts.supervise import Supervision, supervise
workdir, settings, *command = sys.argv[1:]
sys.exit(supervise(command, workdir, settings=Supervision(**json.loads(settings)), report=tell))
"""
IMPORTING = [
    sys.executable,
    "-c",
    "import time; print('importing', flush=True); time.sleep(600)",
]
TAKES = """
lock = RunLock.acquire(pathlib.Path(sys.argv[1]))
tell("importing")
time.sleep(600)
"""


def test_a_job_is_detected_by_its_environment():
    assert SlurmJob.detect({"PATH": "/bin"}) is None
    whole = SlurmJob.detect({"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", **TIMES})
    assert whole == SlurmJob("7", task=3, start=1000, end=1120)
    assert SlurmJob.detect({"SLURM_JOB_ID": "7"}) == SlurmJob("7", task=0)


def test_the_clause_has_time_limit_and_notice():
    text = SlurmJob("7", start=1000, end=1120).describe_limit(5, lambda: 1035)
    assert text == (
        "the time limit of Slurm job 7 is 120 s, and the signal to save came 90 s ahead of its "
        "end, 30 s after the job's start"
    )


@pytest.mark.parametrize(
    ("shown", "clause"),
    [
        ("2026-01-02T03:00:00 2026-01-02T03:05:00", "the time limit of Slurm job 7 is 300 s"),
        ("2026-01-02T03:00:00 Unknown", None),
        ("", None),
    ],
)
def test_an_older_slurm_is_asked_for_the_times(shown, clause, tmp_path, monkeypatch):
    queue = tmp_path / "squeue"
    queue.write_text(f"#!/bin/sh\necho '{shown}'\n")
    queue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    text = SlurmJob("7").describe_limit(0)
    assert text is clause if clause is None else text.startswith(clause)


def test_without_squeue_the_times_are_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert SlurmJob("7").describe_limit(0) is None


def test_stops_are_counted_by_task_until_a_newer_checkpoint(tmp_path):
    first, second = SlurmJob("7", task=0), SlurmJob("7", task=1)
    assert [first.count_stop(tmp_path, None) for _ in range(3)] == [1, 2, 3]
    assert [second.count_stop(tmp_path, None) for _ in range(2)] == [1, 2]
    assert [first.count_stop(tmp_path, step) for step in (4, 4, 9, 4)] == [1, 2, 1, 1]


@pytest.mark.parametrize("content", ["{", "[]", '{"step": null, "stops": "many"}'])
def test_a_damaged_count_starts_from_one(content, tmp_path):
    file = tmp_path / "attempts" / "stops-0.json"
    file.parent.mkdir()
    file.write_text(content)
    assert SlurmJob("7").count_stop(tmp_path, None) == 1


@pytest.fixture
def in_job(monkeypatch):
    """Makes this process, and what it starts, a task of a job: in_job(task, **variables)."""

    def enter(task=0, **variables):
        named = {"SLURM_JOB_ID": "7", "SLURM_PROCID": str(task), **TIMES, **variables}
        for name, value in named.items():
            monkeypatch.setenv(name, value)

    return enter


def stop_while_importing(workdir, command):
    """Exit status and output of a supervisor that gets SIGTERM before training starts."""
    process = Process(SUPERVISOR, workdir, json.dumps(FAST), *command)
    assert process.line() == "importing"
    process.popen.send_signal(signal.SIGTERM)
    return process.popen.wait(60), process.popen.stdout.read()


def test_a_notice_before_anything_was_started_is_requeued_three_times(tmp_path, in_job):
    """The signal comes at once if the time limit is shorter than the notice."""
    start = int(time.time())
    in_job(SLURM_JOB_START_TIME=str(start), SLURM_JOB_END_TIME=str(start + 1000))
    ends = [stop_while_importing(tmp_path, IMPORTING) for _ in range(5)]
    assert [status for status, _ in ends] == [75, 75, 75, 1, 1]
    assert all("before anything was started" in text for _, text in ends[:3])
    text = ends[3][1]
    assert "stopped 4 times in a row before a newer checkpoint was written" in text
    assert "the time limit of Slurm job 7 is 1000 s, and the signal to save came " in text
    assert "longer time limit (sbatch --time), a shorter notice (sbatch --signal), or save" in text
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["status"] == "failed"
    assert record["reason"] in ends[4][1]


def test_tasks_that_are_not_process_0_reach_the_same_conclusion(tmp_path, in_job):
    """`srun` returns the highest status of all tasks: one that returned 75 would requeue all."""
    in_job(task=1)
    with RunLock.acquire(tmp_path):
        command = [sys.executable, "-c", "raise SystemExit(75)"]
        settings, lines = Supervision(**FAST), []
        ends = [
            supervise(command, tmp_path, settings=settings, report=lines.append) for _ in range(4)
        ]
    assert ends == [75, 75, 75, 1]
    assert lines[0].startswith("stopped 4 times in a row")
    assert not (tmp_path / "exit.json").exists()


def test_a_newer_checkpoint_in_between_counts_as_progress(tmp_path, in_job):
    in_job()
    command = [sys.executable, "-c", "raise SystemExit(75)"]
    ends = []
    for stop in range(6):
        if stop == 3:
            (tmp_path / "checkpoints" / "5").mkdir(parents=True)
            (tmp_path / "checkpoints" / "5" / "manifest.json").touch()
        settings = Supervision(**FAST)
        ends.append(supervise(command, tmp_path, settings=settings, report=lambda _: None))
    assert ends == [75] * 6


def test_outside_slurm_a_stop_before_the_start_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert stop_while_importing(tmp_path, IMPORTING)[0] == 75
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_stopped_before_it_listened_is_not_restarted(tmp_path, in_job):
    in_job()
    command = [sys.executable, "-c", WITHOUT_JAX + TAKES, str(tmp_path)]
    status, text = stop_while_importing(tmp_path, command)
    assert status == 1
    assert "not restarted, because SIGTERM was received" in text


@pytest.mark.parametrize(("seconds", "is_rejected"), [(120, True), (3600, False)])
def test_the_script_asks_an_older_slurm_for_the_end(seconds, is_rejected, tmp_path):
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    for name, text in (("squeue", f"echo {end}"), ("srun", "touch started")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, "train", "x", "--workdir", "y"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if is_rejected else 0)
    assert ("use more than 5 minutes" in done.stderr) == is_rejected
    assert (tmp_path / "started").exists() != is_rejected
