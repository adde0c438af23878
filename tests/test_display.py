"""What a notebook shows: where parameters lie, the metrics so far, and HTML of runs and plans."""

import html
import json
import re

import jax
import matplotlib.colors
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxtrain import Trainer, load_config, plan
from jaxtrain.config.errors import UserError
from jaxtrain.run.show.notebook import parts_of, sharding_picture


@pytest.fixture(scope="module")
def config(tiny_config):
    return load_config(tiny_config)


@pytest.fixture(scope="module")
def trained(config):
    """Six steps of a run that keeps everything in memory."""
    trainer = Trainer(config)
    trainer.train(steps=4)
    trainer.train(steps=2)
    return trainer


def array(shape, spec, **sizes) -> jax.Array:
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    return jax.device_put(np.zeros(shape), NamedSharding(mesh, spec))


def drawn(figure) -> list[dict[tuple, str]]:
    """Of each panel: the corners of each part and the numbers that stand in it."""
    panels = []
    for axes in figure.axes:
        if axes.axison:
            boxes = [c.get_datalim(axes.transData) for c in axes.collections]
            corners = [tuple(float(x) for x in (b.x0, b.x1, b.y0, b.y1)) for b in boxes]
            texts = [text.get_text() for text in axes.texts]
            panels.append(dict(zip(corners, texts, strict=True)))
    return panels


def test_parts_are_the_shards_that_jax_made():
    x = array((8, 6, 4), P(None, "a", ("b", "c")), a=2, b=2, c=2)
    parts = parts_of(x)
    assert len(parts) == 8
    for shard in x.addressable_shards:
        bounds = tuple(part.indices(n)[:2] for part, n in zip(shard.index, x.shape, strict=True))
        assert shard.device.id in parts[bounds]


def test_a_matrix_is_cut_where_its_sharding_cuts_it():
    figure = sharding_picture(array((8, 6), P("b", "a"), a=2, b=4), "w", ("embed", "mlp"))
    (panel,) = drawn(figure)
    # x is the second dimension; the mesh is a x b, device 4 a + b.
    assert panel == {
        (3.0 * a, 3.0 * a + 3, 2.0 * b, 2.0 * b + 2): str(4 * a + b)
        for a in range(2)
        for b in range(4)
    }
    (axes,) = figure.axes
    assert axes.get_xlabel() == "mlp 6, 2 parts"
    assert axes.get_ylabel() == "embed 8, 4 parts"
    assert axes.yaxis_inverted()  # row 0 stands on top, as it is printed
    assert figure.get_suptitle() == "w: 8 parts, each on 1 device"


def test_devices_that_hold_the_same_stand_together():
    figure = sharding_picture(array((8, 6), P("fsdp"), data=2, fsdp=4), "w", ("embed", "mlp"))
    (panel,) = drawn(figure)
    assert sorted(panel.values()) == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert figure.get_suptitle() == "w: 4 parts, each on 2 devices"
    whole = sharding_picture(array((8,), P(), data=8), "b", ("vector",))
    assert drawn(whole) == [{(0.0, 8.0, 0.0, 1.0): "0, 1, 2, 3\n4, 5, 6, 7"}]


def test_stacked_layers_are_named_and_a_third_cut_becomes_panels():
    stacked = array((4, 8, 6), P(None, "fsdp", "tensor"), fsdp=4, tensor=2)
    figure = sharding_picture(stacked, "up", ("layers", "embed", "mlp"))
    assert len(drawn(figure)) == 1
    assert "whole in every part: layers 4" in figure.get_suptitle()
    staged = array((4, 8, 6), P("pipe", "fsdp", "tensor"), pipe=2, fsdp=2, tensor=2)
    figure = sharding_picture(staged, "up", ("layers", "embed", "mlp"))
    first, second = drawn(figure)
    assert sorted(first.values()) == ["0", "1", "2", "3"]
    assert sorted(second.values()) == ["4", "5", "6", "7"]
    assert [axes.get_title() for axes in figure.axes] == ["layers 0 to 1", "layers 2 to 3"]


