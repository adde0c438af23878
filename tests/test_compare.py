"""Several runs side by side: names, the table, and what is drawn."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.run.metrics.compare import Run, curve, figure, open_runs, table


def lines(steps=4, loss=3.0, **more):
    found = [
        {"step": step, "loss": loss - step / 10, "learning_rate": 0.01} for step in range(1, steps)
    ]
    return [*found, {"step": steps - 1, "eval_loss": loss, "eval_perplexity": 20.0, **more}]


def save(folder, *args, **keywords):
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines(*args, **keywords))
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def test_a_curve_of_many_lines_is_means_of_its_neighbours():
    many = [{"step": step, "loss": float(step % 2)} for step in range(1, 1001)]
    steps, values = curve(many, "loss", 100)
    assert len(steps) == 100
    np.testing.assert_allclose(values, 0.5)
    np.testing.assert_allclose(steps[:2], [5.5, 15.5])
    assert curve(many, "loss", 300)[0][-1] == np.mean([997, 998, 999, 1000])
    assert curve(many, "loss", np.inf)[1].tolist() == [line["loss"] for line in many]
    few = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 2, "eval_loss": 1.0}]
    np.testing.assert_equal(curve(few, "loss", 100)[1], [2.0, np.nan])
    assert curve(few, "accuracy", 100)[0].shape == (0,)


def test_each_run_is_drawn_in_each_panel_and_told_apart_without_color():
    runs = [Run(name, lines(9, eval_accuracy=0.9)) for name in "abcdefgh"]
    losses, accuracies, rates = figure(runs).axes
    labels = [line.get_label() for line in losses.get_lines()]
    assert labels == [label for name in "abcdefgh" for label in (name, f"{name}, held out")]
    assert losses.get_lines()[0].get_xydata()[0].tolist() == [1, 2.9]
    assert accuracies.get_lines()[0].get_xydata().tolist() == [[8, 0.9]]
    assert (accuracies.get_ylabel(), rates.get_ylabel()) == ("eval accuracy", "learning rate")
    styles = {(line.get_color(), line.get_linestyle()) for line in rates.get_lines()}
    assert len(styles) == 8
    for color, _ in styles:
        assert color == "black" or 0 < float(color) < 0.7


def test_the_table_has_the_last_values():
    printed = io.StringIO()
    runs = [Run("a", lines(5)), Run("b", lines(3, loss=2.0, eval_accuracy=0.5))]
    Console(file=printed, width=120).print(table(runs))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]]
            for line in printed.getvalue().splitlines() if line.startswith("│")]  # fmt: skip
    assert rows == [["a", "4", "2.6", "3", "-", "0.01"], ["b", "2", "1.8", "2", "0.5", "0.01"]]


def test_names_are_as_long_as_tells_them_apart(tmp_path):
    one, two, three = (save(tmp_path / name) for name in ("x/run", "y/run", "y/other"))
    assert [run.name for run in open_runs([one, three])] == ["run", "other"]
    assert [run.name for run in open_runs([one, two])] == ["x/run", "y/run"]
    assert [run.name for run in open_runs([one, one + "/"])] == ["run", "run"]


def test_plot_prints_draws_and_loads_no_run(tmp_path, capsys):
    picture = tmp_path / "out.png"
    folders = [save(tmp_path / name) for name in ("first", "second")]
    assert main(["plot", *folders, "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "first" in out
    assert out.endswith(f"Drawn: {picture}\n")
    with Image.open(picture) as image:
        image.load()
        assert image.format == "PNG"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["FOLDER/firts"], "no metrics there (no metrics.jsonl); did you mean 'FOLDER/first'?"),
        (["FOLDER/empty"], "plot FOLDER/empty: no metrics there"),
        (["FOLDER/first", "--png", "FOLDER"], "--png 'FOLDER' is not a file"),
        (["FOLDER/first", "--png", "FOLDER/x.jpg"], "plots are PNG files; use FOLDER/x.png"),
    ],
)
def test_what_is_no_run_or_no_picture_is_refused(words, told, tmp_path, capsys):
    save(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    assert main(["plot", *(word.replace("FOLDER", str(tmp_path)) for word in words)]) == 2
    assert told.replace("FOLDER", str(tmp_path)) in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))
