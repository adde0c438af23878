"""`Train.save_every='auto'`: the interval from measured costs, alike on all processes, resumed."""

import json
import os
import re
import sys

import jax
import numpy as np
import pytest
from cluster import start_processes

from jaxtrain import Trainer, load_config, plan
from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.save_schedule import FIRST_STEPS, AutomaticInterval
from jaxtrain.run.checkpoint.sealing import sealed_steps
from jaxtrain.run.phases import Phases

AUTO = "Train.save_every = 'auto'"
LINE = re.compile(r"Train\.save_every='auto': a save every ([\d,]+) steps .*? from step (\d+) on")


class Machine:
    """A run whose steps and saves take what the test says, by a clock of its own."""

    def __init__(self, *, mtbf, others=(0.0, 0.0), steps=100_000):
        self.now, self.lines, self.saves = 0.0, [], []
        self.phases = Phases(lambda: self.now)
        self.schedule = AutomaticInterval(
            mtbf=mtbf, steps=steps, phases=self.phases, report=self.lines.append,
            agree=lambda values: [max(pair) for pair in zip(values, others, strict=True)],
        )  # fmt: skip

    def train(self, steps, *, step_seconds, save_seconds, first=0):
        self.schedule.resume(first)
        for step in range(first + 1, first + steps + 1):
            with self.phases.phase("step", step):
                self.now += step_seconds
            if self.schedule.is_due(step):
                with self.phases.phase("save", step):
                    self.now += save_seconds
                self.schedule.record(step, save_seconds, waited_seconds=0.0)
                self.saves.append(step)


def time_lost(interval, step, save, mtbf):
    """Seconds lost of each second: saves, and half an interval a failure (Young 1974)."""
    return save / (interval * step) + interval * step / 2 / mtbf


@pytest.mark.parametrize(
    ("step", "save", "mtbf"), [(10.0, 2.0, 1e5), (0.5, 0.1, 1e6), (20.0, 60.0, 1e4)]
)
def test_the_interval_loses_the_least_time(step, save, mtbf):
    machine = Machine(mtbf=mtbf)
    machine.train(5_000, step_seconds=step, save_seconds=save)
    interval = machine.schedule.interval
    scanned = min(range(1, 100_000), key=lambda n: time_lost(n, step, save, mtbf))
    assert time_lost(interval, step, save, mtbf) == pytest.approx(
        time_lost(scanned, step, save, mtbf), rel=0.01
    )
    assert machine.saves[0] == FIRST_STEPS
    assert set(np.diff(machine.saves)) == {interval}
    assert len(machine.lines) == 1
    assert LINE.match(machine.lines[0])[1].replace(",", "") == str(interval)


def test_it_changes_at_a_save_where_costs_have_changed_and_is_reported_again():
    machine = Machine(mtbf=1e5)
    machine.train(2_000, step_seconds=10.0, save_seconds=2.0)
    first = machine.schedule.interval
    machine.train(4_000, step_seconds=10.0, save_seconds=50.0, first=2_000)
    assert machine.schedule.interval > 2 * first
    assert len(machine.lines) > 1
    changed = [int(LINE.match(line)[2]) for line in machine.lines]
    assert set(changed) <= set(machine.saves)
    # A few per cent change nothing.
    machine = Machine(mtbf=1e5)
    machine.train(2_000, step_seconds=10.0, save_seconds=2.0)
    machine.train(2_000, step_seconds=10.5, save_seconds=2.2, first=2_000)
    assert len(machine.lines) == 1


def test_the_first_save_counts_for_nothing_when_there_are_others():
    machine = Machine(mtbf=1e5)
    machine.train(FIRST_STEPS, step_seconds=10.0, save_seconds=200.0)
    slow = machine.schedule.interval
    machine.train(5_000, step_seconds=10.0, save_seconds=2.0, first=FIRST_STEPS)
    assert machine.schedule.interval == pytest.approx(slow / 10, rel=0.1)


def test_the_slowest_process_decides():
    alone, slow = Machine(mtbf=1e5), Machine(mtbf=1e5, others=(0.0, 50.0))
    for machine in (alone, slow):
        machine.train(3_000, step_seconds=10.0, save_seconds=2.0)
    assert slow.schedule.interval == pytest.approx(5 * alone.schedule.interval, rel=0.05)


def test_a_run_where_failures_are_rare_saves_at_its_end_alone():
    machine = Machine(mtbf=1e12, steps=400)
    machine.train(400, step_seconds=1.0, save_seconds=5.0)
    assert machine.saves == [FIRST_STEPS]
    assert machine.schedule.interval == 400


# -- a run ---------------------------------------------------------------------------------------


def _often(tiny_config, *more):
    # A failure every few seconds: saves of some milliseconds are then worth their time.
    bindings = [AUTO, "Checkpoint.mtbf = 0.002", "Checkpoint.keep = 100", "Train.steps = 70"]
    return load_config(tiny_config, [*bindings, "Train.eval_every = 0", *more])


