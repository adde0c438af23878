"""`predict`: the classes of images by name, prepared as in evaluation."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxtrain import Trainer, load_config
from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.run import predict as predicting
from jaxtrain.run.texts import texts_of

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
        ([str(folder / "run.gin")], "is no readable PNG or JPEG"),
        ([str(folder / "run" / "checkpoints")], "there is no PNG or JPEG file in it"),
    ):
        assert main(["predict", "--workdir", workdir, *words]) == 2
        assert said in capsys.readouterr().err


def test_classes_without_names_are_numbers_and_that_is_said(folder, monkeypatch):
    gone = load_config(folder / "run.gin", ["ImageData.source = 'synthetic'"])
    (one,) = Trainer(gone).predict(folder / "fruit" / "plum" / "0.png", top=1)
    assert one.label in {"0", "1", "2"}

    told = []
    nowhere = load_config(folder / "run.gin", ["ImageData.source = '/nowhere'"]).train

    def logits(rows):
        return np.tile(np.array([0.0, 2.0, 1.0]), (len(rows), 1))

    found = predicting.predict(
        str(folder / "fruit" / "plum"),
        nowhere.model,
        nowhere.data,
        logits,
        logits,
        top=1,
        say=told.append,
    )
    assert [one.label for one in found] == ["1"] * 4
    assert "Classes are told by number" in told[0]


def test_a_model_of_text_is_told_what_to_use(tiny_config):
    with pytest.raises(
        UserError, match="GPT reads tokens and tells none; of text 'jaxtrain generate' w"
    ):
        Trainer(load_config(tiny_config)).predict("a.png")


def test_vectors_are_scaled_as_the_training_part_was(tmp_path):
    """Of files and arrays: the classes are those of the rows as the data have them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 5, (40, 4)), rng.integers(0, 3, 40)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    data = VectorData(source=str(tmp_path / "all.npz"), features=4, num_classes=3)
    model, heldout = MLP(widths=(4, 3)), data.open(seed=0).heldout
    places = np.flatnonzero(data._held_out(data._read()))
    seen = []

    def logits(rows):
        seen.append(np.array(rows))
        return np.array(rows)[:, :3]

    (tmp_path / "some.csv").write_text("\n".join(",".join(map(str, row)) for row in x[places]))
    given = str(tmp_path / "some.csv")
    found = list(predicting.predict(given, model, data, logits, logits, top=1, say=print))
    rows = np.stack([heldout.example(index, None).inputs for index in range(len(heldout))])
    np.testing.assert_array_equal(seen[0], rows)
    assert [one.label for one in found] == [str(row[:3].argmax()) for row in rows]
    assert found[1].name == f"{given} 2"
    (one,) = predicting.predict(x[places[0]], model, data, logits, logits, top=1, say=print)
    assert (one.name, one.label) == ("vector 1", found[0].label)
    with pytest.raises(UserError, match="vectors of 3 numbers; MLP reads 4"):
        list(predicting.predict(np.zeros(3), model, data, logits, logits, top=1, say=print))


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
