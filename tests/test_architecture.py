"""Imports flow one way, files stay short, and every module says what it is for."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.size import size_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxtrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").glob("*.py"))
MAX_LINES = 600  # 400 is where to look twice

# A package imports those to its right, never one to its left; data and parallel do not know each
# other. `__init__` stands left of all: it names what users take.
CHAIN = "cli > analysis > run > training > models > nn > data, parallel > config"
FLOORS = [floor.split(", ") for floor in CHAIN.split(" > ")]


def package_of(module: str) -> str:
    return module.split(".")[0]


def floor_of(module: str) -> int:
    """How far down the chain a module stands; 0 is the top."""
    package = package_of(module)
    if package in ("__init__", "__main__"):
        return -1
    found = [number for number, names in enumerate(FLOORS) if package in names]
    assert found, f"jaxtrain.{module} stands in no package of the chain"
    return found[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The nodes of a file, which is parsed once."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The package's modules that a file imports, without the leading "jaxtrain."."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if is_module(n) else node.module for n in names]
        else:
            continue
        found |= {n.removeprefix("jaxtrain.") for n in names if n.startswith("jaxtrain.")}
    return frozenset(found)


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


# A test for each of hundreds of files would take longer to collect than all of them to run.
def test_imports_flow_one_way():
    """Those for type annotations too: a package is understood without any to its left."""
    against = [
        (name, other)
        for path in MODULES
        for name in [name_of(path)]
        for other in imports(path)
        if floor_of(other) <= floor_of(name) and package_of(other) != package_of(name)
    ]
    assert against == []


MOST_IN_A_ROOM = 14  # modules of a folder, beside its sub-packages


def test_a_room_is_seen_at_a_glance():
    for folder in {path.parent for path in MODULES}:
        modules = [path for path in folder.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= MOST_IN_A_ROOM, folder


@pytest.mark.parametrize("package", [name for names in FLOORS for name in names if name != "cli"])
def test_the_rooms_of_a_package_form_no_circle(package):
    """Modules that stand in no sub-package do not count."""
    edges: dict[str, set[str]] = {}
    for path in (PACKAGE / package).rglob("*.py"):
        room = name_of(path).split(".")[1:-1][:1]
        others = {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")}
        for name in room:
            rooms = {other for other in others if (PACKAGE / package / other).is_dir()}
            edges.setdefault(name, set()).update(rooms - {name})
    in_circles = {room for room in edges if room in _reached(edges, room)}
    assert not in_circles


def test_commands_use_rooms_and_no_room_uses_a_command():
    rooms = {path for path in MODULES if name_of(path).startswith("run.")}
    users = {name_of(path) for path in rooms for name in imports(path) if "run.commands." in name}
    assert {name for name in users if not name.startswith("run.commands.")} == set()


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for room in edges.get(left.pop(), set()) - found:
            found.add(room)
            left.append(room)
    return found


# Who is given the whole configuration; everything else is given its own settings.
TAKE_ALL = (
    "training.settings", "training.compose", "training.layouts",
    "training.flops", "training.preflight", "run",
    "analysis", "cli",
)  # fmt: skip


def test_a_component_takes_its_own_settings():
    components = [
        path
        for path in MODULES
        if not f"{name_of(path)}.".startswith(tuple(f"{name}." for name in TAKE_ALL))
    ]
    assert len(components) > 200
    functions = [
        (path, node)
        for path in components
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
    ]
    for path, function in functions:
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = {
            part.id
            for argument in given
            if argument.annotation is not None
            for part in ast.walk(argument.annotation)
            if isinstance(part, ast.Name)
        }
        told = f"{path}: {function.name} takes all settings; give it its own"
        assert "Config" not in names, told


# What models implement, and what name maps are made of: no architecture itself.
INTERFACES = {
    "models.model", "models.language_model",
    *(f"models.weights.{name}" for name in (
        "config_file", "family", "folder", "sentences",
        "families.grouped_query", "families.rope", "formats.safetensors", "formats.awq",
        "formats.mxfp4", "formats.float8", "formats.gguf", "formats.gguf_metadata",
    )),
}  # fmt: skip


LEAST_LINES = 60  # of code
# Shorter files, and why each is a file of its own. The list can only shrink.
SHORT_FILES = {
    "one architecture a file": {
        "models.convolutional.alexnet", "models.convolutional.lenet", "models.feed_forward.mlp",
        "models.transformers.gpt_oss", "models.transformers.llama", "models.transformers.mixtral",
        "models.weights.families.gpt2",
    },
    "a file format, imported with the first file of it": {
        "data.text.formats.array_records", "data.text.formats.csv_lines",
        "models.weights.formats.float8", "models.weights.formats.mxfp4",
    },
    "a rule or an objective, imported by its name": {
        "training.objectives.regression", "training.optimizers.rules.sophia",
        "training.optimizers.rules.trust_ratio",
    },
    "one of several implementations of an interface": {
        "nn.matmul.grouped_tiles",
    },
    "a type that many modules share, below all of them": {
        "analysis.planning.machines.calibration", "data.bad_records", "data.batch",
        "nn.attention.mask", "nn.facts", "nn.kv_cache", "nn.predictor", "training.finetune.tuning",
        "training.state",
    },
    "one function that modules of several rooms call": {
        "analysis.planning.whole_run", "analysis.verify.meshes", "config.shipped", "config.swept",
        "data.demo", "nn.dropout", "parallel.ordering", "training.flops",
    },
    "one closed form or algorithm, with its source": {
        "analysis.planning.textbook.rooflines", "analysis.planning.textbook.scaling",
        "analysis.planning.textbook.sizes",
    },
    "a command, or a page of one": {
        "__main__", "analysis.doctor", "analysis.feature_matrix", "run.commands.init",
    },
    "a scheduler, which no other file is about": {
        "run.attempts.slurm",
    },
    "a template that `jaxtrain init` copies": {
        "run.starter.my_model",
    },
    "the process's memory, which no other file is about": {
        "run.garbage",
    },
    "made without Orbax, which run.start imports": {
        "run.initial_state",
    },
}  # fmt: skip


def test_a_file_is_worth_opening():
    """A shorter file joins the one that uses it, or has a reason."""
    sizes = {name_of(path): size_of(path.read_text()).lines for path in MODULES}
    short = {name for name, lines in sizes.items() if lines < LEAST_LINES}
    packages = {name_of(path) for path in MODULES if path.name == "__init__.py"}
    listed = [name for names in SHORT_FILES.values() for name in names]
    assert len(listed) == len(set(listed))
    assert short - packages == set(listed)


# Settings of features that others would like to ask for, and who may: what goes with what is the
# compatibility table's to say.
FEATURES = {
    "training.exchange.exchange": {"training.settings"},
    "training.offload": {
        "training.settings", "training.layouts", "training.compose",
    },
    "training.pipeline.schedules": {
        "training.settings", "training.preflight.compatibility", "training.setup",
    },
    "training.finetune.finetune": {
        "training.settings", "training.preflight.run_context", "training.compose",
        "training.flops",
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_no_feature_asks_for_the_settings_of_another(feature):
    is_package = (PACKAGE / feature.replace(".", "/")).is_dir()
    inside = feature if is_package else feature.rpartition(".")[0]
    importers = {name_of(path) for path in MODULES if feature in imports(path)}
    # Preflight calls the checks of all.
    outside = {name for name in importers if name.startswith("training.")} - {
        "training.preflight.preflight"
    }
    assert {name for name in outside if not name.startswith(f"{inside}.")} == FEATURES[feature]


def test_no_two_architectures_know_each_other():
    for path in (PACKAGE / "models").rglob("*.py"):
        name = name_of(path)
        known = {other for other in imports(path) if other.startswith("models.")}
        packages = {"models.weights", "models.weights.families", "models.weights.formats"}
        others = known - INTERFACES - packages
        if name.startswith("models.weights."):
            # A file of families knows the models of its group, and no other file of families.
            assert len(others) <= 3, name
            assert not {one for one in others if one.startswith("models.weights.")}, name
        else:
            assert not others, name
        assert name not in INTERFACES or "configurable" not in path.read_text(), name


def test_a_decoder_is_short_and_its_interface_small():
    lines = (PACKAGE / "models" / "transformers" / "llama.py").read_text().splitlines()
    assert len(lines) < 90
    tree = ast.parse((PACKAGE / "models" / "model.py").read_text())
    protocols = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    ]
    assert protocols == ["Model", "TokenModel", "ImageModel", "VectorModel"]


def test_a_file_is_short_and_says_what_it_is_for():
    for path in MODULES + TESTS:
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES, path
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, path
        assert docstring.splitlines()[0].endswith((".", "?")), path


def test_only_the_wrappers_know_gin_and_orbax():
    for path in MODULES:
        libraries = {
            (n.module if isinstance(n, ast.ImportFrom) else n.names[0].name) or ""
            for n in nodes(path)
            if isinstance(n, ast.Import | ast.ImportFrom)
        }
        roots = {library.split(".")[0] for library in libraries}
        assert ("gin" in roots) == (name_of(path) == "config.reader"), path
        assert ("orbax" in roots) == (name_of(path) == "run.checkpoint.store"), path
        assert not {"torch", "pickle"} & roots, path


def test_at_most_sixteen_runtime_dependencies():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 16


# Of the modules of the quickstart's command; it may only shrink.
MOST_IMPORTED = 150
# Few steps of a small model: the modules are the same.
SMALL = (
    "Train.steps=2", "Train.global_batch_size=8", "Train.eval_batches=1", "Train.save_every=1",
    "TextData.sequence_length=32", "GPT.num_layers=1", "GPT.embed_dim=32", "GPT.context_length=128",
)  # fmt: skip


# Trains in a process of its own.
@pytest.mark.slow
def test_the_command_imports_what_a_run_uses(tmp_path):
    """`jaxtrain train gpt_quickstart`, from its options to the sample after the last step."""
    program = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from jaxtrain.__main__ import run
sys.exit(run())
"""
    command = ["train", "gpt_quickstart", "--workdir", str(tmp_path / "run")]
    bindings = [word for binding in SMALL for word in ("-b", binding)]
    done = subprocess.run(
        [sys.executable, "-c", program, *command, *bindings],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "A sample" in done.stdout
    modules = done.stderr.splitlines()[-1].split()
    imported = {name for name in modules if name.split(".")[0] == "jaxtrain"}
    assert {"jaxtrain.__main__", "jaxtrain.models.transformers.gpt"} <= imported
    assert "jaxtrain.models.transformers.llama" not in imported
    assert len(imported) <= MOST_IMPORTED
