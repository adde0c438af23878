"""Every second of a run has one cause, over restarts, rewinds and clocks that jump."""

import fractions
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts.goodput import CAUSES, Account, Goodput, read_account
from jaxtrain.run.phases import NAMES, Phases

DAY = 24 * 3600


class Machine:
    """Attempts of one run on clocks moved by hand; fractions of seconds, so that sums are exact."""

    def __init__(self, file=None):
        self.now = fractions.Fraction(50)
        self.wall = fractions.Fraction(10**9)
        self.file = file

    def start(self, previous=None):
        self.phases = Phases(lambda: self.now)
        self.goodput = Goodput(previous, self.phases, file=self.file, wall_clock=lambda: self.wall)

    def spend(self, seconds, phase=None, step=0):
        if phase is None:
            self.pass_time(seconds)
        else:
            with self.phases.phase(phase, step):
                self.pass_time(seconds)

    def pass_time(self, seconds):
        self.now += seconds
        self.wall += seconds

    def spent(self):
        """Causes that took time."""
        return {c: s for c, s in self.goodput.account().seconds.items() if s}


@pytest.fixture
def machine():
    machine = Machine()
    machine.start()
    return machine


def test_phases_are_causes_and_steps_are_productive(machine):
    for seconds, phase in ((4, "start"), (20, "compile"), (5, "data"), (60, "step"), (8, "save")):
        machine.spend(seconds, phase)
    machine.spend(3)
    assert machine.spent() == {
        "step": 60, "start": 4, "compile": 20, "data": 5, "save": 8, "idle": 3
    }  # fmt: skip
    line = machine.goodput.account().line()
    assert line["goodput"] == 0.6
    assert list(line["goodput_seconds"]) == list(CAUSES)
    assert (line["attempts"], line["restarts"]) == (1, 0)
    json.dumps(line, allow_nan=False)


def test_steps_past_the_checkpoint_become_replay(machine):
    machine.goodput.mark_replay(0)
    for step in range(1, 8):
        machine.spend(10 + step, "step", step)
        if step in (3, 6):
            machine.goodput.record(step)
    machine.goodput.record(7)
    recorded = machine.goodput.account()
    machine.pass_time(100)
    machine.start(recorded)
    machine.goodput.mark_replay(3)
    # 14 + 15 + 16 + 17 seconds are done again; 100 were spent away.
    assert machine.spent() == {"step": 36, "replay": 62, "down": 100}
    machine.spend(14, "step", 4)
    machine.goodput.record(4)
    assert machine.spent() == {"step": 50, "replay": 62, "down": 100}
    first, second = machine.goodput.account().attempts
    assert {c: s for c, s in first.items() if s} == {"step": 36, "replay": 62}
    assert {c: s for c, s in second.items() if s} == {"step": 14, "down": 100}


def test_replay_reaches_back_over_several_attempts(machine):
    for attempt in range(3):
        for step in (2 * attempt + 1, 2 * attempt + 2):
            machine.spend(10, "step", step)
            machine.goodput.record(step)
        machine.start(machine.goodput.account())
        machine.goodput.mark_replay(2 * attempt + 2)
    machine.goodput.mark_replay(1)
    assert machine.spent() == {"step": 10, "replay": 50}
    machine.start(machine.goodput.account())
    machine.goodput.mark_replay(0)
    assert machine.spent() == {"replay": 60}


def test_a_rewind_replays_the_steps_of_its_own_attempt(machine):
    for step in range(1, 6):
        machine.spend(10, "step", step)
        if step == 2:
            machine.goodput.record(step)
    machine.goodput.mark_replay(2, done=5)
    assert machine.spent() == {"step": 20, "replay": 30}
    for step in range(3, 6):
        machine.spend(10, "step", step)
    machine.goodput.record(5)
    assert machine.spent() == {"step": 50, "replay": 30}


def test_between_two_records_steps_are_taken_to_be_alike(machine):
    for step in range(1, 11):
        machine.spend(10, "step", step)
    machine.goodput.record(10)
    machine.goodput.mark_replay(4)
    assert machine.spent() == {"step": 40, "replay": 60}
    machine.spend(20, "step", 5)
    machine.goodput.record(5)
    machine.goodput.mark_replay(4)  # where it resumed is a point of its own
    assert machine.spent() == {"step": 40, "replay": 80}


