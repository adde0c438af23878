"""Follows the recipes of docs/extending*.md on a copy of the package, as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import needs_libtpu

from jaxtrain.__main__ import main

ROOT = Path(__file__).parent.parent
PAGE = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("extending*.md")))
FILES = dict(re.findall(r"```python file=(\S+)\n(.*?)```", PAGE, re.S))
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package and its configs with every recipe applied."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("jaxtrain", "configs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert len(FILES) == 7
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    assert len(DIFFS) == 5
    for diff in DIFFS:
        apply_diff(root, diff)
    (root / "notes.txt").write_text("to be or not to be\n" * 2000)
    return root


def apply_diff(root: Path, diff: str) -> None:
    """Replaces each run of "-" lines by the "+" lines after it; each stands in its file once."""
    for file, body in re.findall(r"\+\+\+ b/(\S+)\n(.*?)(?=^--- a|\Z)", diff, re.S | re.M):
        text = (root / file).read_text()
        hunks = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", body, re.M)
        assert hunks
        for removed, added in hunks:
            old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (removed, added))
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (root / file).write_text(text)


def run(root: Path, *arguments: str) -> str:
    """What jaxtrain prints, run in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "jaxtrain", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(root: Path, *arguments: str) -> tuple[str, list[dict]]:
    """Trains in the copy; the output and the lines of metrics.jsonl."""
    shutil.rmtree(root / "run", ignore_errors=True)
    out = run(root, "train", *arguments, "--workdir", "run")
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    return out, [json.loads(line) for line in lines]


def bindings(*texts: str) -> list[str]:
    return [word for text in texts for word in ("-b", text)]


# Trains in a process of its own; the starter of tests/test_init.py has a model of one's own.
@pytest.mark.slow
def test_the_recipe_of_a_model(copy):
    out, lines = train(
        copy,
        "attention_only",
        "--simulate-devices",
        "8",
        *bindings("TextData.source = 'notes.txt'"),
    )
    assert "layers/qkv" in out
    assert "A sample" in out
    entropy = float(re.search(r"unigram entropy ([\d.]+)", out).group(1))
    assert lines[-1]["eval_loss"] < 0.5 * entropy
    # The recipe of a metric: a share, of what is trained on and of held-out examples.
    shares = [line["accuracy"] for line in lines if "loss" in line]
    assert 0 <= shares[0] < shares[-1] <= 1
    assert lines[-1]["eval_accuracy"] == pytest.approx(shares[-1], abs=0.1)


