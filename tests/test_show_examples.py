"""`jaxtrain data`: facts, the whole digest, and the examples of the first step in its order."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import batches
from jaxtrain.data.source import Dataset
from jaxtrain.run.show.examples import data_picture, draw_row, show_examples, show_tokens
from jaxtrain.run.show.report import show_facts
from jaxtrain.training.settings import load_config


def shown(capsys, *words):
    assert main(["data", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_text_is_decoded_in_the_order_that_a_run_takes_it(tiny_config, capsys):
    out = shown(capsys, tiny_config, "--examples", 2, "-b", "Train.seed = 5")
    config = load_config(tiny_config, ["Train.seed = 5"])
    dataset = config.train.data.open(seed=5)
    first = next(batches(dataset.train, global_batch_size=8, seed=5, threads=0))
    for row in range(2):
        assert dataset.tokenizer.decode(first.inputs[row].tolist()) in out
    assert dataset.tokenizer.decode(first.inputs[2].tolist()) not in out
    assert f"sha256 {dataset.digest}\n" in out
    assert "documents 24" in out
    assert out.count("Example ") == 2
    assert "Example 1: 32 tokens, 32 targets with weight, of 1 document\n" in out


def test_a_row_is_drawn_by_its_documents_and_the_targets_that_count():
    segments = np.repeat([1, 2, 3, 0], [100, 28, 60, 12]).astype(np.int32)
    mask = (segments > 0).astype(np.float32)
    mask[[99, 127, 187]] = 0  # the last of each has no target of its own document
    places = np.concatenate([np.arange(n) for n in (100, 28, 60, 12)]).astype(np.int32)
    inputs = np.full(200, ord("x"), np.int32)
    row = Batch(inputs, inputs, mask, segments, places)
    documents, counts = draw_row(row)
    assert documents == "  documents  " + "A" * 25 + "B" * 7 + "C" * 15 + "." * 3 + (
        "  (4 tokens a sign)"
    )
    assert counts == "  counts     " + "#" * 24 + "+" + "#" * 6 + "+" + "#" * 14 + "+" + "..."
    short = Batch(inputs[:3], inputs[:3], np.ones(3, np.float32))
    assert draw_row(short) == []
    assert draw_row(dataclasses.replace(short, loss_mask=np.array([1, 0, 1]))) == [
        "  counts     #.#"
    ]


def test_documents_of_a_row_stand_apart_and_the_batch_is_counted(tiny_config, tmp_path, capsys):
    texts = [f"document {number}: {'ab' * (number % 17)}\n" for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = f"TextData.source = {str(tmp_path / 'a.jsonl')!r}"
    out = shown(capsys, tiny_config, "--examples", 1, "-b", source)
    config = load_config(tiny_config, [source])
    dataset = config.train.data.open(seed=config.train.seed)
    stream = batches(dataset.train, global_batch_size=8, seed=config.train.seed, threads=0)
    first = next(stream)
    begins = np.flatnonzero(np.diff(first.segment_ids[0])) + 1
    assert len(begins) >= 1
    end = begins[1] if len(begins) > 1 else 32
    text = dataset.tokenizer.decode(first.inputs[0, begins[0] : end].tolist())
    assert f"\n--- B: tokens {begins[0]} to {end - 1}, from its token 0\n{text}" in out
    assert f"--- A: tokens 0 to {begins[0] - 1}, from its token {first.positions[0, 0]}" in out
    rows = first.segment_ids.max(axis=1).mean()
    assert rows != first.segment_ids.max()
    assert "The first batch: 256 tokens in 8 rows, 0.0% padding, " in out
    assert f"{first.loss_mask.mean():.1%} of the targets count, {rows:.2f} documents a row" in out
    share = (first.inputs == ord("a")).mean()
    assert f"'a' {share:.1%}" in out


def test_what_is_hidden_from_the_model_is_drawn(tiny_config, capsys, tmp_path):
    (tmp_path / "hidden.py").write_text(HIDDEN)
    words = ["--allow-imports", "-b", "import hidden", "-b", "Train.model = @HiddenGPT()"]
    config = tmp_path / "tiny.gin"
    config.write_text(
        tiny_config.read_text().replace("GPT.", "HiddenGPT.").replace("@GPT()", "@HiddenGPT()")
    )
    bindings = [*words[:3], "-b", "HiddenGPT.vocab_size = 264"]
    out = shown(capsys, config, "--examples", 1, *bindings)
    counts = re.search(r"counts     ([#.]+)", out).group(1)
    assert 0 < counts.count("#") < len(counts) / 2


HIDDEN = """
import dataclasses
from typing import ClassVar
from jaxtrain.config.reader import configurable
from jaxtrain.models.transformers.gpt import GPT

