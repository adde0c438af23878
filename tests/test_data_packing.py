"""Packing: rows of the stream, marks per document, and no target from another document."""

import math
from collections import Counter

import jax
import numpy as np
import pytest

from jaxtrain.data.text import packing

LENGTHS = [1, 5, 2, 23, 1, 1, 7, 16, 8, 3]


def documents(lengths):
    """Documents whose tokens say which document and place they are: 100 * document + place."""
    return [np.arange(n, dtype=np.uint16) + 100 * (d + 1) for d, n in enumerate(lengths)]


def packed(lengths, sequence_length):
    return packing.pack(documents(lengths), sequence_length, np.dtype(np.uint16))


def by_the_loop(lengths, length):
    """The same rows, one token at a time: (input, target, mask, segment, position)."""
    stream = [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    rows = []
    for start in range(0, len(stream) - 1, length):
        row, segments = [], {}
        for place in range(start, start + length):
            if place + 1 >= len(stream):
                row.append((0, 0, 0.0, 0, 0))
                continue
            (d, t), (next_d, next_t) = stream[place], stream[place + 1]
            first = segments.setdefault(d, (len(segments) + 1, t))
            own = float(d == next_d)
            row.append(
                (100 * (d + 1) + t, 100 * (next_d + 1) + next_t, own, first[0], t - first[1])
            )
        rows.append(row)
    return rows


@pytest.mark.parametrize("length", [1, 2, 3, 8, 16, 66, 67, 100])
def test_rows_equal_those_of_the_plain_loop(length):
    rows = packed(LENGTHS, length)
    expected = by_the_loop(LENGTHS, length)
    assert len(rows) == len(expected)
    for index, row in enumerate(expected):
        example = rows.example(index, None)
        found = (
            example.inputs,
            example.targets,
            example.loss_mask,
            example.segment_ids,
            example.positions,
        )
        assert [tuple(token) for token in zip(*(x.tolist() for x in found), strict=True)] == row
        dtypes = [str(x.dtype) for x in found]
        assert dtypes == ["int32", "int32", "float32", "int32", "int32"]


def test_no_counted_target_belongs_to_another_document():
    rng = np.random.default_rng(0)
    rows = packed(rng.integers(1, 40, size=150).tolist(), 32)
    for index in range(len(rows)):
        example = rows.example(index, None)
        counted = example.loss_mask == 1
        same_document = example.inputs // 100 == example.targets // 100
        assert (same_document[counted]).all()
        assert (example.targets[counted] == example.inputs[counted] + 1).all()
        assert not (same_document & ~counted & (example.segment_ids > 0)).any()
        assert (example.positions < 32).all()


def test_every_token_but_a_documents_first_is_a_target_once():
    rows = packed(LENGTHS, 8)
    examples = [rows.example(index, None) for index in range(len(rows))]
    counted = np.concatenate([x.targets[x.loss_mask == 1] for x in examples])
    expected = np.concatenate([document[1:] for document in documents(LENGTHS)])
    assert counted.tolist() == expected.tolist()


def test_unigram_entropy_is_the_held_out_cross_entropy_of_the_corpus_frequencies():
    vocab = 7
    rng = np.random.default_rng(1)
    texts = [rng.integers(vocab - 1, size=n).astype(np.uint8) for n in (40, 30, 9, 5)]
    train = packing.pack(texts[:2], 8, np.dtype(np.uint8))
    heldout = packing.pack(texts[2:], 8, np.dtype(np.uint8))

    counts = Counter(int(token) for text in texts for token in text)
    total = sum(counts.values())
    targets = [int(token) for text in texts[2:] for token in text[1:]]
    expected = -sum(math.log(counts[token] / total) for token in targets) / len(targets)
    found = packing.unigram_entropy(train, heldout, vocab)
    assert found == pytest.approx(expected, rel=1e-12)


def test_counts_are_the_same_in_slices(monkeypatch):
    tokens = np.random.default_rng(2).integers(11, size=1000).astype(np.uint8)
    monkeypatch.setattr(packing, "COUNT_SLICE", 33)
    assert packing.token_counts(tokens, 11).tolist() == np.bincount(tokens, minlength=11).tolist()


def test_documents_that_are_not_kept_apart_are_one_running_text():
    texts = documents([5, 9, 3])
    packed = packing.pack(texts, 8, np.dtype(np.uint16), separate=False)
    stream = np.concatenate(texts)
    row, last = packed.example(0, None), packed.example(1, None)
    assert row.segment_ids is None
    np.testing.assert_array_equal(row.positions, np.arange(8))
    np.testing.assert_array_equal(row.inputs, stream[:8])
    np.testing.assert_array_equal(row.targets, stream[1:9])
    np.testing.assert_array_equal(row.loss_mask, 1.0)
    np.testing.assert_array_equal(last.targets, stream[9:17])
    np.testing.assert_array_equal(last.inputs, stream[8:16])


def one_by_one(packed, index):
    """A row by walking over its tokens, as PackedText's docstring says it."""
    length, total = packed.sequence_length, len(packed.tokens)
    begins = set(packed.offsets.tolist())
    leaves = np.zeros((5, length), np.int64)
    segment, position = 0, None
    for t in range(length):
        place = index * length + t
        if place >= total - 1:  # padding; positions run through where documents are not separate
            leaves[:, t] = 0, 0, 0, 0, 0 if packed.separate else t
            continue
        is_new = position is None or (packed.separate and place in begins)
        segment, position = (segment + 1, 0) if is_new else (segment, position + 1)
        counts = not (packed.separate and place + 1 in begins)
        leaves[:, t] = packed.tokens[place], packed.tokens[place + 1], counts, segment, position
    return leaves


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_rows_made_together_are_the_rows_walked_over(separate, length):
    rng = np.random.default_rng(length)
    for _ in range(20):
        sizes = rng.integers(1, 12, rng.integers(1, 9))
        texts = [rng.integers(1, 300, size).astype(np.uint16) for size in sizes]
        made_of = packing.pack(texts, length, np.dtype(np.uint16), separate=separate)
        if not len(made_of):
            continue
        indices = rng.integers(0, len(made_of), 5)
        made = made_of.examples(indices)
        leaves = [made.inputs, made.targets, made.loss_mask, made.segment_ids, made.positions]
        assert (made.segment_ids is None) == (not separate)
        for row, index in enumerate(indices.tolist()):
            for leaf, expected in zip(leaves, one_by_one(made_of, index), strict=True):
                if leaf is not None:
                    np.testing.assert_array_equal(leaf[row], expected)
        single = made_of.example(int(indices[0]), None)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), single) == jax.tree.map(
            lambda x: (x.shape[1:], x.dtype), made
        )
