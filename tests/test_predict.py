"""`predict`: the classes of images by name, prepared as in evaluation."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import predicted
from PIL import Image

from jaxtrain import Trainer, load_config
from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.run.inference import predict as predicting
from jaxtrain.run.inference.inputs import texts_of, vectors_of

CONFIG = """
Train.model = @ViT()
Train.data = @ImageData()
Train.steps = 2
Train.global_batch_size = 8
ViT.image_size = 8
ViT.patch_size = 4
ViT.channels = 3
ViT.num_classes = 3
ViT.num_layers = 1
ViT.embed_dim = 16
ViT.num_heads = 2
ViT.mlp_dim = 16
ImageData.source = {source!r}
ImageData.image_size = 8
ImageData.channels = 3
ImageData.num_classes = 3
ImageData.heldout_fraction = 0.5
Mesh.fsdp = -1
Precision.compute = 'float32'
"""
NAMES = ["apple", "lime", "plum"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of class folders, and the config that reads it."""
    root = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    for name in NAMES:
        (root / "fruit" / name).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (8 + 3 * number, 11, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "fruit" / name / f"{number}.png")
    (root / "run.gin").write_text(CONFIG.format(source=str(root / "fruit")))
    return root


@pytest.fixture(scope="module")
def trainer(folder):
    return Trainer(load_config(folder / "run.gin"))


def test_probabilities_are_those_of_the_evaluated_logits(trainer, folder, monkeypatch):
    monkeypatch.setattr(predicting, "AT_ONCE", 4)  # six images: the second part is filled up
    heldout = trainer.dataset.heldout
    files = [heldout.images.images.paths[index] for index in heldout.images.indices]
    rows = np.stack([heldout.example(index, None).inputs for index in range(len(files))])
    logits = trainer.logits(rows).astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = trainer.predict(files, top=9)
    assert [one.name for one in found] == [str(file) for file in files]
    for one, probabilities in zip(found, expected, strict=True):
        assert dict(one.classes) == pytest.approx(
            dict(zip(NAMES, probabilities, strict=True)), rel=1e-5
        )
        told = [probability for _, probability in one.classes]
        assert told == sorted(told, reverse=True)
        assert one.label == NAMES[probabilities.argmax()]
    # A folder is all of its images, an image of Pillow's is one.
    of_folder = trainer.predict(folder / "fruit")
    assert len(of_folder) == 12
    with Image.open(files[0]) as image:
        (alone,) = trainer.predict(image.convert("RGBA"))
    assert (alone.name, alone.label) == ("image 1", found[0].label)


