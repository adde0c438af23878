"""An imported model is a run like any other; a run starts with another's parameters alone."""

import dataclasses
import json
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.t5 import T5
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights.family import family_for, their_shapes
from jaxtrain.models.weights.formats.safetensors import raw, read_header, write
from jaxtrain.run.checkpoint.metadata import of_published
from jaxtrain.run.commands.huggingface import first_use
from jaxtrain.run.huggingface import receipt
from jaxtrain.run.huggingface.parameters import shapes_of
from jaxtrain.run.trainer import Trainer
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.settings import load_config

README = Path(__file__).parent.parent / "README.md"
MODEL = GPT(vocab_size=320, num_layers=2, embed_dim=32, num_heads=2, context_length=48)
SHORT = ["-b", f"TextData.source='{README}'", "-b", "TextData.sequence_length=32",
         "-b", "Train.steps=2", "-b", "Train.eval_batches=1"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _without_transformers():
    """The receipt by digests: test_huggingface_models.py has the one by logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receipt.importlib.util, "find_spec", lambda name: None)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A GPT-2's folder with a tokenizer of 320 tokens or fewer."""
    folder = tmp_path_factory.mktemp("published") / "gpt2"
    folder.mkdir()
    family, said = family_for(MODEL, None)
    content = {**said, "architectures": [family.architecture], "model_type": family.model_type}
    (folder / "config.json").write_text(json.dumps({**content, "eos_token_id": 0}))
    save(folder / "model.safetensors", seed=0)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([README.read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "README.md").write_text("is not carried along")
    return folder


def save(file: Path, *, seed: int) -> None:
    family, _ = family_for(MODEL, None)
    shapes = their_shapes(family.names(MODEL), our_shapes())
    rng = np.random.default_rng(seed)
    values = (0.05 * rng.standard_normal(shape, np.float32) for shape in shapes.values())
    write(file, shapes, "F32", values)


def our_shapes() -> dict[str, tuple[int, ...]]:
    config = load_config("gpt_quickstart", [
        "Mesh.tensor=1", "Mesh.fsdp=8",
        *(f"GPT.{one.name}={getattr(MODEL, one.name)}" for one in dataclasses.fields(MODEL)),
    ])  # fmt: skip
    return shapes_of(compose(config, layouts.layout(config)).setup)


@pytest.fixture(scope="module")
def run(source, tmp_path_factory) -> Path:
    """The imported run."""
    workdir = tmp_path_factory.mktemp("runs") / "gpt2"
    words = ["import-hf", str(source), "--workdir", str(workdir), "-b", "Mesh.fsdp=8", *SHORT]
    assert main(words) == 0
    return workdir


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {k: np.asarray(t.open()) for k, t in read_header(folder / "model.safetensors").items()}


def test_the_receipt_has_the_digests_of_the_files(run, source, capsys):
    said = json.loads((run / "huggingface" / "parity.json").read_text())
    assert said["passed"]
    assert said["compared_with"] == "itself"
    assert said["why_not"] == "transformers and PyTorch are not installed"
    assert said["digests"] == {
        name: sha256(raw(value)).hexdigest() for name, value in tensors(source).items()
    }
    assert said["parameters"] == sum(value.size for value in tensors(source).values())


def test_what_lies_beside_the_weights_comes_along_and_nothing_else(run, source):
    carried = {path.name for path in (run / "huggingface").iterdir()}
    names = {"config.json", "tokenizer.json", "generation_config.json"}
    assert carried == {*names, "parity.json"}
    for name in names:
        assert (run / "huggingface" / name).read_bytes() == (source / name).read_bytes()
    config = load_config(run / "config.gin")
    assert config.train.data.tokenizer == str(run / "huggingface" / "tokenizer.json")
    assert config.train.start_from == str(source)


# A run; what an import writes is in the fast part.
@pytest.mark.slow
def test_it_evaluates_and_generates_as_any_run(run, capsys):
    assert main(["eval", "--workdir", str(run)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["step"] == 0
    assert abs(values["eval_loss"] - np.log(320)) < 0.5  # small random weights know nothing
    words = ["generate", "--workdir", str(run), "--prompt", "jax", "--max-new-tokens", "3"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("jax")
    assert main(["inspect", "--workdir", str(run), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "Checkpoint of step 0" in out
    assert "Verified: every array can be read" in out


# tests/test_huggingface_models.py exports what it imports, in the fast part.
@pytest.mark.slow
def test_it_trains_on_and_what_it_became_is_exported(run, source, tmp_path, capsys):
    words = ["train", str(run / "config.gin"), "--workdir", str(run), "-b", "Train.save_every=1"]
    # With another optimizer than it was imported with: it has not begun.
    assert main([*words, "-b", "Optimizer.name='sgd'", "-b", "Checkpoint.keep=4"]) == 0
    capsys.readouterr()
    for step in ("0", "2"):
        out = ["export-hf", "--workdir", str(run), "--step", step, "--out", str(tmp_path / step)]
        assert main(out) == 0
    said = capsys.readouterr().out
    assert f"bit for bit those of {tmp_path / '2'} (GPT2LMHeadModel" in said
    assert "Parity" not in said  # nothing else has read them
    assert said.count("Not compared with another program: transformers and PyTorch are") == 2
    before, after = tensors(tmp_path / "0"), tensors(tmp_path / "2")
    for name, value in tensors(source).items():
        assert np.array_equal(raw(before[name]), raw(value)), name
        assert after[name].shape == value.shape
        assert np.abs(after[name] - value).max() > 0, name
    assert (tmp_path / "2" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert json.loads((tmp_path / "2" / "config.json").read_text())["eos_token_id"] == 0


def test_a_folder_that_is_taken_is_refused(run, source, tmp_path, capsys):
    words = ["import-hf", str(source), "--workdir", str(run)]
    assert main(words) == 2
    assert f"--workdir {run}: there is a run already; name" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    words = ["export-hf", "--workdir", str(run), "--out", str(tmp_path)]
    assert main(words) == 2
    assert f"--out {tmp_path} is there already; name a folder that is new" in (
        capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_several_processes_do_not_export(run, tmp_path, monkeypatch):
    trainer = Trainer(load_config(run / "config.gin"), run, read_only=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="a run of 2 processes is exported by one process"):
        trainer.export_huggingface(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_refused_import_leaves_nothing(source, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((source / "config.json").read_text())
    (bad / "pytorch_model.bin").write_bytes(b"")
    workdir = tmp_path / "run"
    assert main(["import-hf", str(bad), "--workdir", str(workdir), "-b", "Mesh.fsdp=8"]) == 2
    assert "its weights are in a pickle" in capsys.readouterr().err
    assert not workdir.exists()


def test_plan_reads_config_json_alone(source, tmp_path, capsys):
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    words = ["plan", f"hf:{tmp_path}", "--target", "h100:1x8", "--no-compile"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    # Norms and biases are whole on every device.
    sizes = [x.size if x.ndim == 1 else x.size // 8 for x in tensors(source).values()]
    assert plan["memory"]["params"] == 4 * sum(sizes)
    assert plan["mesh"]["fsdp"] == 8


# -- Train.start_from ------------------------------------------------------------------------------


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)))


def test_a_run_starts_with_another_runs_parameters_and_nothing_else(run, tmp_path):
    there = Trainer(load_config(run / "config.gin"), run, read_only=True)
    bindings = [
        f"Train.start_from='{run}'", "Mesh.fsdp=4", "Mesh.pipe=2", "Train.seed=5",
        "Optimizer.average_decay=0.9",
    ]  # fmt: skip
    config = load_config(run / "config.gin", bindings)
    trainer = Trainer(config)  # another mesh, pipeline and optimizer
    assert trainer.steps_done == 0
    assert same(jax.device_get(trainer.state.params), jax.device_get(there.state.params))
    # What the optimizer starts from is what the run starts from.
    average = trainer.program.eval_state(trainer.state).params
    assert same(jax.device_get(average), jax.device_get(there.state.params))
    assert f"Train.start_from = '{run}'" in config.operative()


def test_replicas_start_alike(run):
    config = load_config(
        run / "config.gin",
        [f"Train.start_from='{run}'", "Mesh.fsdp=4", "Mesh.data=2", "Exchange.method='local_sgd'"],
    )
    there = Trainer(load_config(run / "config.gin"), run, read_only=True)
    for replicas, one in zip(
        jax.tree.leaves(jax.device_get(Trainer(config).state.params)),
        jax.tree.leaves(jax.device_get(there.state.params)),
        strict=True,
    ):
        assert np.array_equal(replicas, np.stack([one, one]))


def test_another_model_is_refused_with_the_settings_that_differ(run, source, tmp_path):
    bindings = [f"Train.start_from='{run}'", "GPT.num_layers=3"]
    with pytest.raises(UserError, match="GPT.num_layers = 2 when it was written, 3 in this"):
        Trainer(load_config(run / "config.gin", bindings))
    bindings = [f"Train.start_from='{source}'", "GPT.num_layers=3"]
    with pytest.raises(UserError, match=r"transformer.h.2.ln_1.weight \[32\] is missing"):
        Trainer(load_config(run / "config.gin", bindings))
    with pytest.raises(UserError, match="holds a GPT2LMHeadModel, which is Train.model = @GPT"):
        Trainer(load_config("lstm_quickstart", [f"Train.start_from='{source}'"]))
    for other in (tmp_path, run / "config.gin"):
        with pytest.raises(UserError, match="no run with a complete checkpoint there, and no Hugg"):
            Trainer(load_config(run / "config.gin", [f"Train.start_from='{other}'"]))


def test_from_huggingface_starts_with_the_folders_parameters(source, tmp_path):
    trainer = Trainer.from_huggingface(
        source,
        bindings=[
            "Mesh.fsdp=8",
            f"TextData.source='{README}'",
            "TextData.sequence_length=32",
            "Train.steps=1",
        ],
    )
    assert trainer.export_huggingface(tmp_path / "out").passed
    written = tensors(tmp_path / "out")
    for name, value in tensors(source).items():
        assert np.array_equal(raw(written[name]), raw(value)), name
    assert (tmp_path / "out" / "generation_config.json").exists()


# Two runs; digests of files are in the fast part.
@pytest.mark.slow
def test_a_checkpoint_names_what_it_came_from_through_restart_export_and_import(
    run, source, tmp_path, capsys
):
    def seal(folder: Path, step: int) -> str:
        return "blake2b:" + json.loads((folder / f"checkpoints/{step}/manifest.json").read_text())[
            "blake2b"]  # fmt: skip

    start = [f"Train.start_from='{run}'", "Train.steps=2"]
    for _ in range(2):  # the second goes on
        trainer = Trainer(load_config(run / "config.gin", start), tmp_path / "child")
        if not trainer.steps_done:
            trainer.train(1)
        trainer.close()
    published = {"path": str(source), "step": None}
    newest = max(int(folder.name) for folder in (run / "checkpoints").iterdir())
    expected = [{"path": str(run), "step": newest, "digest": seal(run, newest)}, published]
    told = [*trainer.ancestors]
    assert told[0] == {
        "path": str(tmp_path / "child"), "step": 1, "digest": seal(tmp_path / "child", 1)
    }  # fmt: skip
    first = told[-1].pop("digest")
    assert told[1:] == expected
    assert main(["inspect", "--workdir", str(tmp_path / "child")]) == 0
    said = capsys.readouterr().out
    assert (
        f"Its parameters were initialized from {run}, step {newest} ({seal(run, newest)})" in said
    )
    assert f"which began as those of {source} ({first})" in said

    assert trainer.export_huggingface(tmp_path / "out").passed
    found = of_published(tmp_path / "out")
    assert found[0]["path"] == str(tmp_path / "out")
    assert [{k: one[k] for k in ("path", "step")} for one in found[1:]] == [
        {k: one[k] for k in ("path", "step")} for one in told
    ]
    # The digest is of the content: another file, another digest.
    (tmp_path / "out" / "model.safetensors").unlink()
    save(tmp_path / "out" / "model.safetensors", seed=1)
    other = of_published(tmp_path / "out")[0]
    assert other["path"] == found[0]["path"]
    assert other["digest"] != found[0]["digest"]
    # What is no list of ancestors is skipped.
    (tmp_path / "out" / "parity.json").write_text('{"ancestors": [3]}')
    assert len(of_published(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (BERT(pooling="mean"), "predict --workdir run TEXT"),
        (BERT(objective="token_classification", num_classes=2), "predict --workdir run TEXT, or"),
        (BERT(), "eval --workdir run"),
        (ViT(), "predict --workdir run IMAGE, or eval"),
        (T5(), "generate --workdir run --prompt TEXT, or eval"),
        (GPT(), "generate --workdir run --prompt TEXT, or eval"),
    ],
)
def test_an_import_names_the_command_that_asks_such_a_model(model, said):
    assert first_use(model, Path("run")).startswith(said)