# Two runs; the schedule alone is in the fast part.
@pytest.mark.slow
def test_a_run_saves_after_the_steps_that_it_reports_and_resumes(tiny_config, tmp_path):
    lines = []
    trainer = Trainer(_often(tiny_config), tmp_path / "run")
    trainer._saved.schedule._report = lines.append
    trainer.train()
    saved = sealed_steps(tmp_path / "run" / "checkpoints")
    assert saved[0] == FIRST_STEPS
    assert saved[-1] == 70
    interval, start = (int(LINE.match(lines[0])[n].replace(",", "")) for n in (1, 2))
    assert start == FIRST_STEPS
    expected = FIRST_STEPS + interval
    assert saved[1] == min(expected, 70)

    # Stopped at a step of its own choice and resumed, it ends with the same parameters.
    part = Trainer(_often(tiny_config), tmp_path / "part")
    part.train(33)
    part.close()
    resumed = Trainer(_often(tiny_config), tmp_path / "part")
    assert resumed.steps_done == 33
    resumed.train()
    assert FIRST_STEPS + 33 in sealed_steps(tmp_path / "part" / "checkpoints")
    for one, other in zip(
        jax.tree.leaves(trainer.state), jax.tree.leaves(resumed.state), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_failures_of_a_run_are_those_of_all_its_devices(tiny_config, tmp_path):
    """Device-hours between failures, of eight devices, in seconds."""
    trainer = Trainer(load_config(tiny_config, [AUTO, "Checkpoint.mtbf = 100.0"]), tmp_path)
    assert trainer._saved.schedule._mtbf == 100 * 3600 / 8
    trainer.close()


def test_without_a_folder_nothing_is_measured(tiny_config):
    trainer = Trainer(_often(tiny_config, "Train.steps = 25"))
    trainer.train()
    assert not isinstance(trainer._saved.schedule, AutomaticInterval)


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (["Train.save_every = 'often'"], "save_every"),
        ([AUTO, "Checkpoint.mtbf = 0.0"], r"Checkpoint\.mtbf=0; use device-hours"),
        ([AUTO, "Checkpoint.mtbf = -5.0"], r"Checkpoint\.mtbf=-5; use device-hours"),
    ],
)
def test_bad_values_are_rejected(tiny_config, bindings, words):
    with pytest.raises(UserError, match=words):
        load_config(tiny_config, bindings)


def test_checkpoints_kept_by_step_need_saves_at_those_steps(tiny_config, tmp_path, capsys):
    words = ["-b", AUTO, "-b", "Checkpoint.keep_every = 500", "--workdir", str(tmp_path / "run")]
    assert main(["train", str(tiny_config), *words]) == 2
    assert "Checkpoint.keep_every=500 with Train.save_every='auto'" in capsys.readouterr().err


def test_a_plan_takes_the_rate_of_the_config_and_names_auto():
    bindings = ["Mesh.data=-1", "Mesh.fsdp=1", "Mesh.tensor=1", AUTO, "Checkpoint.mtbf=1000.0"]
    report = plan(load_config("gpt_quickstart", bindings), "h100:1x8", compile=False, goodput=True)
    assert report.goodput is not None
    assert report.goodput.mtbf == 1000 * 3600 / 8
    assert report.to_json()["goodput"]["configured_save_every"] is None
    assert "Train.save_every='auto' chooses it" in report.table()


# -- several processes ---------------------------------------------------------------------------

PROGRAM = """
import os, sys
from jaxtrain.__main__ import main
from jaxtrain.run.checkpoint.save_schedule import AutomaticInterval
record = AutomaticInterval.record
def slower(self, step, save_seconds, *, waited_seconds):
    more = 5.0 * int(os.environ["PROCESS"])  # what process 1 alone measures
    record(self, step, save_seconds + more, waited_seconds=waited_seconds)
AutomaticInterval.record = slower
words = os.environ["WORDS"].split("|")
names = {name: os.environ[name] for name in ("COORDINATOR", "COUNT", "PROCESS")}
sys.exit(main([word.format(**names) for word in words]))
"""


# Starts Python twice; the agreement between processes is checked above without them.
@pytest.mark.slow
def test_all_processes_save_at_the_same_steps_though_one_measures_more(tiny_config, tmp_path):
    """Process 1 alone would not save before the end; process 0 alone every few steps."""
    words = ["train", str(tiny_config), "--workdir", str(tmp_path / "run")]
    words += ["--coordinator", "{COORDINATOR}", "--num-processes", "{COUNT}"]
    words += ["--process-id", "{PROCESS}"]
    for binding in (
        AUTO, "Checkpoint.mtbf = 0.0005", "Checkpoint.keep = 100", "Train.steps = 45",
        "Train.eval_every = 0", "Mesh.data = 2", "Mesh.fsdp = 1", "Mesh.tensor = 1",
    ):  # fmt: skip
        words += ["-b", binding]
    environment = {"WORDS": "|".join(words), "PYTHONPATH": os.pathsep.join(sys.path)}
    with start_processes(
        2, PROGRAM, folder=tmp_path, environment=environment, limit_seconds=240
    ) as processes:
        assert [process.end() for process in processes] == [0, 0]
        log = " ".join(processes[0].log().split())
    found = LINE.search(log)
    assert found is not None, log
    assert re.search(r"A save takes ([5-9]|1\d)(\.\d*)? s", log), log  # process 1's, said by 0
    interval = int(found[1].replace(",", ""))
    saved = sealed_steps(tmp_path / "run" / "checkpoints")
    assert saved[:2] == [FIRST_STEPS, min(FIRST_STEPS + interval, 45)]
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["status"] == "done"
