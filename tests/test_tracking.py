"""Trackers: lines that survive a resume, each once, and services that fail or are not there."""

import json
import struct
import sys
import time

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.sealing import sealed_steps
from jaxtrain.run.metrics.files import METRICS_FILE, drop_lines_past, lines_of, numbers_of
from jaxtrain.run.metrics.tracking import Tracking, open_service
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.compiled_step import Stepper
from jaxtrain.training.settings import Tracker, load_config


class Service:
    """Keeps what it is given; as many calls as `failing` fail first."""

    name = "track"

    def __init__(self, run="run 7", failing=0):
        self.run, self.failing, self.got = run, failing, []

    def track(self, step, metrics):
        if self.failing:
            self.failing -= 1
            raise ConnectionError("no route")
        self.got.append((step, metrics))

    def close(self):
        self.got.append("closed")


def write(folder, *steps):
    with (folder / METRICS_FILE).open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1 / step, "mfu": None, "why": "x"}) + "\n")


def tracking(folder, service, said=None):
    asked = []

    def opened(run):
        asked.append(run)
        return service

    found = Tracking(opened, "track", folder, [], (said if said is not None else []).append)
    found.go_on()
    return found, asked[0]


# -- what is given, and when -----------------------------------------------------------------------


def test_a_line_is_given_once_its_step_is_saved_and_never_again(tmp_path):
    write(tmp_path, 1, 2, 2, 3)
    service = Service()
    one, asked = tracking(tmp_path, service)
    assert asked is None
    one.up_to(2)
    one.up_to(2)
    one.close()
    assert service.got == [(1, {"loss": 1}), (2, {"loss": 0.5}), (2, {"loss": 0.5}), "closed"]

    # The next start knows the run, and goes on behind what was given.
    again = Service()
    one, asked = tracking(tmp_path, again)
    assert asked == "run 7"
    write(tmp_path, 4)
    one.up_to(3)
    one.close()
    assert again.got == [(3, {"loss": 1 / 3}), "closed"]


def test_a_damaged_line_is_skipped_and_the_next_given(tmp_path):
    write(tmp_path, 1)
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b"null\n\xff\n")
    write(tmp_path, 2, 3)
    service, said = Service(), []
    one, _ = tracking(tmp_path, service, said)
    one.up_to(2)
    one.close()
    assert ([step for step, _ in service.got[:-1]], said) == ([1, 2], [])
    # The repair of a resume shortens the file: the position is now within the line of step 3.
    drop_lines_past(tmp_path / METRICS_FILE, 2)
    write(tmp_path, 3, 4, 5)
    again = Service()
    one, _ = tracking(tmp_path, again, said)
    one.up_to(5)
    one.close()
    assert [step for step, _ in again.got[:-1]] == [3, 4, 5]
    assert said == []


def test_lines_that_a_run_takes_back_are_given_as_they_became(tmp_path):
    write(tmp_path, 1, 2, 3, 4)
    service = Service()
    one, _ = tracking(tmp_path, service)
    one.up_to(4)
    one.go_on()  # in its thread, behind that
    (tmp_path / METRICS_FILE).unlink()  # back to step 2: its lines are those of a shorter file
    write(tmp_path, 1, 2)
    one.go_on()
    write(tmp_path, 3)
    one.up_to(3)
    one.close()
    assert [step for step, _ in service.got[:-1]] == [1, 2, 3, 4, 3]


def test_half_a_line_waits_for_its_rest(tmp_path):
    write(tmp_path, 1)
    service, said = Service(), []
    one, _ = tracking(tmp_path, service, said)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "lo')
        file.flush()
        one.up_to(2)
        one.go_on()  # in its thread, behind that
        assert [step for step, _ in service.got] == [1]
        file.write('ss": 3}\n')
    one.up_to(2)
    one.close()
    assert service.got[1:] == [(2, {"loss": 3}), "closed"]
    assert not said


def test_a_service_that_fails_is_told_and_given_the_lines_again(tmp_path):
    write(tmp_path, 1, 2)
    service, said = Service(failing=1), []
    one, _ = tracking(tmp_path, service, said)
    one.up_to(1)
    one.up_to(2)
    one.close()
    assert [step for step, _ in service.got[:-1]] == [1, 2]
    assert said == [
        "track did not accept the metrics up to step 1 (no route); they are sent again at the "
        "next checkpoint"
    ]


# -- runs ------------------------------------------------------------------------------------------

BINDINGS = [
    "Train.global_batch_size = 8", "Train.log_every = 1", "Train.eval_every = 4",
    "Train.save_every = 2", "Train.eval_batches = 1", "MLP.widths = (64, 10)",
]  # fmt: skip


# Starts a run three times; a run's lines in MLflow are in the fast part.
@pytest.mark.slow
def test_a_function_gets_each_line_that_survives_a_killed_run(tmp_path, monkeypatch):
    got, early = [], []

    def track(step, metrics):
        if max(sealed_steps(tmp_path / "checkpoints"), default=0) < step:
            early.append(step)  # told before its checkpoint was there
        got.append((step, dict(metrics)))

    def trainer(steps):
        config = load_config("mlp_digits", bindings=[*BINDINGS, f"Train.steps = {steps}"])
        return Trainer(config, tmp_path, track=track)

    killed = Stepper.step_and_check

    def dies_at_8(self, batch, step):
        if step == 8:
            raise KeyboardInterrupt
        return killed(self, batch, step)

    monkeypatch.setattr(Stepper, "step_and_check", dies_at_8)
    first = trainer(9)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.close()
    assert {line["step"] for line in lines_of(tmp_path)} == set(range(1, 8))
    assert [step for step, _ in got][:5] == [1, 2, 3, 4, 4]
    assert max(step for step, _ in got) <= 6
    monkeypatch.setattr(Stepper, "step_and_check", killed)
    second = trainer(9)
    second.train()
    second.close()
    whole = [(line["step"], numbers_of(line)) for line in lines_of(tmp_path)]
    assert got == whole
    assert not early
    assert [step for step, _ in whole] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 9]


