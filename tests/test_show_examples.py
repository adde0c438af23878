"""`jaxtrain data`: facts, the whole digest, and the examples of the first step in its order."""

import re

import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.data.pipeline import batches
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
    assert "Example 1: 32 tokens, 32 targets that count, of 1 document\n" in out


def test_random_tokens_are_shown_as_numbers(tiny_config, capsys):
    out = shown(capsys, tiny_config, "-b", "TextData.source = 'synthetic'", "--examples", 1)
    assert re.search(r"^(\d+ ){20}\.\.\.$", out, re.M)


def test_images_are_described_with_their_label(capsys, tmp_path):
    words = ["-b", "ImageData.source = 'synthetic'", "-b", "ImageData.num_classes = 10"]
    out = shown(capsys, "resnet_digits", *words, "--examples", 2)
    found = re.findall(r"^Example \d: label (\d) \((\d)\), 8 x 8 x 1 pixels from", out, re.M)
    assert len(found) == 2
    assert all(label == name for label, name in found)


def test_no_examples_and_no_more_than_a_step_takes(tiny_config, capsys):
    assert "Example" not in shown(capsys, tiny_config, "--examples", 0)
    assert shown(capsys, tiny_config, "--examples", 99).count("Example ") == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--examples", "-1"], "--examples -1: use 0 (none) or more"),
        (["-b", "TextData.source = 'nowhere'"], "no such file or folder"),
    ],
)
def test_mistakes_are_refused(words, told, tiny_config, capsys):
    assert main(["data", str(tiny_config), *words]) == 2
    assert told in capsys.readouterr().err


def test_what_is_left_out_of_a_folder_is_said(tiny_config, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    (tmp_path / "b.pdf").write_bytes(np.arange(9, dtype=np.uint8).tobytes())
    out = shown(capsys, tiny_config, "-b", f"TextData.source = {str(tmp_path)!r}", "--examples", 0)
    assert "Left out 1 files beside the 1 that are read" in out
