"""The benchmark of a start: what modules take by package, and a program to its first step."""

import pytest

from benchmarks.cpu_rows import ROWS
from benchmarks.first_step import CONFIGS, length_of_union
from benchmarks.start import packages, start
from jaxtrain.config.shipped import find_config
from jaxtrain.training.compiled_step import Stepper

REPORT = """\
import time: self [us] | cumulative | imported package
import time:      1500 |       1500 |     numpy._core
import time:       500 |       2000 |   numpy
jaxtrain: a line of something else
import time:       250 |       2250 | jaxtrain.cli
"""


def test_modules_are_added_up_by_package_without_what_they_import():
    found = packages(REPORT.splitlines())
    assert list(found.items()) == [("numpy", 2.0), ("jaxtrain", 0.25)]


def test_a_program_is_measured_to_its_first_step_and_killed_there(tmp_path):
    code = "import time; print('start', flush=True); print(' step 1/9', flush=True); {}"
    forever = code.format("time.sleep(10**6)")
    found = start(("-c", forever), "step 1/", tmp_path / "stderr")
    assert found["seconds"] > 0
    assert found["cpu_seconds"] > 0
    with pytest.raises(RuntimeError, match="no such step"):
        start(("-c", "raise SystemExit('no such step')"), "step 1/", tmp_path / "stderr")
    with pytest.raises(RuntimeError, match="wrong"):
        start(("-c", "raise SystemExit('wrong')"), None, tmp_path / "stderr")


def test_spans_that_overlap_are_counted_once():
    assert length_of_union([(3, 4), (0, 2), (1, 2.5), (1.5, 2)]) == 3.5
    assert length_of_union([]) == 0


def test_first_steps_are_those_of_shipped_configs_and_end_in_the_stepper():
    for config in CONFIGS:
        find_config(config)
    assert callable(Stepper.step_and_check)
    assert {"gpt_quickstart", "lenet_mnist5k", "lstm_quickstart"} <= {
        row.config for row in ROWS.values()
    }
