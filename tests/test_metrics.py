"""Lines, throughput, what is waited for, and what a resume keeps of a run's metrics."""

import io
import json
import time
import tracemalloc
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jaxtrain.parallel import chips
from jaxtrain.run.metrics import files as metrics_file
from jaxtrain.run.metrics import log as metrics
from jaxtrain.run.show import figures
from jaxtrain.run.show.figures import loss_png
from jaxtrain.training.guard import BadStepError
from jaxtrain.training.objectives.objective import Baseline, Yardstick

RATES = {"tokens_per_second", "step_seconds", "mfu"}
YARDSTICK = Yardstick(baselines=(Baseline("loss", "unigram entropy", 3.25),))
TRAIN_KEYS = {"step", "loss", "grad_norm", "learning_rate"} | RATES


class DeviceScalar:
    """Stands for a scalar on a device: notes when it is read."""

    def __init__(self, name, value, reads):
        self.name, self.value, self.reads = name, value, reads

    def __array__(self, dtype=None, copy=None):
        self.reads.append(self.name)
        return np.asarray(self.value, dtype)

    def item(self):
        return np.asarray(self).item()

    def block_until_ready(self):
        self.reads.append(self.name)
        return self


@pytest.fixture
def clock_by_hand(monkeypatch):
    """A clock whose `now` the test moves."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def make_log(workdir, **changes):
    settings = {
        "total_steps": 10,
        "unit": "tokens",
        "units_per_step": 2048,
        "flops_per_step": None,
        "peak_flops": None,
        "first_step": 0,
        "log_every": 1,
        "terminal": Console(file=io.StringIO(), width=200),
    }
    return metrics.MetricsLog(workdir, **(settings | changes))


def scalars(step, loss=None):
    return {
        "loss": jnp.float32(5.0 - 0.25 * step if loss is None else loss),
        "grad_norm": jnp.float32(1.5),
        "learning_rate": jnp.float32(0.5**step),
    }


def run(log, first, last):
    for step in range(first, last + 1):
        log.later(step, scalars(step))


def read(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in text.splitlines()
    ]


def printed(log_console):
    return log_console.file.getvalue().splitlines()


def events(workdir):
    """(tag, step, value) of every scalar, and the steps from which a purge was asked for."""
    found, purges = [], []
    for file in sorted((workdir / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):  # TFRecord: length (8), crc (4), payload, crc (4)
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            if event.HasField("session_log"):
                purges.append(event.step)
    return found, purges


# -- lines -----------------------------------------------------------------------------------------


def test_lines_have_the_contracts_keys_in_order_of_steps(tmp_path):
    log = make_log(tmp_path)
    run(log, 1, 4)
    log.now(4, {"eval_loss": 4.25, "eval_accuracy": 0.5})
    run(log, 5, 6)
    log.close()
    lines = read(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6]
    assert lines[4] == {"step": 4, "eval_loss": 4.25, "eval_accuracy": 0.5}
    training = [line for line in lines if "loss" in line]
    assert all(set(line) == TRAIN_KEYS and line["mfu"] is None for line in training)
    assert [line["loss"] for line in training] == [5.0 - 0.25 * s for s in range(1, 7)]
    assert [line["learning_rate"] for line in training] == [0.5**s for s in range(1, 7)]


def test_a_line_at_step_one_every_log_every_steps_and_the_last(tmp_path):
    log = make_log(tmp_path, log_every=4, total_steps=10)
    run(log, 1, 10)
    log.close()
    assert [line["step"] for line in read(tmp_path)] == [1, 4, 8, 10]


def test_images_are_counted_as_images(tmp_path):
    log = make_log(tmp_path, unit="images")
    run(log, 1, 1)
    log.close()
    (line,) = read(tmp_path)
    assert line["images_per_second"] == pytest.approx(2048 / line["step_seconds"])
    assert "tokens_per_second" not in line


def test_throughput_is_measured_over_the_window_without_the_first_step(tmp_path, clock_by_hand):
    log = make_log(tmp_path, log_every=5, flops_per_step=3e12, peak_flops=6e12)
    clock_by_hand.now += 60  # the first step compiles for a minute
    log.later(1, scalars(1))
    log.flush()
    for step in range(2, 11):
        clock_by_hand.now += 2
        log.later(step, scalars(step))
        log.flush()
    log.close()
    first, *others = read(tmp_path)
    assert first["step_seconds"] == pytest.approx(60)
    assert [line["step"] for line in others] == [5, 10]
    for line in others:
        assert line["step_seconds"] == pytest.approx(2)
        assert line["tokens_per_second"] == pytest.approx(1024)
        assert line["mfu"] == pytest.approx(3e12 / 2 / 6e12)


def test_a_pause_is_not_counted_as_training(tmp_path, clock_by_hand):
    log = make_log(tmp_path, log_every=2)
    for step in range(1, 7):
        clock_by_hand.now += 3
        log.later(step, scalars(step))
        with log.pause():
            clock_by_hand.now += 100
    log.close()
    assert [line["step_seconds"] for line in read(tmp_path)] == pytest.approx([3, 3, 3, 3])


def test_a_resumed_attempts_compilation_is_not_counted(tmp_path, clock_by_hand):
    log = make_log(tmp_path, first_step=4, log_every=4)
    clock_by_hand.now += 60
    log.later(5, scalars(5))
    log.flush()
    for step in range(6, 9):
        clock_by_hand.now += 2
        log.later(step, scalars(step))
    log.close()
    (line,) = read(tmp_path)
    assert (line["step"], line["step_seconds"]) == (8, pytest.approx(2))


# -- never on the step's path ----------------------------------------------------------------------


def test_a_step_is_not_read_before_two_later_ones_are_dispatched(tmp_path):
    reads = []
    log = make_log(tmp_path)
    for step in range(1, 7):
        values = {n: DeviceScalar(step, 1.0, reads) for n in ("loss", "grad_norm", "learning_rate")}
        log.later(step, values)
        assert max(reads, default=0) == max(step - metrics.RUN_AHEAD_STEPS, 0)
    log.close()
    assert max(reads) == 6


def test_steps_without_a_line_are_waited_for_too(tmp_path):
    reads = []
    log = make_log(tmp_path, log_every=100, total_steps=100)
    for step in range(1, 7):
        log.later(step, {"loss": DeviceScalar(step, 1.0, reads)})
    assert sorted(set(reads)) == [1, 2, 3, 4]  # the run-ahead stays bounded


def test_nothing_is_read_implicitly(tmp_path):
    log = make_log(tmp_path)
    values = [scalars(step) for step in range(1, 5)]
    with jax.transfer_guard("disallow"):
        for step, value in enumerate(values, 1):
            log.later(step, value)
        log.close()
    assert len(read(tmp_path)) == 4


# -- losses that are not finite --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_after_its_line(tmp_path, bad):
    log = make_log(tmp_path, log_every=5)
    run(log, 1, 6)
    log.later(7, scalars(7, loss=bad))
    log.later(8, scalars(8))
    with pytest.raises(BadStepError, match=f"step 7 is bad, the loss is {bad}") as raised:
        log.later(9, scalars(9))
    assert raised.value.step == 7
    assert isinstance(raised.value, FloatingPointError)
    log.close()
    lines = read(tmp_path)
    assert [line["step"] for line in lines] == [1, 5, 7]
    assert lines[-1]["loss"] is None  # strict JSON has neither NaN nor infinity
    assert lines[-1]["grad_norm"] == 1.5


def test_a_pause_finds_the_bad_loss_before_anything_is_saved():
    log = make_log(None)
    log.later(1, scalars(1, loss=float("nan")))
    with pytest.raises(BadStepError), log.pause():
        pytest.fail("the state of a bad step would have been saved")
    log.close()


# -- resuming --------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    log = make_log(whole, log_every=3)
    run(log, 1, 10)
    log.close()
    log = make_log(parted, log_every=3)
    run(log, 1, 8)  # the checkpoint is of step 5: 6 to 8 are done twice
    log.now(8, {"eval_loss": 1.0})
    log.close()
    log = make_log(parted, log_every=3, first_step=5)
    run(log, 6, 10)
    log.close()

    def losses(workdir):
        return [(line["step"], line["loss"]) for line in read(workdir)]

    assert losses(parted) == losses(whole)
    found, purges = events(parted)
    assert ("loss", 9, 2.75) in found
    assert purges == [0, 6]


def test_a_drawing_holds_no_more_of_a_run_than_its_points(tmp_path):
    """Else a run's memory grows with its length: what is freed again stays with the process."""
    file, steps = tmp_path / "metrics.jsonl", 4000
    rest = {f"number_{index}": 0.1 * index for index in range(20)}
    file.write_text(
        "".join(
            json.dumps({"step": step, "loss": None if step == 7 else 1.5, **rest}) + "\n"
            for step in range(steps)
        )
    )
    loss_png([{"step": 1, "loss": 1.0}])  # fonts
    tracemalloc.start()
    seen = sum(1 for _ in metrics_file.each_line(file))
    of_reading = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    loss_png(metrics_file.each_line(file))
    of_drawing = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == steps
    assert of_reading < 0.05 * file.stat().st_size
    # The picture, and two numbers of each line: far less than the text, let alone its objects.
    loss_free = tmp_path / "short.jsonl"
    loss_free.write_text('{"step": 1, "loss": 1.5}\n')
    tracemalloc.start()
    loss_png(metrics_file.each_line(loss_free))
    of_picture = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert of_drawing - of_picture < file.stat().st_size
    assert metrics_file.read_lines(file)[7]["loss"] is None


