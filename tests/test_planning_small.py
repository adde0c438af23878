"""Plans of models that are small for their machine: units, scales, and the overhead of a launch."""

import pytest

from jaxtrain import load_config, plan
from jaxtrain.analysis.planning.show import plan_figure
from jaxtrain.run.show.progress import byte_unit, human_seconds, time_unit


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (-1.694e-21, "0"),  # what is left of two equal numbers
        (0.0, "0"),
        (5e-8, "0.05 us"),
        (3.4474e-3, "3.447 ms"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (36_000.0, "10 hours"),
        (1.08e6, "12.5 days"),
        (1.08e9, "12,500 days"),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds, written):
    assert human_seconds(seconds) == written


def test_axes_have_the_unit_that_suits_them():
    assert [byte_unit(size).name for size in (0, 1023, 1024, 3 << 20, 5 << 30, 7 << 40)] == [
        "B", "B", "KiB", "MiB", "GiB", "TiB",
    ]  # fmt: skip
    assert time_unit(2e-5) == (1e-6, "us")


@pytest.fixture(scope="module")
def small():
    bindings = ["GPT.num_layers = 2", "Mesh.tensor = 1", "Mesh.fsdp = 8"]
    return plan(load_config("gpt_quickstart", bindings), target="h100:1x8", compile=False)


def test_a_small_plan_is_drawn_on_its_own_scale(small):
    memory, time, traffic = plan_figure(small).axes
    assert memory.get_ylabel() == "MiB of one device"
    drawn = sum(bar.get_height() for bar in memory.patches)
    assert drawn == pytest.approx(small.total / 2**20)
    assert drawn > 0.8 * memory.get_ylim()[1]  # and not at its foot
    legend = [text.get_text() for text in memory.get_legend().get_texts()]
    times = small.target.chip.hbm_bytes / small.total
    assert times > 5000
    assert any(f"capacity 74.4 GiB: {times:,.0f} times as much" in text for text in legend)
    assert time.get_ylabel() == "us, predicted"
    assert traffic.get_xlabel() == "MiB by one device"
    assert traffic.get_ylabel() == "mesh axis"


def test_a_large_plan_is_drawn_against_the_capacity():
    large = plan(load_config("llama_8b"), target="v5p:4x4x4", compile=False)
    memory = plan_figure(large).axes[0]
    assert memory.get_ylabel() == "GiB of one device"
    assert memory.get_ylim()[1] > 90  # a v5p has 96 GB
    assert not any("dispatch" in words for words in large.advice)


def test_a_short_step_is_said_to_wait_for_its_launch(small):
    (words,) = (words for words in small.advice if "dispatch" in words)
    assert small.time.seconds < 1e-3
    assert "shorter than the 2 ms that a host takes to dispatch one" in words


def test_a_short_run_has_no_days(small):
    table = small.table()
    assert "e-0" not in table
    assert "e-2" not in table
    assert "The run: 400 steps" in table
    assert " days" not in table
    assert "device-hours" not in table


def test_nothing_waits_less_than_not_at_all():
    one = ["GPT.num_layers = 2", "Mesh.tensor = 1", "Mesh.fsdp = 1"]
    for layers in (2, 3, 4, 6):
        config = load_config("gpt_quickstart", [*one, f"GPT.num_layers = {layers}"])
        time = plan(config, target="h100:1x1", compile=False).time
        assert time.exposed >= 0
        assert time.hidden >= 0