@pytest.mark.slow
def test_the_recipe_s_model_is_planned(copy):
    arguments = ("--target", "v5e:2x4", "--no-compile", "--json", "plan.json")
    run(copy, "plan", "attention_only", *arguments)
    plan = json.loads((copy / "plan.json").read_text())
    D, N, H, V = 64, 4, 16, 256
    held = (4 * D * N * H // 2 + V * D // 2) * 4 // 4  # over tensor, in float32, over fsdp
    assert plan["memory"]["params"] == held
    assert plan["step_seconds"] > 0
    causes = {row["cause"] for row in plan["traffic"]}
    table = {"parameters: token_embedding", "gradients: token_embedding"}
    assert {"attention output", "embedding"} | table <= causes
    assert not any("mlp" in cause or "norm" in cause for cause in causes)  # there is none


@pytest.mark.slow
@needs_libtpu
def test_the_recipe_s_model_has_the_textbook_s_traffic(copy):
    larger = ("embed_dim = 512", "num_heads = 8", "num_layers = 2", "vocab_size = 1024")
    layout = ("Mesh.fsdp = 2", "Mesh.tensor = 4", "Sharding.sequence_parallel = True")
    more = bindings(*(f"AttentionOnly.{size}" for size in larger), *layout, "Remat.policy = 'full'")
    run(copy, "plan", "attention_only", "--target", "v5e:2x4", "--json", "plan.json", *more)
    rows = json.loads((copy / "plan.json").read_text())["traffic"]
    assert [row["cause"] for row in rows if not row["explained"] or not row["count"]] == []
    assert "attention output" in {row["cause"] for row in rows}


@pytest.mark.slow
def test_the_recipe_s_model_is_proved(copy):
    out = run(copy, "verify", "attention_only")
    assert re.search(r"^8 proved in", out, re.M), out


# An objective, an optimizer, a kernel and a remat policy of the page, all in one run.
TOGETHER = """
import noised_gpt

Train.model = @NoisedGPT()
Train.data = @TextData()
Train.steps = 40
Train.global_batch_size = 16
Train.eval_batches = 2
NoisedGPT.vocab_size = 256
NoisedGPT.num_layers = 2
NoisedGPT.embed_dim = 32
NoisedGPT.num_heads = 4
NoisedGPT.context_length = 32
TextData.source = 'notes.txt'
TextData.sequence_length = 32
Mesh.fsdp = 4
Mesh.tensor = 2
Precision.compute = 'float32'
Optimizer.name = 'yogi'
Optimizer.learning_rate = 1e-2
Yogi.b2 = 0.99
Attention.kernel = 'by_query'
Remat.policy = 'products'
"""


@pytest.fixture(scope="module")
def together(copy) -> str:
    """The config of that, beside the model that it imports."""
    (copy / "mine" / "together.gin").write_text(TOGETHER)
    return "mine/together.gin"


@pytest.mark.slow
def test_the_recipes_of_an_objective_optimizer_kernel_and_remat_policy(copy, together):
    out, lines = train(copy, together, "--allow-imports", "--simulate-devices", "8")
    assert "Attention.kernel = 'by_query'" in out
    assert "Optimizer.name = 'yogi'" in out
    # A fifth of the inputs is noise where it trains, and none where it evaluates: some 0.1 nats, of
    # which a batch's loss hides half at most.
    assert lines[-2]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["eval_loss"] < lines[-2]["loss"] - 0.05


@pytest.mark.slow
def test_the_recipe_of_a_target_is_planned_for_with_them(copy, together):
    arguments = ("--allow-imports", "--target", "a6000:1x8", "--no-compile", "--json", "plan.json")
    out = run(copy, "plan", together, *arguments)
    plan = json.loads((copy / "plan.json").read_text())
    assert (plan["target"], plan["devices"]) == ("a6000:1x8", 8)
    assert plan["hbm_bytes"] == pytest.approx(51_041_271_808 - 4.7 * 2**30, abs=1)
    assert plan["step_seconds"] > 0
    # Two float32 moments beside each float32 parameter.
    assert plan["memory"]["optimizer"] == pytest.approx(2 * plan["memory"]["params"], rel=1e-3)
    assert "a6000" in out


@pytest.mark.slow
def test_the_recipes_are_proved(copy, together):
    out = run(copy, "verify", together, "--allow-imports")
    assert re.search(r"^\d+ proved in", out, re.M), out
    assert re.search(r"^kernel .* proved .*'by_query' = reference", out, re.M), out


def test_a_model_in_a_module_of_one_s_own_is_planned(tmp_path, monkeypatch, capsys):
    """Imported by the file or after -b; in layouts of which the closed forms ask for its parts."""
    text = FILES["jaxtrain/models/transformers/attention_only.py"]
    ours = "from jaxtrain.models.model import"
    assert ours in text
    (tmp_path / "my_models.py").write_text(text.replace(ours, "from jaxtrain.models import"))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "mine.gin"
    config.write_text(FILES["configs/attention_only.gin"])
    plain = ["plan", str(config), "--target", "cpu:8", "--no-compile", "--allow-imports"]
    assert main([*plain[:-1], *bindings("import my_models")]) == 2
    assert "pass --allow-imports if you trust that module" in capsys.readouterr().err
    assert main([*plain, *bindings("import my_models")]) == 0
    assert "gradients: layers/qkv" in capsys.readouterr().out
    config.write_text("import my_models\n" + config.read_text())
    cube = ["Mesh.tensor = 8", "Mesh.fsdp = 1", "Sharding.tensor_layout = '3d'"]
    stages = ["Mesh.pipe = 2", "Mesh.fsdp = 1", "Mesh.tensor = 4", "AttentionOnly.num_layers = 2"]
    for layout, said in ((cube, "attention: into the"), (stages, "pipeline boundary")):
        assert main([*plain, *bindings(*layout)]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_recipes_of_a_dataset_and_of_a_mesh_axis(copy):
    config = copy / "counting.gin"
    config.write_text(
        "Train.model = @AttentionOnly()\nTrain.data = @CountingData()\nTrain.steps = 12\n"
        "Train.global_batch_size = 16\nTrain.eval_batches = 2\nTrain.log_every = 1\n"
        "Precision.compute = 'float32'\nOptimizer.learning_rate = 1e-2\n"
    )
    losses = []
    for sizes in (["Mesh.replica = 2", "Mesh.fsdp = 2", "Mesh.tensor = 2"], []):
        devices = "8" if sizes else "1"
        out, lines = train(copy, str(config), "--simulate-devices", devices, *bindings(*sizes))
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert ("replica=2 x fsdp=2 x tensor=2" in out) == bool(sizes)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.5
    shown = run(copy, "data", str(config), "--examples", "1")
    assert "256 tokens occur" in shown
    row = re.search(r"^(\d+) (\d+) (\d+) ", shown, re.M).groups()
    assert np.diff(np.array(row, int)).tolist() == [1, 1]


@pytest.mark.slow
def test_the_recipe_of_a_model_outside_the_package(tmp_path):
    """The page's model and config in a folder that is neither the package's nor the current one;
    its dataset and its optimizer beside them."""
    mine = tmp_path / "mine"
    mine.mkdir()
    model = FILES["jaxtrain/models/transformers/attention_only.py"]
    model = model.replace("AttentionOnly", "MyModel")
    (mine / "my_model.py").write_text(model)
    (name, text) = re.search(r"```gin file=(\S+)\n(.*?)```", PAGE, re.S).groups()
    (tmp_path / name).write_text(text)
    for file in ("jaxtrain/data/counting.py", "jaxtrain/training/optimizers/rules/yogi.py"):
        (mine / Path(file).name).write_text(FILES[file])
    beside = bindings(
        "import counting", "Train.data = @CountingData()", "import yogi", "Optimizer.name = 'yogi'"
    )
    # As the console script does: `python -m` would look in the current folder by itself.
    script = tmp_path / "jaxtrain_script.py"
    script.write_text("import sys\nfrom jaxtrain.cli import main\nsys.exit(main())\n")

    def run(*words: str, folder: Path = tmp_path):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    refused = run("train", name, "--simulate-devices", "8", "--workdir", "run")
    assert refused.returncode == 2
    assert "pass --allow-imports" in refused.stderr
    words = ("--allow-imports", "--simulate-devices", "8", "--workdir", "run")
    trained = run("train", name, *words, *beside)
    assert trained.returncode == 0, trained.stderr
    assert "layers/qkv" in trained.stdout
    assert "Train.data = @CountingData()" in trained.stdout
    assert "Yogi.epsilon = 0.001" in (tmp_path / "run" / "config.gin").read_text()
    lost = run("eval", "--workdir", "run", "--allow-imports")
    assert lost.returncode == 2
    assert "PYTHONPATH adds folders" in lost.stderr
    again = run("eval", "--workdir", str(tmp_path / "run"), "--allow-imports", folder=mine)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["step"] == 20