def test_a_picture_is_readable_in_grey():
    figure = sharding_picture(array((8, 6), P("b", "a"), a=2, b=4), "w", ("embed", "mlp"))
    shades = [c.get_facecolor()[0][:3] for c in figure.axes[0].collections]
    assert all(np.ptp(shade) == 0 for shade in shades)
    assert len({matplotlib.colors.to_hex(shade) for shade in shades}) == 8
    # Black digits on any of them: the contrast that WCAG 2 asks for is 4.5.
    luminance = min(shade[0] for shade in shades) ** 2.2
    assert (luminance + 0.05) / 0.05 > 4.5


def test_an_unknown_parameter_is_refused_with_the_nearest_name(trained):
    with pytest.raises(UserError, match=r"no parameter 'layers/upp'; did you mean 'layers/up'\?"):
        trained.plot_sharding("layers/upp")


def test_every_parameter_of_a_run_can_be_drawn(trained):
    names = [str(cell) for cell in trained.table().columns[0].cells]
    assert len(names) == trained.table().row_count > 10
    for name in names:
        assert trained.plot_sharding(name).get_suptitle().startswith(f"{name}: ")


def test_history_goes_on_over_several_calls(trained, config, tmp_path):
    steps = [line["step"] for line in trained.history if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in trained.history if "eval_loss" in line] == [4, 6]
    # The same run with a folder has the same lines, clocks aside, and its history is the file.
    written = Trainer(config, tmp_path)
    assert written.history == []
    written.train(steps=4)
    written.train(steps=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written.history == lines
    assert [line.keys() for line in lines] == [line.keys() for line in trained.history]
    for name in ("loss", "eval_loss", "grad_norm"):
        kept = [line.get(name) for line in trained.history]
        assert kept == [line.get(name) for line in lines]


def test_the_plot_is_of_the_history(trained):
    (axes,) = trained.plot().axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    losses = [[line["step"], line["loss"]] for line in trained.history if "loss" in line]
    assert curves["training loss"] == losses
    assert any(label.startswith("the text's unigram entropy") for label in curves)


def shown(thing) -> dict:
    """What a kernel sends to the notebook for the value of a cell."""
    formatters = pytest.importorskip("IPython.core.formatters")
    return formatters.DisplayFormatter().format(thing)[0]


def text_of(thing) -> str:
    """The text of the page that a notebook shows, without its colors."""
    return html.unescape(re.sub("<[^>]*>", "", shown(thing)["text/html"]))


def test_notebooks_show_every_picture_without_pyplot(trained, config):
    report = plan(config, "cpu:8", compile=False)
    for figure in (trained.plot(), trained.plot_sharding("layers/up"), report.plot()):
        assert shown(figure)["image/png"].startswith(b"\x89PNG")


def test_a_notebook_shows_a_run_and_its_configuration(trained, config):
    page = text_of(trained)
    assert "Mesh: data=2 x fsdp=2 x tensor=2 over 8 cpu device(s)" in page
    for words in ("layers/up", "State per device", "unigram_entropy", "Train.model = @GPT()"):
        assert words in page
    assert repr(trained) == "Trainer(GPT, step 6 of 8, data=2 x fsdp=2 x tensor=2)"
    assert text_of(config) == config.to_gin()
    assert "layers/up" in text_of(trained.table())


def test_a_notebook_shows_a_plan_and_keeps_no_program(config):
    report = plan(config, "v5e:2x4", compile=False)
    assert text_of(report) == report.table()
    assert shown(report)["text/plain"] == f"Plan(v5e:2x4, {report.total:,} bytes per device, fits)"


def test_what_a_run_prints_is_what_a_notebook_shows(trained):
    console = Console(width=110, no_color=True, force_terminal=False)
    trainer_console, trained.console = trained.console, console
    try:
        with console.capture() as captured:
            trained.show()
    finally:
        trained.console = trainer_console
    page = text_of(trained)
    for line in captured.get().splitlines():
        words = line.strip()
        if words.startswith(("Mesh:", "State per device", "Data:")):
            assert words.split(",")[0] in page
