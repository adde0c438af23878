"""PairData: files of pairs, what does not fit, sums, and rows that anyone can read."""

import csv
import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import example_shape, kind_of
from jaxtrain.data.pairs.source import PairData

PAIRS = [(f"question {n}: ü", f"answer\t{n}, \u2028 too") for n in range(40)]


def write(path, pairs=PAIRS, names=("source", "target")):
    if path.suffix == ".parquet":
        columns = zip(*pairs, strict=True)
        pq.write_table(pa.table(dict(zip(names, map(list, columns), strict=True))), path)
        return str(path)
    if ".jsonl" in path.name:
        records = (json.dumps(dict(zip(names, pair, strict=True))) for pair in pairs)
        content = "\n\n".join(records).encode()
    else:
        text = io.StringIO()
        table = csv.writer(text, delimiter="\t" if ".tsv" in path.name else ",")
        table.writerows([(*names, "more"), *((*pair, "x") for pair in pairs)])
        content = text.getvalue().encode("utf-8-sig")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.tsv", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_every_form_of_file_gives_the_same_pairs(tmp_path, name):
    data = PairData(source=write(tmp_path / name), source_length=20, target_length=24)
    opened = data.open(seed=0)
    assert len(opened.train) == 38
    assert len(opened.heldout) == 2
    places = [n for n in range(40) if (n + 1) % 20]
    for index in (0, 37):
        source, target = (text.encode() for text in PAIRS[places[index]])
        row = opened.train.example(index, None)
        assert bytes(row.source[: len(source)].tolist()) == source
        told = [*target, 0]
        assert row.targets[: len(told)].tolist() == told
        assert row.inputs[: len(told)].tolist() == [0, *target]
        assert row.loss_mask.sum() == row.segment_ids.sum() == len(told)
        assert row.source_segment_ids.sum() == len(source)
        assert (row.loss_mask[: len(told)] == 1).all()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_of_several_answers_one_is_drawn_in_training_and_all_are_held_out(tmp_path, name):
    """As many as they are; an answer that does not fit is none."""
    told = [["one", "two", "much too long for it"], ["three"], ["4", "5", "6"], ["7", "8"]]
    source = write(tmp_path / name, [(f"q{n}", told[n % 4]) for n in range(40)])
    opened = PairData(source=source, target_length=8, heldout_fraction=0.1).open(seed=0)
    assert (opened.facts["train_pairs"], opened.facts["answers"]) == (36, 80)

    def texts(row):
        rows = (row, *(row.answers or ()))
        return [bytes(one.targets[one.loss_mask == 1][:-1].tolist()).decode() for one in rows]

    held = [texts(opened.heldout.example(n, None)) for n in range(4)]
    assert held == [["three", "", ""], ["7", "8", ""]] * 2  # every tenth question
    answers = opened.heldout.example(1, None).answers
    assert [int(one.loss_mask.sum()) for one in answers] == [2, 0]
    rng, drawn = np.random.default_rng(0), {n: set() for n in range(3)}
    for _ in range(60):
        for n, found in drawn.items():
            row = opened.train.example(n, rng)
            assert row.answers is None
            found.update(texts(row))
    assert drawn == {0: {"one", "two"}, 1: {"three"}, 2: {"4", "5", "6"}}
    assert texts(opened.train.example(0, None)) == ["one", "two", ""]


def test_a_batch_has_the_declared_form():
    data = PairData(source_length=9, target_length=6, begin=3)
    row, shapes = data.open(seed=0).train.example(0, None), data.abstract_batch(4)
    for name, shape in vars(shapes).items():
        value = vars(row)[name]
        assert (value is None) == (shape is None)
        if value is not None:
            assert (4, *value.shape) == shape.shape
            assert value.dtype == shape.dtype
    assert row.inputs[0] == 3
    assert kind_of(shapes) == "pairs"
    assert example_shape(shapes) == (9, 6)


def test_pairs_that_do_not_fit_are_left_out_and_counted(tmp_path):
    source = write(tmp_path / "a.tsv", [("ab", "c"), ("abc", "c"), ("", "c"), ("ab", "cd")] * 10)
    data = PairData(source=source, source_length=2, target_length=2, heldout_fraction=0.1)
    facts = data.open(seed=0).facts
    assert (facts["train_pairs"], facts["heldout_pairs"], facts["pairs_left_out"]) == (9, 1, 30)


