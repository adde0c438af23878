"""gin files into dataclasses: what is read, what is refused, and with what sentence."""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import pytest
from conftest import unreadable
from flax import nnx

from jaxtrain import config
from jaxtrain.config import configurable
from jaxtrain.errors import UserError
from jaxtrain.preflight import abstract_layout
from jaxtrain.settings import Config, configs_folder, load_config
from jaxtrain.sharding import is_variable, logical_axes

SHIPPED = sorted(path.stem for path in configs_folder().glob("*.gin"))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Garden:
    """A section for these tests."""

    size: int
    name: str = "plot"
    depth: float = 1.5
    kind: Literal["kitchen", "flower"] = "kitchen"
    paths: tuple[int, ...] = ()
    limit: int | None = None
    tool: object = None
    wet: bool = False


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Spade:
    """Something to refer to."""

    weight: float = 2.0


@dataclasses.dataclass(frozen=True)
class Root:
    """The root for these tests."""

    garden: Garden
    imports: tuple[str, ...] = ()


def load(*bindings: str, file: Path | None = None, **keywords) -> Garden:
    search = file.parent if file else Path()
    return config.load(Root, file, bindings, search_path=search, **keywords).garden


def refused(*bindings: str, **keywords) -> str:
    with pytest.raises(UserError) as caught:
        load(*bindings, **keywords)
    return str(caught.value)


def test_values_macros_references_and_defaults():
    garden = load(
        "WIDTH = 7",
        "Garden.size = %WIDTH",
        "Garden.depth = 2",
        "Garden.paths = [1, 2]",
        "Garden.tool = @Spade()",
        "Spade.weight = 3.5",
    )
    expected = Garden(size=7, depth=2.0, paths=(1, 2), tool=Spade(weight=3.5))
    assert garden == expected
    assert isinstance(garden.depth, float)


def test_the_later_binding_wins_and_blocks_are_read(tmp_path):
    (tmp_path / "base.gin").write_text("Garden.size = 1\nGarden.name = 'base'\n")
    run = tmp_path / "run.gin"
    run.write_text("include 'base.gin'\nGarden:\n  size = 2\n")
    assert load(file=run) == Garden(size=2, name="base")
    assert load("Garden.size = 3", file=run).size == 3


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (["Gardn.size = 1"], ["unknown name 'Gardn'", "did you mean 'Garden'?"]),
        (["Garden.sise = 1"], ["Garden has no setting 'sise'", "did you mean 'size'?", "depth"]),
        (["Garden.size = '12'"], ["Garden.size = '12' is a str", "takes int", "write 12 without"]),
        (["Garden.size = 1.5"], ["Garden.size = 1.5 is a float", "takes int"]),
        (["Garden.size = True"], ["Garden.size = True is a bool", "takes int"]),
        (["Garden.size = 1", "Garden.kind = 'flowr'"], ["'kitchen', 'flower'", "mean 'flower'?"]),
        (["Garden.size = 1", "Garden.limit = 'x'"], ["it takes int or None"]),
        (["Garden.size = 1", "Spade.weight = 2"], ["Spade.weight is set", "nothing", "uses Spade"]),
        (["Garden.size = 1", "A = 2"], ["A = ... is set, but nothing refers to %A"]),
        (["Garden.size = %WIDHT", "WIDTH = 2"], ["%WIDHT has no value", "did you mean 'WIDTH'?"]),
        (["A = %B", "B = %A", "Garden.size = %A"], ["%A has no value"]),
        (["Garden.size = 1", "Garden.tool = @Spode()"], ["@Spode()", "did you mean 'Spade'?"]),
        (["Garden.size = 1", "Garden.tool = @Spade"], ["write @Spade() with the brackets"]),
        (["Garden.size = 1", "Garden.tool = @Garden()"], ["@Garden() would be a part of itself"]),
        (["Garden.name = plot"], ["-b 'Garden.name = plot'", "not a gin binding", "in quotes"]),
        (["Garden.name = plot"], ["(plot is no value); write", "in quotes: Garden.name = 'plot'"]),
        (["Garden.name = my plot.txt"], ["quotes: Garden.name = 'my plot.txt'"]),
        (["Garden.name = /a/plot"], ["(/a/plot is no value)", "quotes: Garden.name = '/a/plot'"]),
        (["Garden.name = 'plot"], ["in quotes: Garden.name = 'plot'"]),
        (["Garden.paths = (1, x)"], ["(x is no value)", "quotes: Garden.paths = (1, 'x')"]),
        (["Garden.wet = true"], ["(true is no value; did you mean True?)"]),
        (["Garden.tool = Spade()"], ["(Spade() is no value; did you mean @Spade()?)"]),
        (["Garden.size ="], ["not a gin binding (Unable to parse value.)"]),
        ([], ["Garden.size has no value: bind it"]),
        (["a/Garden.size = 1"], ["gin scopes are not used"]),
    ],
)
def test_refusals_name_the_thing_the_value_and_the_way_out(bindings, words):
    message = refused(*bindings)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert "0x" not in message