def test_the_command_prints_a_line_an_image(folder, capsys):
    workdir = str(folder / "run")
    assert main(["train", str(folder / "run.gin"), "--workdir", workdir]) == 0
    capsys.readouterr()
    file = folder / "fruit" / "lime" / "2.png"
    assert main(["predict", "--workdir", workdir, str(file), "--top", "2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{file}: ")
    assert line.count("%") == 2
    for words, said in (
        ([str(file), "--top", "0"], "--top 0: name at least 1 class"),
        ([str(folder / "fruit" / "lime" / "9.png")], "no such file or folder"),
        ([str(folder / "run.gin")], "is not a readable PNG or JPEG file"),
        ([str(folder / "run" / "checkpoints")], "there is no PNG or JPEG file in it"),
    ):
        assert main(["predict", "--workdir", workdir, *words]) == 2
        assert said in capsys.readouterr().err


def test_the_command_goes_on_past_inputs_that_cannot_be_read(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predicting, "AT_ONCE", 2)
    workdir = str(folder / "run")
    if not (folder / "run").is_dir():
        assert main(["train", str(folder / "run.gin"), "--workdir", workdir]) == 0
    whole = sorted((folder / "fruit" / "plum").iterdir())[:3]
    for number, file in enumerate(whole):
        (tmp_path / f"{2 * number}.png").write_bytes(file.read_bytes())
    (tmp_path / "1.png").write_bytes(whole[0].read_bytes()[:60])
    (tmp_path / "5.jpg").write_bytes(b"no image")
    capsys.readouterr()
    assert main(["predict", "--workdir", workdir, *map(str, whole)]) == 0
    expected = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    given = [str(tmp_path), str(tmp_path / "absent.png")]
    assert main(["predict", "--workdir", workdir, *given]) == 2
    out, err = capsys.readouterr()
    named = [line.partition(": ") for line in out.splitlines()]
    assert [name for name, _, _ in named] == [str(tmp_path / f"{n}.png") for n in (0, 2, 4)]
    assert [told for _, _, told in named] == expected
    said = [line for line in err.splitlines() if line.startswith("jaxtrain: predict")]
    assert len(said) == 3
    for line, name in zip(said, ("absent.png", "1.png", "5.jpg"), strict=True):
        assert str(tmp_path / name) in line
    # In Python the first one raises, unless `skip` takes its error.
    trainer = Trainer(load_config(folder / "run.gin"))
    with pytest.raises(UserError, match=r"1.png is not a readable"):
        trainer.predict(tmp_path)


def test_classes_without_names_are_numbers_and_that_is_said(folder, monkeypatch):
    gone = load_config(folder / "run.gin", ["ImageData.source = 'synthetic'"])
    (one,) = Trainer(gone).predict(folder / "fruit" / "plum" / "0.png", top=1)
    assert one.label in {"0", "1", "2"}

    told = []
    nowhere = load_config(folder / "run.gin", ["ImageData.source = '/nowhere'"]).train

    def logits(rows):
        return np.tile(np.array([0.0, 2.0, 1.0]), (len(rows), 1))

    found = predicted(
        str(folder / "fruit" / "plum"),
        nowhere.model,
        nowhere.data,
        logits,
        top=1,
        say=told.append,
    )
    assert [one.label for one in found] == ["1"] * 4
    assert "Classes are printed by number" in told[0]


def test_a_language_model_writes_what_it_likes_best(tiny_config, tmp_path):
    trainer = Trainer(load_config(tiny_config))
    (tmp_path / "some.txt").write_text("return x")
    found = trainer.predict(["def", tmp_path / "some.txt"])
    greedy = [trainer.generate(text, temperature=0.0) for text in ("def", "return x")]
    assert [one.text for one in found] == greedy
    assert found[1].name == str(tmp_path / "some.txt")
    with pytest.raises(
        UserError, match=r"--top 2: GPT writes text and predicts no classes; leave it"
    ):
        trainer.predict("def", top=2)


HIDDEN = """
Train.model = @BERT()
Train.data = @TextData()
Train.steps = 1
Train.global_batch_size = 8
BERT.vocab_size = 260
BERT.num_layers = 1
BERT.embed_dim = 16
BERT.num_heads = 2
BERT.mlp_dim = 16
BERT.context_length = 16
TextData.sequence_length = 16
Precision.compute = 'float32'
"""


def test_hidden_tokens_are_told_where_they_are(tmp_path):
    """As by the logits of the same tokens with the mask's, the last, in their place."""
    (tmp_path / "run.gin").write_text(HIDDEN)
    trainer = Trainer(load_config(tmp_path / "run.gin"))
    found = trainer.predict(["a[MASK]c", "[MASK] is [MASK]", "d" * 9 + "[MASK]"], top=2)
    names = ["a[MASK]c", "[MASK] is [MASK], [MASK] 1", "[MASK] is [MASK], [MASK] 2"]
    assert [one.name for one in found] == [*names, "d" * 9 + "[MASK]"]
    tokens = [[97, 259, 99], [259, *b" is ", 259], [*b"d" * 9, 259]]
    expected = [(0, 1), (1, 0), (1, 5), (2, 9)]
    for one, (text, place) in zip(found, expected, strict=True):
        logits = trainer.logits(np.array([tokens[text]], np.int32))[0, place].astype(np.float64)
        likely = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-likely)[:2]
        called = [repr(bytes([n]).decode(errors="replace")) if n < 256 else f"token {n}"
                  for n in best]  # fmt: skip
        assert [name for name, _ in one.classes] == called
        assert [p for _, p in one.classes] == pytest.approx(likely[best], rel=1e-4)
    with pytest.raises(
        UserError, match=r"BERT predicts masked tokens; write \[MASK\] where one is"
    ):
        trainer.predict("abc")
    with pytest.raises(UserError, match=r"17 tokens, more than BERT.context_length=16"):
        trainer.predict("d" * 16 + "[MASK]")


NUMBERS = """
Train.model = @{model}()
Train.data = @VectorData()
Train.steps = 3
Train.global_batch_size = 8
VectorData.source = {source!r}
VectorData.features = 4
VectorData.num_classes = None
VectorData.num_targets = 2
VectorData.heldout_fraction = 0.25
MLP.widths = (4, 5, 2)
MLP.objective = 'regression'
Autoencoder.widths = (4, 3)
Autoencoder.reaches = 'linear'
Mesh.fsdp = -1
Precision.compute = 'float32'
"""


