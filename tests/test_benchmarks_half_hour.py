"""The half hour on a GPU: nothing is done twice, nothing that fails stops the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_formats, gpu_half_hour, gpu_run  # noqa: E402 - after the path
from benchmarks.gpu_half_hour import Options, Row, do, figures, markdown, read  # noqa: E402
from benchmarks.gpu_predictions import predicted  # noqa: E402
from benchmarks.gpu_rows import TRAIN  # noqa: E402


def options(folder: Path) -> Options:
    return Options(folder, tiny=True, seconds=0.05)


def rows_of(calls: list[str], **results) -> dict[str, Row]:
    """Rows that note that they were called, and give or raise what stands here."""

    def row(name: str) -> Row:
        def run(given: Options, seconds: float):
            calls.append(name)
            if isinstance(results[name], Exception):
                raise results[name]
            return results[name]

        return Row(1, run)

    return {name: row(name) for name in results}


def test_what_fails_costs_the_others_nothing_and_what_is_done_is_not_done_again(tmp_path):
    calls: list[str] = []
    late = {"sides": {"jaxtrain": {"per_second": 2.0}, "torch": {"error": "out of time"}}}
    rows = rows_of(
        calls,
        first={"settings": {"float32": {"apart": 0.5}}, "wrong": ["float32: too far"]},
        broken=ValueError("no such thing\nand more"),
        slow=subprocess.TimeoutExpired("it", 1),
        late=late,
    )
    results = do(rows, options(tmp_path), seconds=60)
    assert calls == ["first", "broken", "slow", "late"]
    assert results["broken"]["error"] == "no such thing"
    assert results["slow"]["error"] == "out of time"
    # A start that was killed while it wrote.
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"row": "first", "sett')
    assert read(tmp_path / "rows.jsonl") == results
    do(rows, options(tmp_path), seconds=60)
    assert calls[4:] == ["slow", "late"]
    assert "versions" in json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])


def test_without_time_nothing_is_begun(tmp_path):
    calls: list[str] = []
    assert do(rows_of(calls, first={}), options(tmp_path), seconds=5) == {}
    assert calls == []


def test_a_table_has_both_half_hours_and_what_went_wrong():
    def half_hour(seconds: float):
        side = {
            "seconds": [seconds], "per_second": 100 / seconds, "peak_bytes": 3,
            "planned": {
                "seconds": 0.9, "bytes": 6, "before": {"seconds": 0.25, "bytes": 3.75}
            },
        }  # fmt: skip
        sides = {"jaxtrain": side, "torch compile": {"seconds": [1.0], "error": "x"}}
        return {"gpt2_124m": {"row": "gpt2_124m", "unit": "tokens", "sides": sides}}

    now, before = half_hour(0.5), half_hour(1.0)
    assert figures(now["gpt2_124m"])["jaxtrain, planned / measured seconds"] == 1.8
    assert figures(now["gpt2_124m"])["jaxtrain, planned / measured bytes"] == 2
    assert figures(now["gpt2_124m"])["jaxtrain, scheduled / measured seconds"] == 0.5
    assert figures(now["gpt2_124m"])["jaxtrain, scheduled / measured bytes"] == 1.25
    text = markdown(now, before)
    assert "| gpt2_124m | jaxtrain, tokens a second | 200 | 100 | 2.00 |" in text
    assert "| gpt2_124m | best of torch / best of ours | 2 | 1 | 2.00 |" in text
    assert "| gpt2_124m | torch compile: x |" in text
    assert "2.00" not in markdown(now, {})


def test_every_format_says_how_near_it_must_be():
    """A few units in the last place of its format, as five steps of training enlarge them."""
    last_place = {
        "float32": 2**-23, "tf32": 2**-10, "bfloat16": 2**-8, "float16": 2**-10, "float8": 2**-3,
        "int8": 2**-7,
    }  # fmt: skip
    for name, setting in gpu_formats.SETTINGS.items():
        place = last_place[next((one for one in last_place if name.startswith(one)), "bfloat16")]
        assert setting.tolerance < 1000 * place
        assert setting.tolerance <= 3e-2


@pytest.mark.slow
def test_formats_are_compared_and_a_wrong_one_is_named():
    few = {
        "float32": gpu_formats.SETTINGS["float32"],
        "wrong": gpu_formats.Setting(gpu=("Loss.z_weight = 0.1",)),
        "cudnn": gpu_formats.SETTINGS["cudnn"],
    }
    gpu, cpu = (
        {answer["setting"]: answer for answer in gpu_formats.answers(side, few)}
        for side in ("gpu", "cpu")
    )
    found = gpu_formats.compared(gpu, cpu, few)
    assert found["settings"]["float32"]["apart"] == 0
    assert [words.split(":")[0] for words in found["wrong"]] == ["wrong"]
    assert "runs on NVIDIA GPUs" in found["settings"]["cudnn"]["error"]


@pytest.mark.slow
@pytest.mark.rotated("processes")
def test_a_run_that_is_killed_goes_on():
    found = gpu_run.measure(tiny=True, seconds=40)
    assert "error" not in found, found
    assert found["each_step_once"]
    assert 5 <= found["steps_before_the_kill"] < found["steps"]
    assert found["last_loss"] < found["first_loss"]
    assert 0 < found["goodput"] < 1


@pytest.mark.slow
def test_the_command_does_a_row_and_goes_on_with_the_next(tmp_path, capsys):
    words = ["--tiny", "--seconds", "0.1", "--out", str(tmp_path)]
    gpu_half_hour.main([*words, "--rows", "ceilings"])
    first = (tmp_path / "rows.jsonl").read_text()
    gpu_half_hour.main([*words, "--rows", "ceilings", "profile"])
    assert (tmp_path / "rows.jsonl").read_text().startswith(first)
    assert set(read(tmp_path / "rows.jsonl")) == {"ceilings", "profile"}
    text = (tmp_path / "half_hour.md").read_text()
    assert "copy, B/s" in text
    assert "of the roofline" in text
    capsys.readouterr()


def test_what_a_row_will_find_was_written_down_before(tmp_path):
    for row, settings in ((name, one.ours) for name, one in TRAIN.items()):
        for setting in settings:
            found = predicted(row, setting, "h100")
            assert found is not None, (row, setting)
            assert found["seconds"] > 0
            assert found["bytes"] > 2**30
    assert predicted("gpt2_124m", "", "t4") is None
    assert predicted("gpt2_124m", "", "h100", tmp_path / "none.csv") is None


@pytest.mark.parametrize("name", gpu_formats.SETTINGS)
def test_every_format_is_a_configuration(name):
    setting = gpu_formats.SETTINGS[name]
    config = gpu_formats.config_of((*setting.bindings, *setting.gpu))
    experts = config.train.model.experts
    assert (experts is not None) == ("experts" in name)
