"""gin files into dataclasses: what is read, what is rejected, and with what sentence."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import pytest
from conftest import unreadable
from flax import nnx

from jaxtrain.config import reader, writer
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.config.shipped import configs_folder
from jaxtrain.config.values import ByName, OneOf
from jaxtrain.parallel.sharding import is_variable, logical_axes
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.settings import Config, load_config

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
    notes: tuple[str, ...] = ()


def load(*bindings: str, file: Path | None = None, **keywords) -> Garden:
    search = file.parent if file else Path()
    return reader.load(Root, file, bindings, search_path=search, **keywords).garden


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


def test_settings_with_dicts_have_a_hash_as_equal_ones_have():
    @configurable
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Beds:
        sizes: dict[str, float]
        later: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)

    one = Beds(sizes={"a": 1.0, "b": 2.0}, later={3: {"a": 1.0, "b": 0.0}})
    other = Beds(sizes={"b": 2.0, "a": 1.0}, later={3: {"b": 0.0, "a": 1.0}})
    assert one == other
    assert hash(one) == hash(other)
    assert hash(one) != hash(Beds(sizes={"a": 1.0, "b": 2.0}))
    assert {Root(Garden(size=1, tool=one)): 1}[Root(Garden(size=1, tool=other))] == 1


def test_the_later_binding_wins_and_blocks_are_read(tmp_path):
    (tmp_path / "base.gin").write_text("Garden.size = 1\nGarden.name = 'base'\n")
    run = tmp_path / "run.gin"
    run.write_text("include 'base.gin'\nGarden:\n  size = 2\n")
    assert load(file=run) == Garden(size=2, name="base")
    assert load("Garden.size = 3", file=run).size == 3


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (["Gardn.size = 1"], ["unknown name 'Gardn'", "did you mean 'Garden.size'?"]),
        (["Garden.sise = 1"], ["Garden has no setting 'sise'", "did you mean 'size'?", "depth"]),
        (["Garden.size = '12'"], ["Garden.size = '12' is a str", "takes int", "write 12 without"]),
        (["Garden.size = 1.5"], ["Garden.size = 1.5 is a float", "takes int"]),
        (["Garden.size = True"], ["Garden.size = True is a bool", "takes int"]),
        (["Garden.size = 1", "Garden.kind = 'flowr'"], ["'kitchen', 'flower'", "mean 'flower'?"]),
        (["Garden.size = 1", "Garden.limit = 'x'"], ["it takes int or None"]),
        (
            ["Garden.size = 1", "Garden.tool = @Spade()", "Spade.weight = 1e999"],
            ["Spade.weight = inf; use a finite number"],
        ),
        (["Garden.size = 1", "Spade.weight = 2"], ["Spade.weight is set", "nothing", "uses Spade"]),
        (["Garden.size = 1", "A = 2"], ["A = ... is set, but nothing refers to %A"]),
        (["Garden.size = %WIDHT", "WIDTH = 2"], ["%WIDHT has no value", "did you mean 'WIDTH'?"]),
        (["A = %B", "B = %A", "Garden.size = %A"], ["%A has no value"]),
        (["Garden.size = 1", "Garden.tool = @Spode()"], ["@Spode()", "did you mean 'Spade'?"]),
        (["Garden.size = 1", "Garden.tool = @Spade"], ["write @Spade() with parentheses"]),
        (["Garden.size = 1", "Garden.tool = @Garden()"], ["@Garden() would contain itself"]),
        (["Garden.size = two"], ["-b 'Garden.size = two'", "not a gin binding", "in quotes"]),
        (["Garden.size = two"], ["(twois not a value); write", "in quotes: Garden.size = 'two'"]),
        (["Garden.name = none"], ["(noneis not a value; did you mean None?)"]),
        (["Garden.name = a # b"], ["(a # bis not a value)"]),
        (
            ["Garden.size = 1", "Garden.kind = flowr"],
            ["'flowr' is a str", "did you mean 'flower'?"],
        ),
        (["Garden.name = 'plot"], ["in quotes: Garden.name = 'plot'"]),
        (["Garden.paths = (1, x)"], ["(xis not a value)", "quotes: Garden.paths = (1, 'x')"]),
        (["Garden.wet = true"], ["(trueis not a value; did you mean True?)"]),
        (["Garden.tool = Spade()"], ["(Spade()is not a value; did you mean @Spade()?)"]),
        (["Garden.size ="], ["not a gin binding (Unable to parse value.)"]),
        ([], ["Garden.size has no value: bind it, such as Garden.size = 1"]),
        (["Garden.size = 1", "Garden.paths = 3"], ["is an int; it takes", "; write (3,)"]),
        (["a/Garden.size = 1"], ["gin scopes are not supported"]),
        (["Garden.size = %HEIGHT"], ["%HEIGHT has no value"]),
        (["Garden.size = 1", "Garden.depth = 1e999"], ["Garden.depth = inf; use a finite number"]),
        (["Garden.size = 4294967296"], ["Garden.size = 4294967296; use at most 4294967295"]),
        (["Garden.size = -4294967296"], ["use at least -4294967295"]),
        (
            ["Garden.size = 1", "Garden.paths = (1, 99999999999)"],
            ["Garden.paths = 99999999999; use at most 4294967295"],
        ),
        (["Garden.depth = nan"], ["nan is not a number that a setting accepts"]),
        (["Garden.size = @Spade()"], ["Garden.size = @Spade() is a Spade; it takes int"]),
    ],
)
def test_refusals_name_the_thing_the_value_and_the_way_out(bindings, words):
    message = refused(*bindings)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert "0x" not in message
    assert not message.endswith("known: ")
    assert "= 'nan'" not in message


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fence:
    """A section that rejects by itself, at the first reason."""

    posts: int
    rails: int = 2
    height: float = 1.0
    gate: object = None

    def __post_init__(self) -> None:
        if self.posts < 2:
            raise UserError(f"Fence.posts={self.posts}; use at least 2")
        if self.rails < 1:
            raise UserError(f"Fence.rails={self.rails}; use at least 1")
        if self.height <= 0:
            raise ValueError(f"height {self.height} is no height")
        if self.rails > 2 * self.height:
            raise UserError(f"Fence.rails={self.rails} with Fence.height={self.height}")


@dataclasses.dataclass(frozen=True)
class Yard:
    """A root of two sections."""

    garden: Garden
    fence: Fence
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def mistakes(*bindings: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        reader.load(Yard, None, bindings, search_path=Path())
    return str(caught.value).splitlines()


def test_no_mistake_of_reading_hides_another():
    said = mistakes(
        "Garden.sise = 1", "Gardn.size = 1", "Garden.size = 2", "Garden.limit = 'x'", "Garden =",
        "Fence.posts = 3", "Fence.height = -1", "Garden.kind = 'flowr'",
    )  # fmt: skip
    words = ["no setting 'sise'", "'Gardn'", "Garden.limit = 'x' is a str", "not a gin binding",
             "Fence: height -1.0 is no height", "Garden.kind"]  # fmt: skip
    assert [sum(word in line for line in said) for word in words] == [1] * len(words)
    assert len(said) == len(words)


def test_what_follows_from_a_mistake_is_not_said():
    # Not that the size is missing, nor that rails, 2 by default, do not fit the height.
    assert len(mistakes("Garden.size = 'a'", "Fence.posts = 2", "Fence.height = 0.5",
                        "Fence.rails = 0")) == 2  # fmt: skip
    # Nor what a section says of values of which one was rejected.
    assert len(mistakes("Garden.size = 1", "Fence.posts = 1", "Fence.rails = 'x'")) == 1
    # A section of which nothing is known might have read it.
    assert len(mistakes("Garden.size = 1", "Fence.posts = 2", "Garden.tool = @Spode()",
                        "Spade.weight = 1.0")) == 1  # fmt: skip
    # But a number is no section, and a section of which a value is rejected has read its own.
    assert len(mistakes("Garden.size = 1", "Fence.posts = 'x'", "Spade.weight = 1.0")) == 2
    assert len(mistakes("Garden.size = 1", "Fence.posts = 2", "Garden.tool = @Spade()",
                        "Spade.weight = 'x'", "A = 1")) == 2  # fmt: skip
    # Nor what a module might have registered.
    said = mistakes("import outside", "Garden.size = 1", "Garden.tool = @Outside()",
                       "Outside.x = 1", "Fence.posts = 1")  # fmt: skip
    assert [line.split(";")[0] for line in said] == [
        "-b 'import outside': import outside: a config does not run code from outside jaxtrain",
        "Fence.posts=1",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Garden.name = plot",
            "(plotis not a value); write Name.field = value, with text in quotes",
        ),
        ("Garden.name = my plot.txt", "quotes: Garden.name = 'my plot.txt'"),
        ("Garden.name = /a/plot", "quotes: Garden.name = '/a/plot'"),
    ],
)
def test_text_in_a_file_has_quotes(line, words, tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(f"{line}\nGarden.size = 1\n")
    assert words in refused(file=file)


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
    assert "no such file next to it" in refused(file=file)


def test_what_has_no_value_is_told_what_it_takes(tmp_path):
    file = tmp_path / "run.gin"
    file.write_text("")
    with pytest.raises(UserError) as caught:
        load_config(file)
    model, data, steps, batch = str(caught.value).splitlines()
    assert model.startswith("Train.model has no value: bind it to one of ")
    assert model.count("@") > 10
    assert {"@GPT()", "@LSTM()", "@ResNet()"} < set(re.findall(r"@\w+\(\)", model))
    assert "Garden" not in model
    assert data == (
        "Train.data has no value: bind it to one of @ChatData(), @ImageData(), @LabelledText(), "
        "@Mixture(), @PairData(), @PreferenceData(), @SequenceData(), @SpanData(), @TaggedText(), "
        "@TextData(), @VectorData(), such as Train.data = @ChatData()"
    )
    assert steps == "Train.steps has no value: bind it, such as Train.steps = 1"
    assert batch.startswith("Train.global_batch_size has no value")
    with pytest.raises(UserError, match=r"ImageData.mean = 0.5 is a float; .*; write \(0.5,\)$"):
        load_config("resnet_mnist5k", ["ImageData.mean = 0.5"])


def test_modules_beside_the_config_are_found(tmp_path, monkeypatch):
    module = "import dataclasses\nfrom jaxtrain.config import configurable\nimport {other}\n"
    module += "@configurable\n@dataclasses.dataclass(frozen=True)\nclass {name}: x: int = 1\n"
    for folder, name in (("there", "Hoe"), ("here", "Rake")):
        (tmp_path / folder).mkdir()
        other = f"{name.lower()}_handle"
        (tmp_path / folder / f"{other}.py").write_text("")
        text = module.format(name=name, other=other)
        (tmp_path / folder / f"{name.lower()}_module.py").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "there" / "run.gin"
    file.write_text("import hoe_module\nGarden.size = 1\nGarden.tool = @Hoe()\n")
    before = list(sys.path)
    assert type(load(file=file, allow_imports=True).tool).__name__ == "Hoe"
    garden = load("import rake_module", "Garden.tool = @Rake()", file=file, allow_imports=True)
    assert type(garden.tool).__name__ == "Rake"
    assert sys.path == before
    file.write_text("import no_such_module\nGarden.size = 1\n")
    message = refused(file=file, allow_imports=True)
    assert "No module named 'no_such_module' (looked for next to the config" in message
    assert "\n" not in message
    file.write_text("import jaxtrain.no_such_module\nGarden.size = 1\n")
    assert refused(file=file, allow_imports=True).endswith("'jaxtrain.no_such_module'")


def test_a_module_with_the_name_of_a_loaded_one_is_rejected(tmp_path):
    file = tmp_path / "run.gin"
    file.write_text("import optax\nGarden.size = 1\n")
    assert load(file=file, allow_imports=True).size == 1
    (tmp_path / "optax.py").write_text("")
    message = refused(file=file, allow_imports=True)
    assert f"{tmp_path / 'optax.py'} has the name of a module that is loaded already" in message


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
    root = reader.load(Root, file, bindings, search_path=tmp_path, allow_imports=True)
    text = writer.to_gin(root)
    assert text.startswith("import another_module\nimport kept_module\n\nGarden.size = 1\n")
    file.write_text(text)
    assert reader.load(Root, file, search_path=tmp_path, allow_imports=True) == root
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
    text = writer.to_gin(Root(garden))
    assert load(*text.splitlines()) == garden


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rain:
    """One way to water."""

    hours: float = 1.0
    wind: Annotated[str, OneOf(("west", "north"))] = "west"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Can:
    """Another way to water."""

    litres: int = 10


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Water:
    """What is one of several by its name."""

    way: Annotated[object, ByName("name", lambda: {"rain": Rain, "can": Can})] = Rain()
    days: int = 7


@dataclasses.dataclass(frozen=True)
class Watering:
    """A root of that."""

    water: Water
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def watering(*bindings: str) -> Watering:
    return reader.load(Watering, None, bindings, search_path=Path())


@pytest.mark.parametrize(
    ("bindings", "way"),
    [
        ((), Rain()),
        (("Rain.hours = 3",), Rain(hours=3.0)),
        (("Rain.wind = 'north'",), Rain(wind="north")),
        (("Water.name = 'can'",), Can()),
        (("Water.name = %WAY", "WAY = 'can'", "Can.litres = 5"), Can(litres=5)),
    ],
)
def test_what_is_chosen_by_name_takes_its_own_section_and_reads_back(bindings, way):
    found = watering(*bindings)
    assert found.water == Water(way=way)
    text = writer.to_gin(found)
    name = "can" if isinstance(way, Can) else "rain"
    assert text.startswith(f"Water.name = {name!r}\nWater.days = 7\n\n{type(way).__name__}.")
    assert watering(*text.splitlines()) == found


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        ("Water.name = 'cam'", "it takes one of 'rain', 'can'; did you mean 'can'?"),
        ("Water.name = @Can()", "Water.name = @Can() is a Can; it takes one of 'rain', "),
        ("Water.way = 'can'", "Water has no setting 'way'"),
        ("Water.litres = 5", "Water has no setting 'litres'; it belongs to what Water names: "
         "Can.litres (Water takes: name, days)"),
        ("Can.litres = 5", "Can.litres is set, but nothing in this configuration uses Can; "
         "Water.name = 'can' does"),
        ("Garden.size = 5", "nothing in this configuration uses Garden"),
        ("Rain.wind = 'wets'", "Rain.wind = 'wets' is a str; it takes one of 'west', 'north'; "
         "did you mean 'west'?"),
        ("Rain.wind = 3", "Rain.wind = 3 is an int; it takes one of 'west', 'north'"),
        ("Rain.wind = nroth", "Rain.wind = 'nroth' is a str; it takes one of 'west', 'north'; "
         "did you mean 'north'?"),
    ],
)  # fmt: skip
def test_what_is_not_chosen_by_name_is_refused(binding, sentence):
    with pytest.raises(UserError) as caught:
        watering(binding)
    assert sentence in str(caught.value)


def test_settings_of_update_rules_belong_to_their_rule():
    with pytest.raises(UserError, match=r"Optimizer has no setting 'b2'; .*: .*AdamW\.b2"):
        load_config("gpt2_124m", ["Optimizer.b2 = 0.9"])
    with pytest.raises(UserError, match=r"SGD.momentum is set.* uses SGD; Optimizer.name = 'sgd'"):
        load_config("gpt2_124m", ["SGD.momentum = 0.8"])
    chosen = ["Optimizer.name = 'sgd'", "SGD.momentum = 0.8"]
    assert load_config("gpt2_124m", chosen).optimizer.rule == SGD(momentum=0.8)


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
        sharding = layout.sharding_of(layout.parameter(logical_axes(variable)))
        assert sharding.shard_shape(value.shape)  # raises where a size does not divide
    batch = loaded.train.data.abstract_batch(loaded.train.global_batch_size)
    dimensions = {"tokens": 2, "pairs": 2, "images": 4, "vectors": 2}
    assert len(batch.inputs.shape) == dimensions[model.inputs]
