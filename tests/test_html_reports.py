"""`--html`: a page has the numbers of `--json` and the tables of the terminal, and only text."""

import json
import re

import numpy as np
import pytest
from browser import browser, needs_chromium
from html_pages import cells, read

from jaxtrain.cli import main
from jaxtrain.run.show.html_charts import ticks
from jaxtrain.run.show.html_page import element, join

HOSTILE = "</title><script>alert(1)</script>\"'&lt;\u202e\x1b"
SMALL = ["-b", "GPT.num_layers=2", "-b", "Train.steps=1000"]


@pytest.fixture(scope="module")
def plan_files(tmp_path_factory):
    """A plan's page and JSON, and what was printed."""
    folder = tmp_path_factory.mktemp("plan")
    files = {kind: folder / f"plan.{kind}" for kind in ("html", "json")}
    with pytest.MonkeyPatch.context() as context, (folder / "out").open("w") as out:
        context.setattr("sys.stdout", out)
        words = ["plan", "gpt2_124m", *SMALL, "--target", "h100:8x8", "--no-compile"]
        words += ["-b", "Train.global_batch_size=640"]
        words += ["--price", "2.5", "-b", "Sharding.zero=3"]
        words += ["--json", str(files["json"]), "--html", str(files["html"])]
        assert main(words) == 0
    return files["html"], json.loads(files["json"].read_text()), (folder / "out").read_text()