# The cases that are left run the same code.
@pytest.mark.slow_cases("Autoencoder")
@pytest.mark.parametrize("model", ["MLP", "Autoencoder"])
def test_numbers_are_those_that_the_evaluation_weighs(model, tmp_path, capsys):
    """Their mean squared error over all held-out vectors is `eval_loss`, by the command too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 5, (40, 4)), rng.normal(size=(40, 2))
    np.savez(tmp_path / "all.npz", x=x, y=y)
    text = NUMBERS.format(model=model, source=str(tmp_path / "all.npz"))
    other = "Autoencoder" if model == "MLP" else "MLP"
    lines = [line for line in text.splitlines() if not line.startswith(f"{other}.")]
    (tmp_path / "run.gin").write_text("\n".join(lines))
    trainer = Trainer(load_config(tmp_path / "run.gin"), tmp_path / "run")
    trainer.train()
    data = trainer.config.train.data
    held = data._hold_out(data._read())
    np.savez(tmp_path / "held.npz", x=x[held], y=y[held])
    capsys.readouterr()
    given = str(tmp_path / "held.npz")
    assert main(["predict", "--workdir", str(tmp_path / "run"), given]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[1]["input"] == f"{given} 2"
    (tmp_path / "broken.npz").write_bytes(b"PK")
    broken = [str(tmp_path / "broken.npz"), given]
    assert main(["predict", "--workdir", str(tmp_path / "run"), *broken]) == 2
    again = capsys.readouterr()
    assert [json.loads(line) for line in again.out.splitlines()] == told
    assert "broken.npz" in again.err
    numbers = np.array([one["numbers"] for one in told])
    loss = trainer.evaluate()["eval_loss"]
    if model == "MLP":
        off = (numbers - y[held]) / y[~held].std(0)
        assert np.square(off).mean() == pytest.approx(loss, rel=1e-4)
        assert "squared_error" not in told[0]
    else:
        assert np.mean([one["squared_error"] for one in told]) == pytest.approx(loss, rel=1e-5)
        off = (numbers - x[held]) / x[~held].std(0)  # told in the units of the file
        assert np.square(off).mean() == pytest.approx(loss, rel=1e-4)


def test_a_file_s_vectors_are_counted_from_its_first(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("1,2\n3,4\n")
    sizes = MLP(widths=(2, 3))
    given = [str(tmp_path / "a.csv"), np.zeros(2), str(tmp_path / "b.csv"), np.zeros((2, 2))]
    called, table = vectors_of(given, sizes)
    of_a, of_b = ([f"{tmp_path / name} {n}" for n in (1, 2)] for name in ("a.csv", "b.csv"))
    assert called == [*of_a, "vector 1", *of_b, "vector 2", "vector 3"]
    assert table.shape == (7, 2)


def test_vectors_are_scaled_as_the_training_part_was(tmp_path):
    """Of files and arrays: the classes are those of the rows as the data have them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 5, (40, 4)), rng.integers(0, 3, 40)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    data = VectorData(source=str(tmp_path / "all.npz"), features=4, num_classes=3)
    model, heldout = MLP(widths=(4, 3)), data.open(seed=0).heldout
    places = np.flatnonzero(data._hold_out(data._read()))
    seen = []

    def logits(rows):
        seen.append(np.array(rows))
        return np.array(rows)[:, :3]

    (tmp_path / "some.csv").write_text("\n".join(",".join(map(str, row)) for row in x[places]))
    given = str(tmp_path / "some.csv")
    found = predicted(given, model, data, logits, top=1)
    rows = np.stack([heldout.example(index, None).inputs for index in range(len(heldout))])
    np.testing.assert_array_equal(seen[0], rows)
    assert [one.label for one in found] == [str(row[:3].argmax()) for row in rows]
    assert found[1].name == f"{given} 2"
    (one,) = predicted(x[places[0]], model, data, logits, top=1)
    assert (one.name, one.label) == ("vector 1", found[0].label)
    with pytest.raises(UserError, match="vectors of 3 numbers; MLP reads 4"):
        list(predicted(np.zeros(3), model, data, logits, top=1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.txt", "'nowhere.txt': No such file or directory .*; name a file that is there"),
        (Path("nowhere"), "'nowhere': No such file or directory"),
        ("latin.txt", "'latin.txt' is not UTF-8 text .byte 1."),
        ("folder.txt", "'folder.txt': Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_no_text(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("tésted".encode("latin-1"))
    Path("folder.txt").mkdir()
    with pytest.raises(UserError, match=said):
        list(texts_of([given], BERT()))


def test_texts_are_themselves_and_files_what_is_in_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my notes.txt").write_text("from a file")
    given = ["my notes.txt", "read the notes.txt", "x" * 300 + " y.txt", Path("my notes.txt")]
    assert list(texts_of(given, BERT())) == ["from a file", *given[1:3], "from a file"]