def test_a_save_that_was_not_recorded_loses_no_productive_time(machine):
    machine.spend(10, "step", 1)
    machine.goodput.record(1)
    machine.start(machine.goodput.account())
    machine.goodput.mark_replay(2)
    assert machine.spent() == {"step": 10}


def test_skipped_updates_are_bad_time(machine):
    for step, seconds in enumerate((8, 10, 12, 10), start=1):
        machine.spend(seconds, "step", step)
    machine.goodput.mark_skipped(2)
    assert machine.spent() == {"step": 20, "bad": 20}
    machine.goodput.mark_skipped(50)
    assert machine.spent() == {"bad": 40}


def test_a_step_skipped_after_its_record_is_not_kept_by_a_rewind(machine):
    machine.spend(10, "step", 1)
    machine.goodput.record(1)
    machine.goodput.mark_skipped()
    machine.spend(40, "step", 2)
    machine.goodput.record(2)
    machine.goodput.mark_replay(1)
    # Nothing of step 1 was productive, so all that was is done again.
    assert machine.spent() == {"bad": 10, "replay": 40}


def test_a_stalled_phase_is_no_productive_time(machine):
    machine.spend(10, "step", 1)
    with machine.phases.phase("step", 2):
        machine.pass_time(300)
        machine.goodput.record(1, stalled=machine.phases.activity())
        assert machine.spent() == {"step": 10, "stall": 300}


@pytest.mark.parametrize(
    ("jump", "down"), [(0, 30), (-DAY, 0), (-10, 20)], ids=["none", "day back", "10 s back"]
)
def test_a_wall_clock_that_jumps_changes_the_time_down_alone(machine, jump, down):
    machine.spend(10, "step", 1)
    machine.wall += jump  # within an attempt: nobody looks
    machine.spend(10, "save")
    machine.goodput.record(1)
    machine.wall += 30 + jump
    machine.start(machine.goodput.account())
    machine.spend(5, "start")
    expected = {"step": 10, "save": 10, "start": 5, "down": down}
    assert machine.spent() == {c: s for c, s in expected.items() if s}


def test_the_time_until_somebody_goes_on_with_a_finished_run_is_no_loss(machine):
    machine.spend(10, "step", 1)
    machine.goodput.record(1, finished=True)
    machine.wall += DAY
    machine.start(machine.goodput.account())
    assert machine.spent() == {"step": 10}


OPERATIONS = st.one_of(
    st.tuples(st.just("spend"), st.sampled_from((*NAMES, None)), st.integers(0, 50)),
    st.tuples(st.just("steps"), st.integers(1, 4), st.integers(1, 50)),
    st.tuples(st.just("skip"), st.integers(1, 3)),
    st.tuples(st.just("rewind"), st.integers(0, 100)),
    st.tuples(st.just("restart"), st.integers(0, 100), st.integers(-50, 50)),
)


@given(st.lists(OPERATIONS, max_size=30))
def test_the_causes_sum_to_the_time_elapsed(operations):
    machine = Machine()
    machine.start()
    done = elapsed = 0
    for operation, *values in operations:
        if operation == "spend":
            phase, seconds = values
            machine.spend(seconds, phase)
            elapsed += seconds
        elif operation == "steps":
            count, seconds = values
            for _ in range(count):
                done += 1
                machine.spend(seconds, "step", done)
                elapsed += seconds
        elif operation == "skip":
            machine.goodput.mark_skipped(*values)
        elif operation == "rewind":
            before, done = done, done * values[0] // 100
            machine.goodput.mark_replay(done, done=before)
        else:
            percent, away = values
            machine.goodput.record(done)
            done = done * percent // 100
            machine.wall += away
            elapsed += max(0, away)
            machine.start(machine.goodput.account())
            machine.goodput.mark_replay(done)
        seconds = machine.goodput.account().seconds
        assert sum(seconds.values()) == elapsed
        assert min(seconds.values()) >= 0


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50), st.integers(0, 100)), max_size=9))
def test_productive_is_the_time_of_the_steps_that_were_kept(attempts):
    machine = Machine()
    machine.start()
    kept = []
    for count, seconds, percent in attempts:
        for _ in range(count):
            kept.append(seconds)
            machine.spend(seconds, "step", len(kept))
            machine.goodput.record(len(kept))
        kept = kept[: len(kept) * percent // 100]
        machine.start(machine.goodput.account())
        machine.goodput.mark_replay(len(kept))
        assert machine.goodput.account().seconds["step"] == sum(kept)


def test_a_long_run_keeps_a_small_file(machine):
    for step in range(1, 3001):
        machine.spend(2, "step", step)
        machine.goodput.record(step)
    assert len(machine.goodput.account().points) <= 1000
    machine.goodput.mark_replay(2990)
    assert machine.spent() == {"step": 5980, "replay": 20}
    machine.goodput.mark_replay(17)
    assert machine.spent() == {"step": 34, "replay": 5966}


def test_the_file_is_the_account(tmp_path):
    file = tmp_path / "goodput.json"
    assert read_account(file) is None
    now = 0.0
    phases = Phases(lambda: now)
    goodput = Goodput(None, phases, file=file, wall_clock=lambda: 1e9 + now)
    with phases.phase("step", 1):
        now = 0.1
    goodput.record(1)
    now = 0.3
    assert read_account(file) == Account(({"idle": 0.0, "step": 0.1},), ((1, 0.1),), 1e9 + 0.1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "attempts": 3, "recorded_at": null}']
)
def test_a_file_that_is_no_account_is_named(tmp_path, text):
    file = tmp_path / "goodput.json"
    file.write_text(text)
    with pytest.raises(UserError, match="goodput.json: not a goodput file .*remove it"):
        read_account(file)


