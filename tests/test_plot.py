"""The loss curve: what is drawn, and that it is a picture."""

import io

import numpy as np
from PIL import Image

from jaxtrain.run.show.figures import Picture, loss_figure, loss_png
from jaxtrain.training.objectives.objective import Baseline, Yardstick


def test_the_plot_shows_the_lines_given():
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": None},
        {"step": 2, "eval_loss": 4.5},
        {"step": 3, "loss": 4.0},
    ]
    beaten = Baseline("loss", "unigram entropy", 3.25)
    (axes,) = loss_figure(lines, Yardstick("nats a token", baselines=(beaten,))).axes
    assert axes.get_ylabel() == "loss (nats a token)"
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert curves["training loss"][0] == [1, 5]
    assert curves["training loss"][2] == [3, 4]
    assert np.isnan(curves["training loss"][1][1])
    assert curves["evaluation loss"] == [[2, 4.5]]
    assert curves["unigram entropy 3.25"] == [[0, 3.25], [1, 3.25]]


def test_the_bytes_are_a_picture():
    lines = [{"step": step, "loss": 5.0 - step} for step in range(4)]
    with Image.open(io.BytesIO(loss_png(lines))) as image:
        image.load()
        assert image.format == "PNG"


def test_a_run_without_lines_gives_empty_axes():
    (axes,) = loss_figure([]).axes
    assert axes.get_lines() == []
    assert axes.get_legend() is None


def test_a_picture_is_the_same_in_files_and_notebooks():
    picture = Picture(2, 1)
    with Image.open(io.BytesIO(picture._repr_png_())) as image:
        assert image.size == (240, 120)
    assert picture.png() == picture._repr_png_()