def test_a_refusal_names_file_and_line(tmp_path):
    file = tmp_path / "run.gin"
    file.write_text("# a comment\nGarden.size = 1\nGarden.nam = 'x'\n")
    assert f"{file}:3: Garden has no setting 'nam'; did you mean 'name'?" in refused(file=file)


def test_a_config_in_another_encoding_is_refused_and_a_byte_order_mark_is_none(tmp_path):
    file = tmp_path / "run.gin"
    file.write_bytes("# größer\nGarden.size = 1\n".encode("latin-1"))
    assert f"config {str(file)!r} is not UTF-8 text (byte 4)" in refused(file=file)
    file.write_text("# größer\nGarden.size = 1\n", encoding="utf-8-sig")
    assert load(file=file).size == 1


def test_a_config_that_may_not_be_read_is_refused(tmp_path):
    file = tmp_path / "run.gin"
    file.touch()
    unreadable(file)
    assert f"config {str(file)!r}: Permission denied" in refused(file=file)


def test_includes_stay_in_their_folder_and_are_one_deep(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.gin").write_text("Garden.size = 1\n")
    file = inside / "run.gin"
    file.write_text("include '../secret.gin'\n")
    assert "stays inside its folder" in refused(file=file)
    (inside / "a.gin").write_text("include 'b.gin'\n")
    (inside / "b.gin").write_text("Garden.size = 1\n")
    file.write_text("include 'a.gin'\n")
    assert "at most one base" in refused(file=file)
    file.write_text("include 'c.gin'\n")
    assert "no such file beside it" in refused(file=file)


def test_imports_run_only_when_allowed(tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "outsider_module.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = refused("import outsider_module", "Garden.size = 1")
    assert "import outsider_module" in message
    assert "--allow-imports" in message
    assert not canary.exists()
    assert load("import outsider_module", "Garden.size = 1", allow_imports=True).size == 1
    assert canary.exists()


def test_imports_are_written_out_and_wanted_again(tmp_path, monkeypatch):
    (tmp_path / "kept_module.py").write_text("")
    (tmp_path / "another_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "run.gin"
    file.write_text("import kept_module\nGarden.size = 1\n")
    bindings = ["import another_module", "import kept_module"]
    root = config.load(Root, file, bindings, search_path=tmp_path, allow_imports=True)
    text = config.to_gin(root)
    assert text.startswith("import another_module\nimport kept_module\n\nGarden.size = 1\n")
    file.write_text(text)
    assert config.load(Root, file, search_path=tmp_path, allow_imports=True) == root
    assert f"{file}:1: import another_module: a config does not run code" in refused(file=file)


def test_a_module_that_a_binding_imports_is_there_for_the_file(tmp_path, monkeypatch):
    (tmp_path / "shed_module.py").write_text(
        "import dataclasses\nfrom jaxtrain.config import configurable\n"
        "@configurable\n@dataclasses.dataclass(frozen=True)\nclass Shed:\n  size: int = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "run.gin"
    file.write_text("Garden.size = 1\nGarden.tool = @Shed()\nShed.size = 2\n")
    assert "unknown name 'Shed'" in refused(file=file)
    garden = load("import shed_module", file=file, allow_imports=True)
    assert dataclasses.asdict(garden.tool) == {"size": 2}


def test_the_resolved_tree_reads_back_equal():
    garden = load(
        "Garden.size = 3", "Garden.tool = @Spade()", "Garden.paths = (4,)", "Garden.wet = True"
    )
    text = config.to_gin(Root(garden))
    assert load(*text.splitlines()) == garden


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_load_and_read_back_equal(name, tmp_path):
    loaded = load_config(name)
    again = tmp_path / "config.gin"
    again.write_text(loaded.to_gin())
    assert load_config(again) == loaded
    assert isinstance(loaded, Config)


def test_an_unknown_config_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'gpt_quickstart'"):
        load_config("gpt_quikstart")
    with pytest.raises(UserError, match=r"config 'none\.gin': no such file"):
        load_config("none.gin")
    for name in ("gpt_quickstart.gin", "nowhere/gpt_quickstart.gin", "gpt_quikstart.gin"):
        with pytest.raises(UserError, match=f"{name}': no such file; .* mean 'gpt_quickstart'"):
            load_config(name)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_are_headed_by_command_hardware_and_result(name):
    text = (configs_folder() / f"{name}.gin").read_text()
    head = text[: text.index("\nTrain.")]
    for word in (f"jaxtrain train {name}", "Hardware:", "Expected:"):
        assert word in head, word


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_build_abstractly(name):
    """Every parameter's shape and layout from sizes alone, on a mesh of eight abstract devices."""
    loaded = load_config(name)
    model = loaded.train.model
    layout = abstract_layout(loaded, 8)
    shapes = nnx.state(nnx.eval_shape(lambda: model.build(jax.random.key(0))), nnx.Param)
    for variable in jax.tree.leaves(shapes, is_leaf=is_variable):
        value = variable.get_value()
        sharding = layout.named(layout.parameter(logical_axes(variable)))
        assert sharding.shard_shape(value.shape)  # raises where a size does not divide
    batch = loaded.train.data.abstract_batch(loaded.train.global_batch_size)
    assert len(batch.inputs.shape) == (2 if model.objective == "next_token" else 4)