ACCOUNT = Account(
    (
        {"start": 2.0, "compile": 8.0, "step": 60.0, "replay": 10.0},
        {"down": 5.0, "restore": 5.0, "step": 110.0},
    )
)


def test_the_terminal_shows_causes_and_a_sentence():
    stream = io.StringIO()
    ACCOUNT.show(Console(file=stream, width=100))
    text = stream.getvalue()
    assert "85.0%" in text
    assert "evaluating" not in text  # what took no time takes no line
    assert text.splitlines()[-1] == (
        "Goodput 85.0%: 2:50 of 3:20 was productive training time, with 1 restart; "
        "largest losses: steps repeated after a restart or rewind 10.0 s, compiling 8.0 s, "
        "reading a checkpoint 5.0 s"
    )


def test_an_account_of_no_time_can_be_shown():
    stream = io.StringIO()
    Account(({},)).show(Console(file=stream, width=100))
    assert "Goodput 0.0%" in stream.getvalue()
    assert Account(({},)).figure().axes


def test_the_picture_stacks_every_cause_of_every_attempt(tmp_path):
    (axes,) = ACCOUNT.figure().axes
    bars = {
        container.get_label(): [(bar.get_x(), bar.get_width()) for bar in container]
        for container in axes.containers
    }
    assert bars["step"] == [(0, 60), (0, 110)]
    assert bars["compile"][0] == (62, 8)
    assert bars["replay"][0] == (70, 10)
    assert bars["down"][1] == (115, 5)
    assert "evaluation" not in bars
    styles = {(c[0].get_facecolor(), c[0].get_hatch()) for c in axes.containers}
    assert len(styles) == len(axes.containers)
    ACCOUNT.draw(tmp_path / "goodput.png")
    with Image.open(tmp_path / "goodput.png") as image:
        assert image.format == "PNG"
        assert np.asarray(image).std() > 0


def test_every_cause_has_a_style_that_grey_can_tell():
    (axes,) = Account((dict.fromkeys(CAUSES, 1.0),)).figure().axes
    styles = {(c[0].get_facecolor(), c[0].get_hatch()) for c in axes.containers}
    assert len(styles) == len(CAUSES)
    assert all(red == green == blue for (red, green, blue, _), _ in styles)


def test_many_attempts_share_the_first_bar():
    (axes,) = Account(tuple({"step": 1.0} for _ in range(40))).figure().axes
    (steps,) = axes.containers
    assert [bar.get_width() for bar in steps] == [24] + [1] * 16
    assert axes.get_yticklabels()[0].get_text() == "1-24"


def test_the_legend_is_read_in_the_order_of_the_bars():
    figure = Account((dict.fromkeys(CAUSES, 1.0),)).figure()
    figure.canvas.draw()
    (legend,) = figure.legends
    places = [(text.get_window_extent(), text.get_text()) for text in legend.get_texts()]
    # Line by line from above, each from the left, as matplotlib has laid them out.
    read = sorted(places, key=lambda place: (-round(place[0].y0), place[0].x0))
    assert [text for _, text in read] == list(CAUSES.values())
