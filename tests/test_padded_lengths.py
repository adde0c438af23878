"""Rows padded to a few lengths: each token told once, batches of one length, each compiled once."""

import itertools

import jax
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.data.loader import batches
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.mixture_sampler import ByLength
from jaxtrain.data.text.packing import PaddedText
from jaxtrain.data.text.source import TextData
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

LENGTHS = (8, 16, 40)


def padded(sizes):
    """Documents of these sizes, of tokens that are numbered through."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return PaddedText(np.arange(1, offsets[-1] + 1), offsets, LENGTHS)


SIZES = [1, 2, 9, 10, 17, 18, 41, 42, 81, 90, 5, 5, 30, 3]


def test_every_token_is_told_once_in_the_shortest_row_that_holds_it():
    text = padded(SIZES)
    told, room = [], 0
    for index in range(len(text)):
        row = text.example(index, None)
        real = int(row.loss_mask.sum())
        length = len(row.inputs)
        assert length == min(one for one in LENGTHS if one >= real)
        told += row.targets[:real].tolist()
        np.testing.assert_array_equal(row.inputs[:real] + 1, row.targets[:real])
        np.testing.assert_array_equal(row.positions[:real], np.arange(real))
        np.testing.assert_array_equal(row.segment_ids, row.loss_mask)
        for leaf in (row.inputs, row.targets, row.positions, row.loss_mask):
            assert not leaf[real:].any()
        room += length
    begins = np.concatenate([[0], np.cumsum(SIZES)[:-1]]) + 1
    assert sorted(told) == sorted(set(range(1, sum(SIZES) + 1)) - set(begins.tolist()))
    assert text.padding == pytest.approx(1 - len(told) / room)
    assert sum(text.rows) == len(text)
    assert text.rows[2] == 1 + 2 * 1 + 2 + 2 + 1  # 17 inputs; 40; 41, 80 and 89 are cut; 29


def test_batches_have_one_length_and_every_row_comes_round_as_often():
    rng = np.random.default_rng(0)
    text = padded(rng.integers(2, 60, 400))
    stream = batches(
        text, global_batch_size=16, seed=3, order=ByLength(text.rows), threads=0
    )  # fmt: skip
    seen, lengths, drawn = {}, [], {}
    steps = 4 * len(text) // 16
    for batch in itertools.islice(stream, steps):
        lengths.append(batch.inputs.shape[1])
        drawn.setdefault(lengths[-1], []).extend(batch.inputs[:, 0].tolist())
        for first in batch.inputs[:, 0].tolist():
            seen[first] = seen.get(first, 0) + 1
    shares = [lengths.count(one) * 16 / steps / 16 for one in LENGTHS]
    expected = np.array(text.rows) / len(text)
    np.testing.assert_allclose(shares, expected, atol=2 / steps)
    assert len(seen) == len(text)
    assert set(seen.values()) <= {3, 4, 5}
    for length, count in zip(LENGTHS, text.rows, strict=True):
        whole = count // 16 * 16  # of the first epoch of this length, which begins at its beginning
        assert len(set(drawn[length][:whole])) == whole
    assert lengths[:20] != sorted(lengths[:20])  # no length waits for another's end


def test_a_batch_is_a_function_of_seed_and_number_whatever_rows_are_made():
    text = padded(np.random.default_rng(1).integers(2, 60, 100))

    def batch(number, rows, seed=3):
        return next(
            batches(
                text, global_batch_size=8, seed=seed, start=number, rows=np.array(rows), threads=0,
                order=ByLength(text.rows),
            )
        )  # fmt: skip

    for number in (0, 7, 5000):
        whole, part = batch(number, range(8)), batch(number, [6, 1])
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[[6, 1]], b), whole, part)
    others = [batch(number, range(8), seed=4).inputs.shape for number in range(12)]
    assert others != [batch(number, range(8)).inputs.shape for number in range(12)]


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for number in range(60):
        words = rng.choice(["tea", "and", "a", "cake", "with", "jam"], rng.integers(1, 14))
        (root / f"{number:02}.txt").write_text(" ".join(words))
    return root


def config(corpus, *more):
    return load_config(
        "gpt_quickstart",
        bindings=[
            "Train.steps = 12", "Train.global_batch_size = 8", "Train.eval_every = 0",
            "Train.save_every = 0", "Train.log_every = 1", "Train.eval_batches = 1",
            "GPT.num_layers = 1", "GPT.embed_dim = 16", "GPT.num_heads = 2",
            "GPT.context_length = 64", "Mesh.fsdp = 8", "Mesh.tensor = 1",
            "TextData.sequence_length = 64",
            f"TextData.source = '{corpus}'", "TextData.packing = 'padded'",
            "TextData.lengths = (16, 32)", "TextData.heldout_fraction = 0.3", *more,
        ],
    )  # fmt: skip


# A run of several programs; losses of padded batches are in the fast part.
@pytest.mark.slow
def test_a_run_compiles_each_length_at_its_start_and_none_later(corpus):
    trainer = Trainer(config(corpus), workdir=None)
    assert "16: " in trainer.dataset.facts["rows_by_length"]
    steps, lowered = [], []
    lower = trainer._step.lower
    trainer._step.lower = lambda batch: lowered.append(batch.inputs.shape) or lower(batch)
    step = trainer._stepper.step_and_check

    def noted(batch, number):
        steps.append((batch.inputs.shape, len(lowered)))
        return step(batch, number)

    trainer._stepper.step_and_check = noted
    trainer.train(steps=8)
    trainer.train(steps=4)
    assert lowered == [(8, 16), (8, 32), (8, 64)]
    assert {shape for shape, _ in steps} == set(lowered)
    assert {done for _, done in steps} == {3}
    lines = [line for line in trainer.history if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line, (shape, _) in zip(lines, steps, strict=True):
        rate = shape[0] * shape[1] / line["step_seconds"]
        assert line["tokens_per_second"] == pytest.approx(rate)
        assert line["mfu"] is None
    assert lines[-1]["loss"] < lines[0]["loss"]
    # A batch of your own may have yet another length.
    row = trainer.dataset.train.examples(np.zeros(8, np.int64))
    own = jax.tree.map(lambda leaf: leaf[:, :12], row)
    assert np.isfinite(float(trainer.step(own)["loss"]))


def test_padding_changes_no_loss(corpus):
    """A batch at its length and the same rows with more padding: one loss."""
    trainer = Trainer(config(corpus), workdir=None)
    opened = trainer.dataset
    rows = np.arange(8) % opened.train.rows[0]
    short = opened.train.examples(rows)
    assert short.inputs.shape == (8, 16)
    wide = jax.tree.map(lambda leaf: np.pad(leaf, ((0, 0), (0, 48))), short)
    one, other = (trainer.evaluate([batch])["eval_loss"] for batch in (short, wide))
    assert one == pytest.approx(other, rel=1e-5)


# -- what is rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lengths": (8,)}, "only 'padded' rows have several lengths"),
        ({"packing": "padded", "lengths": (16, 8)}, "each is more than the one before it"),
        ({"packing": "padded", "lengths": (0,)}, "each is more than the one before it, from 1 on"),
        ({"packing": "padded", "lengths": (256,)}, "less than TextData.sequence_length = 256"),
        ({"packing": "padded", "source": "synthetic"}, "random rows have no documents"),
        ({"packing": "padded", "separate_documents": False}, "keeps documents whole"),
    ],
)
def test_lengths_that_cannot_be_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        TextData(**settings)


def test_a_mixture_has_rows_of_one_length():
    with pytest.raises(UserError, match="rows of mixed sources have one length"):
        Mixture(data=TextData(packing="padded"), sources={"a": "a"})


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (("Mesh.fsdp = 4", "Mesh.context = 2"), r"with Mesh.context=2: .* use Mesh.context=1"),
        (("Loss.chunk_size = 32",), r"chunk_size=32 does not divide all of .* use 16, or None"),
    ],
)
def test_what_needs_one_length_is_refused(bindings, words, corpus):
    with pytest.raises(UserError, match=words):
        preflight.check(config(corpus, *bindings), device_count=8, platform="cpu", kind="cpu")