def test_sums_are_right_all_different_and_none_of_the_held_out_is_trained_on():
    data = PairData(addition_digits=2, addition_pairs=2000, source_length=5, target_length=4)
    opened, told = data.open(seed=0), {}
    tokenizer = opened.tokenizer
    for split in (opened.train, opened.heldout):
        for index in range(len(split)):
            row = split.example(index, None)
            source = tokenizer.decode(row.source.tolist())
            told[source] = tokenizer.decode(row.targets[:-1].tolist())
            first, second = source.split("+")
            assert told[source] == f"{int(first) + int(second):03}"
            assert row.targets[-1] == tokenizer.end_of_text
    assert len(told) == 2000


def test_random_pairs_are_of_the_seed_and_of_many_lengths():
    data = PairData(source="synthetic", synthetic_vocab_size=11)
    one, again, other = (data.open(seed=seed) for seed in (0, 0, 1))
    assert one.digest == again.digest != other.digest
    assert one.tokenizer is None
    lengths = {int(one.train.example(n, None).source_segment_ids.sum()) for n in range(50)}
    assert lengths == set(range(8, 17))


def test_digests_are_of_what_the_rows_are_made_of():
    made = {PairData(**change).open(seed=0).digest for change in (
        {}, {"begin": 1}, {"target_length": 9}, {"addition_pairs": 19_000},
    )}  # fmt: skip
    assert len(made) == 4


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        ('{"sorce": "a", "target": "b"}', "a.jsonl", r"line 1 has no field 'source'.*'sorce'"),
        ('\n{"source": 1, "target": "b"}', "a.jsonl", r"line 2: 'source' is not a string"),
        ('{"source": "a", "target": []}', "a.jsonl", r"line 1: 'target' is an empty list"),
        ('{"source": "a", "target": ["b", 1]}', "a.jsonl", r"line 1: 'target' is not a string"),
        ('{"source": ["a"], "target": "b"}', "a.jsonl", r"line 1: 'source' is not a string"),
        ("[1]", "a.jsonl", r"line 1 is not a JSON object"),
        ("{", "a.jsonl", r"line 1 is not UTF-8 JSON"),
        ("source\ttarget\na", "a.tsv", r"line 2 has 1 fields, the line of names 2"),
        ("source,targets\na,b", "a.csv", r"no column 'target'.*'targets'"),
        ('source,target\na,"b', "a.csv", r"not a complete table"),
        ("a b", "a.txt", r"ends in .jsonl, .json, .tsv, .csv"),
    ],
)
def test_files_that_are_none_of_pairs_are_refused_by_their_place(tmp_path, content, name, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        PairData(source=str(tmp_path / name)).open(seed=0)


@pytest.mark.parametrize(
    ("pair", "names", "words"),
    [
        (("a", None), ("source", "target"), r"row 41: no field 'target'"),
        (("a", "b"), ("source", "targets"), r"row 1: no field 'target'; did you mean 'targets'"),
    ],
)
def test_rows_of_columns_that_hold_no_pair_are_named(tmp_path, pair, names, words):
    source = write(tmp_path / "a.parquet", [*PAIRS, pair], names)
    with pytest.raises(UserError, match=rf"PairData.source: {source}: {words}"):
        PairData(source=source).open(seed=0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source": "additon"}, r"did you mean 'addition'"),
        ({"addition_pairs": 60, "addition_digits": 1}, r"addition_pairs=60.*at most 50"),
        ({"target_length": 1}, r"PairData.target_length=1"),
        ({"source_length": 3}, r"of its 20000 pairs 0 fit into PairData.source_length=3"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        PairData(**changes).open(seed=0)


def test_batches_are_rows_of_the_split(tmp_path):
    opened = PairData(source_length=8, target_length=8).open(seed=0)
    assert np.array_equal(opened.train.example(5, np.random.default_rng(0)).source,
                          opened.train.example(5, None).source)  # fmt: skip