def metrics(folder, loss, *, steps=4):
    folder.mkdir(parents=True)
    lines = [{"step": n, "loss": loss / n, "learning_rate": 0.5} for n in range(1, steps)]
    lines[1]["loss"] = None
    lines.append({"step": steps - 1, "eval_loss": loss, "eval_accuracy": 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def plot_page(tmp_path):
    folders = [metrics(tmp_path / name, loss) for name, loss in (("one", 8.0), ("two", 4.0))]
    file = tmp_path / "plot.html"
    assert main(["plot", *folders, "--html", str(file)]) == 0
    return file


# -- what a page says -----------------------------------------------------------------------------


def test_a_plan_s_page_has_the_numbers_of_its_json(plan_files):
    file, told, _ = plan_files
    page = read(file)
    shown = page.values()
    run = told["run"]
    figures = [told["memory"]["total"], told["hbm_bytes"], told["step_seconds"], told["mfu"]]
    figures += [told["tokens_per_second_per_device"], run["days"] * 86_400, run["device_hours"]]
    figures += [run["dollars"], run["kilowatt_hours"]]
    figures += [told["goodput"]["fraction"], told["goodput"]["days"] * 86_400]
    assert [one for one in figures if one not in shown] == []
    assert shown[told["mfu"]] == {f"{told['mfu']:.1%}"}
    assert shown[run["dollars"]] == {f"${run['dollars']:,.0f}"}
    # What people read is the exact number, rounded: in seconds, or in bytes.
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    read_units = 0
    for value, words in shown.items():
        for text in words:
            number, _, unit = text.partition(" ")
            if unit in units:
                assert float(number) * units[unit] == pytest.approx(value, rel=0.06)
                read_units += 1
    assert read_units > 8
    parts = {**told["memory"]["closed_form"], "host": 0, "arguments": told["memory"]["params"]}
    assert [name for name, size in parts.items() if size and size not in shown] == []
    by_axis = {}
    for row in told["traffic"]:
        by_axis[row["axis"]] = by_axis.get(row["axis"], 0) + row["bytes"]
    assert by_axis
    assert set(by_axis.values()) <= shown.keys()


def test_a_plan_s_page_has_what_the_terminal_shows(plan_files):
    file, told, out = plan_files
    page = read(file)
    printed = cells(out)
    assert len(printed) > 40
    # A cell that the terminal folded is found in words.
    found = {word for tag in ("td", "th") for text in page.texts(tag) for word in text.split()}
    assert [cell for cell in printed if not set(cell.split()) <= found] == []
    entries = {text.lower() for text in page.texts("li")}
    for words in told["time"]["assumptions"]:
        assert f"{words}.".lower() in entries
    assert {words.lower() for words in told["advice"]} <= entries
    assert "Assumptions" in page.texts("h3")
    assert any("Train.steps = 1000" in text for text in page.texts("pre"))
    command = page.texts("pre")[-1]
    assert command.startswith("jaxtrain plan gpt2_124m -b GPT.num_layers=2")


def test_plans_side_by_side_are_one_page_with_each_plan_folded(tmp_path):
    file, told = tmp_path / "plans.html", tmp_path / "plans.json"
    words = ["plan", "gpt2_124m", *SMALL, "--target", "h100:1x8", "--target", "v5e:2x4"]
    words += ["--no-compile", "-b", "Mesh.tensor=[1, 5]", "--html", str(file), "--json", str(told)]
    assert main(words) == 0
    page = read(file)
    shown, folds = page.values(), page.texts("summary")
    for one in json.loads(told.read_text())["plans"]:
        name = f"{one['target']} Mesh.tensor={one['values']['Mesh.tensor']}"
        if "refused" in one:
            assert f"{name}: {one['refused']}" in page.texts("p")
            assert name not in folds
        else:
            assert name in folds
            figures = {one["memory"]["total"], one["step_seconds"], one["run"]["device_hours"]}
            assert figures <= shown.keys()
            assert pytest.approx(one["run"]["days"] * 86_400) in list(shown)


def test_curves_are_the_lines_of_the_metrics(plot_page, tmp_path):
    page = read(plot_page)
    drawn = [
        (attributes["class"], [tuple(map(float, p.split())) for p in words if p])
        for tag, attributes, _ in page.elements
        if tag == "path"
        for words in [re.split("[ML]", attributes["d"])]
    ]
    # A value that is null leaves a gap; a point that stands alone is a line of no length.
    assert ("run0 training curve s0 d0", [(1, 8)] * 2 + [(3, 2.666667)] * 2) in drawn
    assert ("run1 training curve s1 d1", [(1, 0.5), (1, 0.5), (2, 0.5), (3, 0.5)]) in drawn
    assert drawn.count(("run1 heldout dots s1", [(3, 0.25)] * 2)) == 1
    assert drawn.count(("run1 heldout dots s1", [(3, 4)] * 2)) == 1
    switches = [a["id"] for tag, a, _ in page.elements if tag == "input"]
    assert switches == ["run0", "run1", "training", "heldout"]
    assert [text.strip() for text in page.texts("label")][:2] == ["one", "two"]
    assert page.texts("td")[:4] == ["one", "3", "2.66667", "8"]
    assert not (tmp_path / "plot.png").exists()


# -- what a page must not do ----------------------------------------------------------------------


def test_text_from_configs_is_text(tmp_path, capsys):
    config = tmp_path / "x\"><img src=x onerror=alert(1)>'&lt;.gin"
    config.write_text('include "gpt2_124m.gin"\nTrain.steps = 1000\nGPT.num_layers = 2\n')
    file = tmp_path / "page.html"
    words = ["plan", str(config), "--target", "cpu:1", "--no-compile", "--html", str(file)]
    assert main(words) == 0, capsys.readouterr().err
    page = read(file)
    assert any(config.name in text for text in page.texts("title"))
    assert "<img" not in file.read_text()


def test_names_of_runs_are_text(tmp_path):
    name = HOSTILE.replace("/", "\u2215")
    folders = [metrics(tmp_path / one, 3.0) for one in (name, "other")]
    file = tmp_path / "plot.html"
    assert main(["plot", *folders, "--html", str(file)]) == 0
    page = read(file)
    visible = name.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    assert visible in [text.strip() for text in page.texts("label")]
    assert visible in page.texts("td")
    assert "<script>" not in file.read_text()


def test_only_markup_made_here_is_not_escaped():
    inner = element("b", "<i>", title='"x"')
    assert inner == '<b title="&quot;x&quot;">&lt;i&gt;</b>'
    assert element("p", inner, "&", hidden=True, id=None) == f"<p hidden>{inner}&amp;</p>"
    # Markup that went through any other string operation is text again.
    assert join(inner.upper()) == "&lt;B TITLE=&quot;&amp;QUOT;X&amp;QUOT;&quot;&gt;" + (
        "&amp;LT;I&amp;GT;&lt;/B&gt;"
    )
    assert join("a\ud800\x00\u2066b\n") == "a\\ud800\\x00\\u2066b\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["plan", "gpt2_124m", "--html", "FOLDER"],
            "is not a file; name one, such as FOLDER/out.html",
        ),
        (["plan", "gpt2_124m", "--html", "FOLDER/x.png"], "the page is HTML; use FOLDER/x.html"),
        (["plan", "--budget", "1e21", "--html", "FOLDER/x.html"], "leave out --html"),
        (["verify", "gpt_quickstart", "--html", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["plot", "FOLDER", "--html", "FOLDER/no/x.html"], "there is no folder FOLDER/no"),
        (["plot", "FOLDER", "--html", "gs://bucket/x.html"], "gs://bucket/x.html"),
    ],
)
def test_files_are_refused_before_the_work(arguments, words, tmp_path, capsys):
    assert main([word.replace("FOLDER", str(tmp_path)) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert words.replace("FOLDER", str(tmp_path)) in error
    assert error.count("jaxtrain: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_ticks_are_round_and_inside():
    for low, high in ((0.0, 1.0), (1.9, 10.4), (1e-5, 3e-4), (-7.0, 3.0), (999_000, 1_000_000)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 6
        assert low <= found[0] < found[-1] <= high
        steps = np.diff(found)
        np.testing.assert_allclose(steps, steps[0])
        assert f"{steps[0]:.6e}"[:8] in ("1.000000", "2.000000", "5.000000")


# -- how it looks ---------------------------------------------------------------------------------


@needs_chromium
def test_pages_fit_a_phone_and_the_legend_hides_curves(plan_files, plot_page):
    with browser() as tab:
        for file in (plan_files[0], plot_page):
            for width in (390, 320, 1100):
                tab.open(file.as_uri(), width=width)
                assert tab.overflow() == 0, (file, width)
                assert tab.requests == [file.as_uri()]
                assert tab.errors == []
                wide = tab.run(
                    "[...document.querySelectorAll('.scroll')]"
                    ".filter(e => e.scrollWidth > e.clientWidth).length"
                )
                assert wide == 0, (file, width)
        shown = "getComputedStyle(document.querySelector('path.{}')).display"
        assert tab.run(shown.format("run0")) == "inline"
        tab.run("document.querySelector('#run0').click()")
        assert tab.run(shown.format("run0")) == "none"
        assert tab.run(shown.format("run1")) == "inline"
        tab.run("document.querySelector('#heldout').click()")
        assert tab.run(shown.format("run1.heldout")) == "none"
        assert tab.run(shown.format("run1.training")) == "inline"
        # The drawing is as high as the data: the largest loss of run 1 is at the upper end.
        boxes = tab.run(
            "[...document.querySelectorAll('.frame')].slice(0, 1).map(e => "
            "[e, e.querySelector('path.run1.training')].map(x => x.getBoundingClientRect())"
            ".map(r => [r.left, r.top, r.right, r.bottom]))[0]"
        )
        (left, top, right, bottom), inside = boxes
        assert left - 4 <= inside[0] < inside[2] <= right + 4
        assert top - 4 <= inside[1] < inside[3] <= bottom + 4
        background = "getComputedStyle(document.body).backgroundColor"
        light = tab.run(background)
        tab.open(plot_page.as_uri(), width=390, dark=True)
        assert tab.run(background) != light