def test_a_run_in_memory_gives_its_lines_at_its_end():
    got = []
    config = load_config("mlp_digits", bindings=[*BINDINGS, "Train.steps = 2"])
    trainer = Trainer(config, track=lambda step, metrics: got.append(step))
    trainer.train()
    trainer.close()
    assert got == [line["step"] for line in trainer.history] == [1, 2, 2]


# -- services --------------------------------------------------------------------------------------


def settings(name):
    return {
        "settings": Tracker(name=name, project="birds"), "named": "run_1", "config": "A.b = 1\n",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed_is_refused_by_its_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"needs jaxtrain\[{name}\] .* pip install 'jaxtrain"):
        open_service(run=None, folder=None, **settings(name))


def mlflow_client(folder, monkeypatch):
    """MLflow's own reader of a file store in a folder, which runs write to from now on."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", folder.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient()


def train_with(name, folder, steps):
    """Trains, or resumes, a run that reports to a service; returns its history."""
    bindings = [*BINDINGS, f"Train.steps = {steps}", f"Tracker.name = {name!r}"]
    config = load_config("mlp_digits", bindings=[*bindings, "Tracker.project = 'birds'"])
    trainer = Trainer(config, folder)
    trainer.train()
    trainer.close()
    return trainer.history


def series(lines, name):
    """The values of one metric in lines of metrics.jsonl, with their steps."""
    return [(line["step"], line[name]) for line in lines if name in line]


# Two runs; the service itself is checked below.
@pytest.mark.slow
def test_mlflow_has_the_metrics_of_a_trained_and_a_resumed_run(tmp_path, monkeypatch):
    client = mlflow_client(tmp_path / "store", monkeypatch)
    for steps in (2, 4):
        train_with("mlflow", tmp_path / "run", steps)
    (run,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    lines = lines_of(tmp_path / "run")
    for name, count in (("loss", 4), ("eval_loss", 2)):
        found = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in found] == series(lines, name)
        assert len(found) == count
    assert run.info.status == "FINISHED"
    assert "Train.steps = 2" in run.data.tags["config.gin"]


def test_mlflow_has_the_metrics_of_a_run_in_memory(tmp_path, monkeypatch):
    client = mlflow_client(tmp_path / "store", monkeypatch)
    history = train_with("mlflow", None, 2)
    (run,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    found = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in found] == series(history, "loss")
    assert len(found) == 2


def wandb_records(data):
    """The records of an offline run: LevelDB's log format behind a header of 7 bytes."""
    parts, at = [], 7
    while len(data) - at > 7:
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def wandb_history(folder):
    """The logged rows of all starts, in wandb's own message types, by the run's id."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        rows = found.setdefault(file.stem.removeprefix("run-"), [])
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                names = [item.key or ".".join(item.nested_key) for item in items]
                values = [json.loads(item.value_json) for item in items]
                rows.append(dict(zip(names, values, strict=True)))
    return found


@pytest.mark.slow
def test_wandb_has_the_metrics_of_a_trained_and_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (2, 4):
        train_with("wandb", tmp_path, steps)
    (rows,) = wandb_history(tmp_path).values()  # one run, which both starts continue
    lines = lines_of(tmp_path)
    for name, count in (("loss", 4), ("eval_loss", 2)):
        found = [(row["_step"], row[name]) for row in rows if name in row]
        assert found == series(lines, name)
        assert len(found) == count


def test_mlflow_has_the_numbers_of_both_starts(tmp_path, monkeypatch):
    client = mlflow_client(tmp_path, monkeypatch)
    first = open_service(run=None, folder=None, **settings("mlflow"))
    first.track(1, {"loss": 2.5, "mfu": 0.25})
    first.close()
    second = open_service(run=first.run, folder=None, **settings("mlflow"))
    second.track(3, {"loss": 1.5})
    second.close()
    assert client.get_experiment_by_name("birds").name == "birds"
    found = client.get_metric_history(first.run, "loss")
    assert [(one.step, one.value) for one in found] == [(1, 2.5), (3, 1.5)]
    run = client.get_run(first.run)
    assert (run.info.run_name, run.info.status) == ("run_1", "FINISHED")
    assert run.data.tags["config.gin"] == "A.b = 1\n"


# Starts wandb's service; MLflow's client is in the fast part.
@pytest.mark.slow
def test_wandb_has_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    service = open_service(run="gull2345", folder=tmp_path, **settings("wandb"))
    assert service.run == "gull2345"
    service.track(1, {"loss": 2.5})
    service.track(3, {"loss": 1.5})
    service.close()
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*/run-{service.run}.wandb")
    for _ in range(100):  # another process writes it
        if file.read_bytes().count(b"loss") >= 2:
            break
        time.sleep(0.1)
    assert b"birds" in file.read_bytes()
    assert file.read_bytes().count(b"loss") >= 2


def test_a_service_that_cannot_be_reached_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(UserError, match="Tracker.name = 'mlflow': it cannot be reached"):
        open_service(run=None, folder=None, **settings("mlflow"))
