"""A configuration from text, from objects, and from another configuration."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain import Mesh, Optimizer, Precision, Schedule, TextData, Train, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.models import GPT
from jaxtrain.training.optimizers.rules.elementwise import SGD

TEXT = """
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 3
Train.global_batch_size = 8
GPT.num_layers = 2
TextData.sequence_length = 64
TextData.source = 'synthetic'
Mesh.tensor = 2
Optimizer.name = 'sgd'
Optimizer.learning_rate = 0.5
SGD.momentum = 0.25
"""
TRAIN = Train(
    model=GPT(num_layers=2),
    data=TextData(sequence_length=64, source="synthetic"),
    steps=3,
    global_batch_size=8,
)
SECTIONS = [Optimizer(rule=SGD(momentum=0.25), learning_rate=0.5), TRAIN, Mesh(tensor=2)]


@pytest.fixture(scope="module")
def of_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "run.gin"
    file.write_text(TEXT)
    return load_config(file)


def test_text_and_objects_are_what_the_file_is(of_file):
    assert load_config(TEXT) == of_file
    assert load_config(SECTIONS) == of_file
    assert load_config(of_file) == of_file
    assert load_config(of_file.to_gin()) == of_file
    assert (of_file.optimizer.rule, of_file.train) == (SGD(momentum=0.25), TRAIN)


def test_bindings_stand_over_all_of_them(of_file):
    bindings = ["Mesh.tensor = 4", "SGD.momentum = 0.5"]
    for source in (TEXT, SECTIONS, of_file):
        found = load_config(source, bindings)
        assert (found.mesh.tensor, found.optimizer.rule.momentum) == (4, 0.5)
        assert found.train == of_file.train


def test_another_model_over_objects_leaves_their_sizes_out(of_file):
    found = load_config(of_file, ["Train.model = @Llama()"])
    assert type(found.train.model).__name__ == "Llama"
    assert any("GPT.num_layers" in note and "left out" in note for note in found.notes)


def test_text_includes_a_shipped_config():
    found = load_config("include 'gpt_quickstart.gin'\nTrain.steps = 7")
    assert found.train.steps == 7
    assert found.mesh == load_config("gpt_quickstart").mesh


def test_numbers_of_numpy_are_numbers():
    rate = np.geomspace(1e-3, 1e-1, 3)[1]
    found = load_config([TRAIN, Optimizer(learning_rate=rate), Mesh(tensor=np.int64(2))])
    assert type(found.optimizer.learning_rate) is float
    assert found.optimizer.learning_rate == pytest.approx(1e-2)
    assert type(found.mesh.tensor) is int
    assert load_config(found.to_gin()) == found


def test_a_class_of_ones_own_is_imported_where_the_config_is_read(tmp_path, monkeypatch):
    (tmp_path / "own_sizes.py").write_text(
        "import dataclasses\n"
        "from jaxtrain.config import configurable\n"
        "from jaxtrain.models import GPT\n\n\n"
        "@configurable\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class OwnSizes(GPT):\n"
        "    num_layers: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import own_sizes

    train = Train(model=own_sizes.OwnSizes(), data=TextData(), steps=1, global_batch_size=8)
    found = load_config([train])
    assert found.to_gin().startswith("import own_sizes\n")
    with pytest.raises(UserError, match="--allow-imports"):
        load_config(found.to_gin())
    assert load_config(found.to_gin(), allow_imports=True) == found
    assert load_config(found) == found


# What a notebook does: other names are asked for first, a module is imported, a cell is run again.
OWN_RULE = r"""
import importlib

from jaxtrain import Optimizer, TextData, Train, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.models import GPT
from jaxtrain.training.optimizers.rules.elementwise import SGD


def rejected(*source, **allowed):
    try:
        load_config(*source, **allowed)
    except UserError as error:
        return str(error)
    raise AssertionError("it was taken")