def test_a_torn_last_line_is_dropped(tmp_path):
    log = make_log(tmp_path)
    run(log, 1, 4)
    log.close()
    file = tmp_path / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[: text.rindex("step_seconds")])
    log = make_log(tmp_path, first_step=4)
    run(log, 5, 6)
    log.close()
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3, 5, 6]


def test_a_run_that_starts_anew_keeps_no_lines(tmp_path):
    for _ in range(2):
        log = make_log(tmp_path)
        log.now(0, {"eval_loss": 5.0})
        run(log, 1, 2)
        log.close()
    assert [line["step"] for line in read(tmp_path)] == [0, 1, 2]


# Bytes between two good lines, and why they are no line of metrics.
DAMAGES = {
    b"hello\n": "Expecting value",
    b"null\n": "not an object",
    b'{"step": 2, "lo\xffss": 1.5}\n': "can't decode byte 0xff",
    b'{"step": 2, "loss": 1.5\x00}\n': "Expecting ',' delimiter",
    b'{"loss": 1.5}\n': "no step number",
    b'{"step": true}\n': "step True",
    b"[" * 100_000 + b"\n": "nested more than 64 levels deep",
    bytes(5000) + b"\n": "Expecting value",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: repr(damage[:20]))
def test_a_resume_moves_damaged_lines_aside_and_keeps_the_others(tmp_path, capsys, damage):
    file = tmp_path / "metrics.jsonl"
    first, last = b'{"step": 1, "loss": 2.0}\n', b'{"step": 3, "loss": 1.0}\n'
    file.write_bytes(first + damage + last)
    assert [line["step"] for line in metrics_file.read_lines(file)] == [1, 3]
    read_once = capsys.readouterr().err
    assert "metrics.jsonl: 1 damaged line (line 2: " in read_once
    assert DAMAGES[damage] in read_once
    assert file.read_bytes() == first + damage + last

    log = make_log(tmp_path, first_step=3)
    assert capsys.readouterr().err.endswith(
        "); moved to metrics.damaged.jsonl; the other lines are kept\n"
    )
    run(log, 4, 4)
    log.close()
    assert file.read_bytes().startswith(first + last)
    assert [line["step"] for line in read(tmp_path)] == [1, 3, 4]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damage
    assert metrics_file.lines_of(tmp_path) == read(tmp_path)
    assert capsys.readouterr().err == ""


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    def power_cut(descriptor):
        raise OSError("power cut")

    monkeypatch.setattr("os.fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        metrics_file.drop_lines_past(file, 1)
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


# -- TensorBoard, loss.png, exit.json, peaks -------------------------------------------------------


def test_event_files_hold_the_same_metrics(tmp_path):
    log = make_log(tmp_path)
    run(log, 1, 3)
    log.now(3, {"eval_loss": 4.5})
    log.close()
    found, _ = events(tmp_path)
    expected = {
        (name, line["step"], np.float32(value))
        for line in read(tmp_path)
        for name, value in line.items()
        if name != "step" and value is not None
    }
    assert {(tag, step, np.float32(value)) for tag, step, value in found} == expected


def test_the_plot_is_a_picture_at_evaluations_and_at_the_end(tmp_path):
    log = make_log(tmp_path, yardstick=YARDSTICK)
    run(log, 1, 4)
    log.now(4, {"eval_loss": 4.5})
    log._files._drawing.result()
    at_evaluation = (tmp_path / "loss.png").read_bytes()
    run(log, 5, 8)
    log.close()
    at_end = (tmp_path / "loss.png").read_bytes()
    assert at_end != at_evaluation
    with Image.open(tmp_path / "loss.png") as image:
        image.load()
        assert image.format == "PNG"
        assert image.width >= 600
        assert len(set(image.convert("L").tobytes())) > 10
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_runs_of_one_process_draw_with_the_same_fonts(tmp_path):
    """As a notebook's, which trains again and again: matplotlib keeps each thread's fonts open."""
    counts = []
    for number in range(4):
        files = metrics_file.MetricsFiles(tmp_path / f"{number}", 0, Yardstick())
        files.write({"step": 1, "loss": 2.0})
        files.close()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[1:] == counts[:1] * 3


def test_a_resumed_runs_plot_shows_the_whole_curve(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "loss_png", lambda lines, refs: drawn.append(lines) or b"")
    for first, last in ((0, 4), (4, 6)):
        log = make_log(tmp_path, first_step=first)
        run(log, first + 1, last)
        log.close()
    assert [line["step"] for line in drawn[-1]] == [1, 2, 3, 4, 5, 6]


def test_only_process_zero_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    console = Console(file=io.StringIO())
    log = make_log(tmp_path, terminal=console)
    run(log, 1, 3)
    log.now(3, {"eval_loss": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert console.file.getvalue() == ""


def test_the_console_shows_lines_as_they_are_settled(tmp_path, clock_by_hand):
    console = Console(file=io.StringIO())
    log = make_log(tmp_path, unit="images", terminal=console, total_steps=2)
    for step in (1, 2):
        clock_by_hand.now += 2
        log.later(step, scalars(step))
        log.flush()
    log.now(2, {"eval_loss": 2.5, "eval_accuracy": 0.25})
    log.close()
    assert printed(console) == [
        "step 1/2  loss 4.75  1.0k images/s  2 s/step  eta ?",
        "step 2/2  loss 4.5  1.0k images/s  2 s/step  eta 0:00",
        "step 2/2  eval_loss 2.5  eval_accuracy 0.25",
    ]


def test_without_a_folder_there_are_figures_but_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO())
    log = make_log(None, terminal=console)
    run(log, 1, 3)
    log.close()
    assert len(printed(console)) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_rewound_run_without_a_folder_has_each_step_once():
    lines: list = []
    for first, last in ((0, 4), (2, 6)):
        log = make_log(None, first_step=first, log_every=1, history=lines)
        run(log, first + 1, last)
        log.close()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_peaks():
    assert chips.peak_flops("NVIDIA H200") == 989e12
    assert chips.peak_flops("TPU v5 lite") == 197e12
    assert chips.peak_flops("cpu") is None
    assert chips.peak_flops("NVIDIA H200", "float8") == 1979e12
    assert chips.peak_flops("cpu", "float8") is None