@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenGPT(GPT):
    objective: ClassVar[str] = "masked_token"
"""


def image_of(file):
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def test_text_is_drawn_by_lengths_and_frequencies_and_images_as_a_sheet(
    tiny_config, capsys, tmp_path
):
    file = tmp_path / "data.png"
    assert f"Drawn: {file}" in shown(capsys, tiny_config, "--png", file)
    blue = np.array([0x5B, 0x9B, 0xD5])
    assert (image_of(file) == blue).all(-1).sum() > 200  # bars and a curve
    words = ["-b", "ImageData.source = 'synthetic'", "-b", "Train.global_batch_size = 9"]
    out = shown(capsys, "resnet_digits", *words, "--png", file, "--examples", 1)
    assert out.count("Example ") == 1
    pixels = image_of(file)
    assert pixels.shape[0] > pixels.shape[1] == 360  # 3 columns of an inch, labels between rows
    grey = np.unique(pixels[(pixels[..., 0] == pixels[..., 1])])
    assert len(grey) > 50  # pixels of any lightness, as random images have them


def test_random_tokens_are_shown_as_numbers(tiny_config, capsys):
    out = shown(capsys, tiny_config, "-b", "TextData.source = 'synthetic'", "--examples", 1)
    assert re.search(r"^(\d+ ){20}\.\.\.$", out, re.M)


def test_images_are_described_with_their_label(capsys, tmp_path):
    words = ["-b", "ImageData.source = 'synthetic'", "-b", "ImageData.num_classes = 10"]
    out = shown(capsys, "resnet_digits", *words, "--examples", 2)
    found = re.findall(r"^Example \d: label (\d) \((\d)\), 8 x 8 x 1 pixels from", out, re.M)
    assert len(found) == 2
    assert all(label == name for label, name in found)


def test_what_data_of_ones_own_do_not_tell_is_left_out(capsys):
    """Facts are what a source tells of itself; one may tell nothing."""
    image = np.zeros((2, 4, 4, 1), np.float32)
    labels, ones = np.array([0, 1], np.int32), np.ones(2, np.float32)
    told, nothing = [], Dataset((), (), "ab" * 32, {}, None, "images")
    show_examples(Batch(image, labels, ones), nothing, 2, told.append)
    assert [line.split(",")[0] for line in told] == ["Example 1: label 0", "Example 2: label 1"]
    sheet = data_picture(Batch(image, labels, ones), nothing)
    assert [axes.get_title() for axes in sheet.axes] == ["0", "1"]
    tokens = np.array([[5, 6, 6]], np.int32)
    text = Batch(tokens, tokens, np.ones((1, 3), np.float32))
    told.clear()
    show_tokens(text, dataclasses.replace(nothing, unit="tokens"), told.append)
    assert told[0].endswith("100.0% of the targets count, 2 tokens occur")
    show_facts(Console(), {}, nothing.digest)
    assert capsys.readouterr().out == f"Data: sha256 {'ab' * 8}\n"


def test_no_examples_and_no_more_than_a_step_takes(tiny_config, capsys):
    assert "Example" not in shown(capsys, tiny_config, "--examples", 0)
    assert shown(capsys, tiny_config, "--examples", 99).count("Example ") == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--examples", "-1"], "--examples -1: use 0 (none) or more"),
        (["-b", "TextData.source = 'nowhere'"], "no such file or folder"),
        (["--png", "nowhere/data.png"], "--png 'nowhere/data.png': there is no folder"),
    ],
)
def test_mistakes_are_refused(words, told, tiny_config, capsys):
    assert main(["data", str(tiny_config), *words]) == 2
    assert told in capsys.readouterr().err


def test_what_is_left_out_of_a_folder_is_said(tiny_config, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    (tmp_path / "b.pdf").write_bytes(np.arange(9, dtype=np.uint8).tobytes())
    out = shown(capsys, tiny_config, "-b", f"TextData.source = {str(tmp_path)!r}", "--examples", 0)
    assert "Left out 1 file next to the 1 that are read" in out
