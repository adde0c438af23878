"""Best-fit packing: nothing lost, nothing cut that fits, as few rows as best-fit decreasing has."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxtrain.config.errors import UserError
from jaxtrain.data.text.packing import BestFit
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.text.stores.store import open_store


def packed(sizes, length):
    """Documents of so many tokens; token i of the stream is i."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return BestFit(np.arange(offsets[-1]), offsets, length)


def rows_of_best_fit_decreasing(sizes, length):
    """By trying every row for every part, as the paper says it."""
    parts = [length] * sum((size - 1) // length for size in sizes)
    parts += [rest for size in sizes if (rest := (size - 1) % length)]
    rooms = []
    for part in sorted(parts, reverse=True):
        fitting = [room for room in rooms if room >= part]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - part)
        else:
            rooms.append(length - part)
    return rooms


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
@example([8, 7, 4, 3, 3], 10)  # the fullest row that fits: 2 rows; the emptiest: 3
@settings(max_examples=60, deadline=None)
def test_every_token_is_told_once_in_as_few_rows_as_the_paper_s(sizes, length):
    one = packed(sizes, length)
    rooms = rows_of_best_fit_decreasing(sizes, length)
    assert len(one) == len(rooms)
    if not rooms:
        return
    assert one.padding == pytest.approx(sum(rooms) / (length * len(rooms)))
    batch = one.examples(np.arange(len(one)))
    real = batch.segment_ids > 0
    np.testing.assert_array_equal(batch.loss_mask, real)
    starts = np.setdiff1d(np.arange(sum(sizes)), one.offsets)
    assert sorted(batch.targets[real]) == starts.tolist()
    np.testing.assert_array_equal(batch.targets[real], batch.inputs[real] + 1)
    document = np.searchsorted(one.offsets, batch.inputs, side="right")
    for row in range(len(one)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            (own,) = np.nonzero(batch.segment_ids[row] == segment)
            assert batch.positions[row, own].tolist() == list(range(len(own)))
            (number,) = set(document[row, own])  # one document alone
            if sizes[number - 1] <= length + 1:  # and the whole of it
                assert len(own) == sizes[number - 1] - 1
        assert not real[row, real[row].sum() :].any()
        for leaf in (batch.inputs, batch.targets, batch.positions):
            assert not leaf[row][~real[row]].any()


def test_a_run_s_data_are_packed_so_and_say_their_padding(tmp_path):
    rng = np.random.default_rng(0)
    for number, size in enumerate(rng.integers(20, 90, 60)):
        (tmp_path / f"{number:02}.txt").write_text("x" * size)
    stream = TextData(source=str(tmp_path), sequence_length=100)
    fitting = dataclasses.replace(stream, packing="best_fit")
    opened, before = fitting.open(seed=0), stream.open(seed=0)
    sizes = np.diff(before.train.offsets)
    inputs = int((sizes - 1).sum())
    assert opened.facts["train_padding"] == pytest.approx(1 - inputs / (100 * len(opened.train)))
    assert len(opened.train) <= 11 / 9 * math.ceil(inputs / 100) + 1  # Johnson 1973's bound
    assert opened.digest != before.digest
    leaves = jax.tree.leaves(opened.train.example(0, None))
    assert [leaf.shape for leaf in leaves] == [(100,)] * 5
    cut = sum(np.diff(row.segment_ids[row.segment_ids > 0]).size > 0 for row in (
        opened.train.example(index, None) for index in range(len(opened.train))))  # fmt: skip
    assert cut > len(opened.train) / 2  # rows of several documents
    prepare(stream, tmp_path / ".store", workers=1, progress=lambda characters, tokens: None)
    assert open_store(tmp_path / ".store").parts["train"].documents == len(sizes)
    stored = dataclasses.replace(fitting, source=str(tmp_path / ".store")).open(seed=0)
    assert stored.digest == opened.digest
    jax.tree.map(
        np.testing.assert_array_equal,
        stored.train.examples(np.arange(5)),
        opened.train.examples(np.arange(5)),
    )


def test_documents_that_are_not_told_apart_cannot_be_packed_so():
    with pytest.raises(UserError, match="TextData.packing = 'best_fit' keeps documents whole"):
        TextData(packing="best_fit", separate_documents=False)