chosen = ["Optimizer.name = 'own_rule'", "OwnRule.b1 = 0.5"]
said = rejected("gpt_quickstart", chosen[:1])
assert "Optimizer.name = 'own_rule' is a str; it takes one of 'ad" in said
assert said.count("adafactor") == 1, said
imported = ["import own_rule", *chosen]
said = rejected("gpt_quickstart", imported)
assert "--allow-imports" in said and "Optimizer.name" not in said, said
found = load_config("gpt_quickstart", imported, allow_imports=True)
import own_rule

assert found.optimizer.rule == own_rule.OwnRule(b1=0.5)
importlib.reload(own_rule)
train = Train(model=GPT(), data=TextData(), steps=1, global_batch_size=8)
found = load_config([train, Optimizer(rule=own_rule.OwnRule(b1=0.5))])
assert found.to_gin().startswith("import own_rule\n")
assert load_config(found.to_gin(), allow_imports=True).optimizer.rule == own_rule.OwnRule(b1=0.5)


class Nameless(SGD):
    pass


said = rejected([train, Optimizer(rule=Nameless())])
assert said.startswith("Nameless cannot be named: no 'name' of its own"), said
"""


def test_an_optimizer_of_ones_own_is_known_as_soon_as_its_module_is_imported(tmp_path):
    """In a process of its own: a rule is known until the process ends."""
    (tmp_path / "own_rule.py").write_text(
        "import dataclasses\n"
        "from typing import ClassVar\n"
        "from jaxtrain.config import configurable\n"
        "from jaxtrain.training.optimizers.rule import AdamRule\n\n\n"
        "@configurable\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class OwnRule(AdamRule):\n"
        "    name: ClassVar[str] = 'own_rule'\n"
    )
    (tmp_path / "script.py").write_text(OWN_RULE)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unnamed(GPT):
    """Sizes of your own whose class nobody registered."""


def test_what_cannot_be_a_configuration_is_refused():
    unnamed = Train(model=Unnamed(), data=TextData(), steps=1, global_batch_size=8)
    for source, words in (
        (
            [unnamed],
            ("Unnamed has no name in a configuration: put @configurable", "its @dataclass"),
        ),
        ([GPT()], ("GPT(", "is not a section", "belong to Train")),
        ([3], ("3 is not a section",)),
        ([TRAIN, Mesh(), Mesh()], ("two Mesh",)),
        ([Mesh()], ("Train.model has no value",)),
        ([TRAIN, Precision(compute="float31")], ("<settings>: Precision.compute = 'float31'",)),
        ([TRAIN, Schedule(name="cosin")], ("did you mean 'cosine'",)),
        ("Train.steps = 1\nTrain.stps = 2\n", ("text:2", "did you mean 'steps'")),
        ("Train.steps = 1\nTrain.data = 'x\n", ("text:2", "not a gin binding")),
    ):
        with pytest.raises(UserError) as error:
            load_config(source)
        assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("former", "section", "present", "value"),
    [
        ("Deadlines.step=8", "timeouts", "step", 8.0),
        ("Finetune.few_bits='none'", "finetune", "quantize_bits", "none"),
        ("Finetune.few_bits_group=64", "finetune", "quantize_group", 64),
        ("SequenceData.place='last'", "sequences", "pooling", "last"),
        ("Finetune.fresh=('output',)", "finetune", "reinitialize", ("output",)),
        ("Mixture.once=('a',)", "data", "single_epoch", ("a",)),
        ("Mixture.between='jump'", "data", "interpolation", "jump"),
    ],
)
def test_a_former_name_of_a_setting_is_read_with_a_note(former, section, present, value):
    mixture = ["Train.data=@Mixture()", "Mixture.data=@TextData()"]
    mixture.append("Mixture.sources={'a': 'README.md', 'b': 'LICENSE'}")
    of_data = {"data": mixture, "sequences": ["Train.data=@SequenceData()"]}
    config = load_config("gpt_quickstart", [*of_data.get(section, ()), former])
    found = config.train.data if section in of_data else getattr(config, section)
    assert getattr(found, present) == value
    name = former.partition("=")[0]
    (note,) = [note for note in config.notes if name in note]
    assert re.search(rf"{name} is now \w+\.{present}; its former name still works", note)
    assert name not in config.to_gin()
