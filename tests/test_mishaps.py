"""What happens to people's runs besides faults: preemption notices, taken ports, two at once.

Real processes of `jaxtrain train`, as users start them; long, so behind the marker of `make chaos`.
"""

import json
import signal
import socket

import pytest
from cluster import slurm_job, start_processes
from metadata_server import metadata_server
from survival import Runs, end_of, metrics_of, state_of, train_to_the_end, unharmed_run

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("mishaps"))


@pytest.fixture(scope="module")
def unharmed(runs):
    return unharmed_run(runs)


def command(runs, name, *more):
    words = ["train", str(runs.config), "--workdir", str(runs.folder / name)]
    return [*words, "--simulate-devices", "4", *more]


def test_a_preemption_that_the_metadata_server_announces_is_saved(runs):
    said = {"instance/preempted": "FALSE", "instance/maintenance-event": "NONE"}
    steps = ["-b", "Train.steps = 1000000", "-b", "Train.save_every = 1000"]
    with (
        metadata_server(said) as address,
        start_processes(
            1,
            command(runs, "announced", *steps),
            folder=runs.folder / "logs-announced",
            devices_per_process=4,
            environment={"GCE_METADATA_HOST": address},
        ) as (process,),
    ):
        process.wait_for("step 4")
        said["instance/preempted"] = "TRUE"
        assert process.end() == 75, process.log()
    ended = end_of(runs.folder / "announced")
    assert ended["status"] == "preempted"
    assert "instance/preempted TRUE" in ended["reason"]
    assert state_of(runs.folder / "announced")[0] == ended["step"] > 0


def test_two_tasks_of_a_slurm_job_train_without_a_flag(runs, unharmed):
    with start_processes(
        2,
        command(runs, "slurm"),
        folder=runs.folder / "logs-slurm",
        devices_per_process=2,
        **slurm_job(2),
        limit_seconds=120,
    ) as processes:
        assert [process.end() for process in processes] == [0, 0], processes[0].log()
        assert "Slurm: process 0 of 2, coordinator localhost:" in processes[0].log()
    assert (state_of(runs.folder / "slurm"), metrics_of(runs.folder / "slurm")) == unharmed


def test_a_taken_port_is_one_sentence(runs):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        flags = ["--coordinator", address, "--num-processes", "2", "--process-id", "0"]
        with start_processes(
            1, command(runs, "taken", *flags), folder=runs.folder / "logs-taken"
        ) as (process,):
            assert process.end() == 2, process.log()
            assert address in process.log()
            assert "Traceback" not in process.log()
    assert not (runs.folder / "taken").exists()


def test_a_second_train_in_the_folder_is_refused_and_harms_nothing(runs, unharmed):
    with runs.start("twice", faults="0:enter:step:5:SIGSTOP", count=2) as first:
        first[0].wait_for("STRUCK")
        with runs.start("twice", count=1) as (second,):
            assert second.end() == 2, second.log()
            assert "is writing there" in second.log()
            assert "Traceback" not in second.log()
        first[0].send(signal.SIGCONT)
        ends = [process.end() for process in first]
    if ends != [0, 0]:  # stopped for longer than the others wait
        assert ends == [1, 1], first[0].log()
        train_to_the_end(runs, "twice")
    assert (state_of(runs.folder / "twice"), metrics_of(runs.folder / "twice")) == unharmed


def test_a_process_that_wakes_after_the_run_has_ended_writes_nothing(runs, unharmed):
    """Nobody supervises: process 1 is frozen, process 0 gives up, the command is run again."""
    with runs.start("woken", faults="1:enter:step:7:SIGSTOP") as frozen:
        assert frozen[0].end() == 1
        assert "process 1 (host" in end_of(runs.folder / "woken")["reason"]
        train_to_the_end(runs, "woken")
        before = contents(runs.folder / "woken")
        frozen[1].send(signal.SIGCONT)
        assert frozen[1].end() not in (0, 75), frozen[1].log()
    after = contents(runs.folder / "woken")
    added = {name for name in after.keys() - before.keys() if not name.startswith("attempts/")}
    assert added == set()
    assert {name for name in before if after[name] != before[name]} == set()
    assert (state_of(runs.folder / "woken"), metrics_of(runs.folder / "woken")) == unharmed


def contents(workdir):
    return {
        str(file.relative_to(workdir)): file.read_bytes()
        for file in workdir.rglob("*")
        if file.is_file()
    }


def test_a_flipped_byte_costs_one_checkpoint(runs, unharmed):
    train_to_the_end(runs, "flipped", count=1)
    workdir = runs.folder / "flipped"
    newest = workdir / "checkpoints" / "16"
    largest = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with start_processes(
        1,
        ["eval", "--workdir", str(workdir)],
        folder=runs.folder / "logs-flipped",
        devices_per_process=4,
    ) as (process,):
        assert process.end() == 0, process.log()
        assert json.loads(process.log().strip().splitlines()[-1])["step"] == 14
        assert "16" in process.log()
    with runs.start("flipped", count=1) as (process,):
        assert process.end() == 0, process.log()
        assert "damaged-16" in process.log()
    assert sorted(p.name for p in (workdir / "checkpoints").glob("damaged*")) == ["damaged-16"]
    _, metrics = unharmed
    found = metrics_of(workdir)
    assert found.keys() == metrics.keys()
    assert list(found.values()) == pytest.approx(list(metrics.values()), rel=1e-5)
