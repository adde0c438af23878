"""Mixtures: shares, epochs and stages are what was asked, by the seed and the step alone."""

import dataclasses
import itertools
import json
import operator
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import Trainer, load_config
from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data import mixture_sampler as mixing_of_data
from jaxtrain.data.loader import batches
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.mixture_sampler import Mixing, Source, floor_sum
from jaxtrain.data.text.source import TextData

ROWS = 200, 1000, 150


def mixing(shares, *, once=(False, False, False), later=(), rows=ROWS, linear=False):
    sources = [Source(name, count, 8 * count, 2) for name, count in zip("abc", rows, strict=False)]
    return Mixing(tuple(sources), ((0, shares), *later), once[: len(rows)], linear)


def drawn(one, count, *, size=10, seed=3):
    """The indices of the first batches, end to end."""
    everything = np.arange(size)
    found = [
        one.indices(batch, everything, global_batch_size=size, seed=seed) for batch in range(count)
    ]
    return np.concatenate(found)


def by_source(indices, rows=ROWS):
    """Which source each is of, and its number there."""
    source = np.searchsorted(np.cumsum(rows), indices, side="right")
    return source, indices - (np.cumsum(rows) - rows)[source]


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-99, 200), st.integers(-99, 200))
@settings(max_examples=60)
def test_a_sum_of_floors_is_the_sum_of_the_floors(count, divisor, step, offset):
    found = floor_sum(count, divisor, step, offset)
    assert found == sum((step * k + offset) // divisor for k in range(count))


def test_any_stretch_holds_the_shares_and_each_epoch_each_row_once():
    shares = (0.5, 0.3, 0.2)
    source, row = by_source(drawn(mixing(shares), 100, size=20))
    for begin, length in ((0, 10), (17, 100), (990, 1010)):
        counts = np.bincount(source[begin : begin + length], minlength=3)
        np.testing.assert_allclose(counts, np.array(shares) * length, atol=4)
    for number, rows in enumerate(ROWS):
        own = row[source == number]
        epochs = [own[begin : begin + rows] for begin in range(0, len(own) - rows + 1, rows)]
        for epoch in epochs:
            assert sorted(epoch) == list(range(rows))
        if len(epochs) > 1:
            assert not np.array_equal(epochs[0], epochs[1])


def test_what_was_seen_is_known_without_drawing_it():
    stages = ((20, (0.0, 0.5, 0.5)), (60, (1.0, 0.0, 0.0)))
    one = mixing((0.6, 0.3, 0.1), later=stages, once=(False, False, True))
    everything = by_source(drawn(one, 90))[0]
    for count in (0, 1, 19, 20, 21, 59, 60, 61, 90):
        told = one.count_seen(count, global_batch_size=10, seed=3)
        counts = np.bincount(everything[: 10 * count], minlength=3)
        assert [seen.rows for seen in told.values()] == counts.tolist()
        assert told["a"].epochs == counts[0] / 200
    later = one.count_seen(10**15, global_batch_size=10**3, seed=3)  # in no time
    assert later["a"].rows > 0.99 * 10**18


def test_shares_change_at_their_steps():
    one = mixing((1.0, 0.0, 0.0), later=((4, (0.0, 1.0, 0.0)), (7, (0.0, 0.25, 0.75))))
    source = by_source(drawn(one, 20))[0]
    assert set(source[:40]) == {0}
    assert set(source[40:70]) == {1}
    np.testing.assert_allclose(np.bincount(source[70:]), [0, 32.5, 97.5], atol=3)


def test_shares_go_evenly_from_stage_to_stage():
    stages = ((10, (0.8, 0.1, 0.1)), (110, (0.0, 0.4, 0.6)))
    one = mixing((0.8, 0.1, 0.1), later=stages, linear=True)
    source = by_source(drawn(one, 200, size=20))[0]
    for begin in range(0, 3800, 100):
        ahead = np.clip((np.arange(begin, begin + 200) - 200) / 2000, 0, 1)[:, None]
        shares = np.array([0.8, 0.1, 0.1]) * (1 - ahead) + np.array([0.0, 0.4, 0.6]) * ahead
        counts = np.bincount(source[begin : begin + 200], minlength=3)
        np.testing.assert_allclose(counts, shares.sum(0), atol=4)
    assert 0 not in source[2200:]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 0.1, 0.25, 0.6])] * 2), min_size=2, max_size=4),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 5),
    st.sampled_from([{}, {"_WHOLE": 64, "_STEP": 39}]),
)
def test_of_shares_that_move_what_was_seen_is_what_was_drawn(shares, gaps, once, seed, sequence):
    every = [(a, b, 1 - a - b if a + b <= 1 else 0.0) for a, b in shares]
    every = [of if of[2] else (0.0, 0.0, 1.0) for of in every]
    steps = np.cumsum(gaps).tolist()
    later = tuple(zip(steps, every[1:], strict=False))
    one = mixing(every[0], later=later, linear=True, once=(*once, False), rows=(11, 30, 19))
    with pytest.MonkeyPatch.context() as patched:
        # Of a coarse sequence many places fall on a bound.
        for name, value in sequence.items():
            patched.setattr(mixing_of_data, name, value)
        mixing_of_data._segments.cache_clear()
        source, row = by_source(drawn(one, 30, size=5, seed=seed), (11, 30, 19))
        for count in (1, *steps, 30):
            told = one.count_seen(count, global_batch_size=5, seed=seed)
            counts = np.bincount(source[: 5 * count], minlength=3)
            assert [seen.rows for seen in told.values()] == counts.tolist()
    mixing_of_data._segments.cache_clear()
    for number, rows in enumerate((11, 30)):
        own = row[source == number]
        assert sorted(own[:rows]) == sorted(set(own))  # the first epoch has each row once
        assert not once[number] or len(own) <= rows


def test_shares_that_move_over_a_long_run_are_known_in_no_time():
    half = 10**12
    one = mixing((1.0, 0.0, 0.0), later=((2 * half, (0.0, 0.0, 1.0)),), linear=True)
    told = one.count_seen(2 * half, global_batch_size=10**3, seed=3)
    assert told["a"].rows == pytest.approx(10**15, rel=1e-9)
    assert told["b"].rows == 0
    rows = one.indices(half, np.arange(1000), global_batch_size=10**3, seed=3)
    assert 490 < np.count_nonzero(rows < 200) < 510
    before, after = (
        one.count_seen(half + one_more, global_batch_size=10**3, seed=3) for one_more in (0, 1)
    )
    assert after["a"].rows - before["a"].rows == np.count_nonzero(rows < 200)


def test_a_source_that_is_seen_once_leaves_its_share_to_the_others():
    one = mixing((0.5, 0.2, 0.3), once=(True, False, True))
    source, row = by_source(drawn(one, 50, size=20))
    counts = Counter(source.tolist())
    assert counts[0] == 200
    assert counts[2] == 150
    assert sorted(row[source == 0]) == list(range(200))
    last = max(np.flatnonzero(source != 1))
    assert set(source[last + 1 :]) == {1}
    between = source[np.flatnonzero(source == 0).max() + 1 : np.flatnonzero(source == 2).max()]
    assert len(between) > 40
    assert np.mean(between == 2) == pytest.approx(3 / 5, abs=0.05)  # 0.3 of 0.2 + 0.3


def test_rows_of_any_process_are_those_of_the_whole_batch():
    one = mixing((0.2, 0.5, 0.3), later=((3, (0.4, 0.4, 0.2)),), once=(False, False, True))
    for batch in (0, 3, 40):
        whole = one.indices(batch, np.arange(16), global_batch_size=16, seed=5)
        for rows in (np.arange(8, 16), np.arange(0, 16, 4), np.array([15]), np.arange(0)):
            part = one.indices(batch, rows, global_batch_size=16, seed=5)
            np.testing.assert_array_equal(part, whole[rows])


@pytest.fixture
def corpus(tmp_path):
    for name, letter, lines in (("code", "c", 400), ("web", "w", 900)):
        (tmp_path / f"{name}.txt").write_text(f"{letter * 30}\n" * lines)
    return {name: str(tmp_path / f"{name}.txt") for name in ("code", "web")}


def test_batches_are_of_the_sources_own_rows(corpus):
    text = TextData(sequence_length=16)
    mixture = Mixture(sources=corpus, weights={"code": 0.75, "web": 0.25}, data=text)
    opened = mixture.open(seed=7)
    stream = batches(opened.train, global_batch_size=8, seed=7, start=2, order=opened.mixing)
    found = next(stream)
    indices = opened.mixing.indices(2, np.arange(8), global_batch_size=8, seed=7)
    parts = [dataclasses.replace(text, source=path).open(seed=7) for path in corpus.values()]
    first = len(parts[0].train)
    for row, index in enumerate(indices.tolist()):
        source, own = (parts[0], index) if index < first else (parts[1], index - first)
        expected = source.train.example(own, None)
        of_row = jax.tree.map(operator.itemgetter(row), found)
        jax.tree.map(np.testing.assert_array_equal, of_row, expected)
        jax.tree.map(np.testing.assert_array_equal, opened.train.example(index, None), expected)
    letters = Counter(chr(token) for token in found.inputs.reshape(-1) if token > 32)
    assert letters["c"] > letters["w"] > 0
    assert opened.facts["train_tokens"] == sum(part.facts["train_tokens"] for part in parts)
    other = dataclasses.replace(mixture, weights={"code": 0.5, "web": 0.5}).open(seed=7)
    assert other.digest != opened.digest
    by_size = dataclasses.replace(mixture, weights=None).open(seed=7).mixing
    assert by_size.stages[0][1][0] == pytest.approx(first / (first + len(parts[1].train)))


TINY = """
Train.model = @GPT()
Train.data = @Mixture()
Train.steps = 6
Train.global_batch_size = 8
Train.eval_every = 3
Train.eval_batches = 2
Train.save_every = 3
Train.log_every = 1
GPT.vocab_size = 256
GPT.num_layers = 1
GPT.embed_dim = 16
GPT.num_heads = 2
GPT.context_length = 16
TextData.sequence_length = 16
Mixture.data = @TextData()
Mixture.weights = {'code': 0.75, 'web': 0.25}
Mixture.stages = {4: {'code': 0.5, 'web': 0.5}}
"""


def test_a_run_tells_losses_and_epochs_by_source_and_goes_on_where_it_was(corpus, tmp_path, capsys):
    file = tmp_path / "tiny.gin"
    file.write_text(TINY + f"Mixture.sources = {corpus!r}\n")

    config, workdir = load_config(file), tmp_path / "run"

    def run():
        Trainer(config, workdir, devices=jax.devices()[:1]).train()
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    straight = run()
    evaluations = [line for line in straight if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6]
    seen = config.train.data.open(seed=0).mixing.count_seen(6, global_batch_size=8, seed=0)
    assert {f"epochs_{name}": one.epochs for name, one in seen.items()}.items() <= (
        evaluations[1].items()
    )
    for line in evaluations:  # two batches of each, of as many targets
        mean = (line["eval_loss_code"] + line["eval_loss_web"]) / 2
        assert line["eval_loss"] == pytest.approx(mean, rel=1e-3)
        assert line["eval_loss_code"] != line["eval_loss_web"]
    shutil.rmtree(workdir / "checkpoints" / "6")  # as if it had been stopped after step 3
    resumed = run()
    for key in ("loss", "eval_loss_code", "epochs_web"):
        told, expected = (
            {line["step"]: line[key] for line in lines if key in line}
            for lines in (resumed, straight)
        )
        assert told == expected
    again = load_config(workdir / "config.gin")  # what is written is read again
    assert again.train.data == config.train.data
    assert main(["data", str(file), "--examples", "1"]) == 0
    assert "Mixture, after 6 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sources": {}}, "Mixture.sources = {}: name at least one"),
        ({"sources": {"a b": "x"}}, "'a b' is used in names of metrics"),
        ({"weights": {"code": 0.5, "web": 0.4}}, "sum to 0.9; they are shares that sum to 1, such"),
        ({"weights": {"code": 0.0, "web": 0.0}}, "Mixture.weights sum to 0; they"),
        (
            {"weights": {"code": 1.0}},
            "Mixture.weights has no share for 'web'; give each source one",
        ),
        ({"weights": {"cod": 1.0, "web": 0}}, "'cod' is not a source; did you mean 'code'?"),
        ({"weights": {"code": 1.5, "web": -0.5}}, "['code'] = 1.5: use a fraction from 0 to 1"),
        ({"stages": {5: {"code": 1.0}}}, "Mixture.stages[5] has no share for 'web'"),
        ({"stages": {0: {"code": 1.0, "web": 0.0}}}, "a stage begins at step 0; use 1 or more"),
        (
            {"single_epoch": ("wed",)},
            "Mixture.single_epoch: 'wed' is not a source; did you mean 'web'?",
        ),
        (
            {"single_epoch": ("code", "web")},
            "samples only sources that Mixture.single_epoch ends",
        ),
        (
            {"single_epoch": ("code",), "stages": {9: {"code": 1.0, "web": 0.0}}},
            "Mixture.stages[9] samples only sources",
        ),
        (
            {"interpolation": "linear"},
            "'linear' goes from Mixture.weights to Mixture.stages, of which",
        ),
        ({"data": TextData(source="README.md")}, "is not used with Mixture.sources"),
    ],
)
def test_shares_that_cannot_be_are_refused(changed, words):
    with pytest.raises(UserError) as caught:
        Mixture(**{"sources": {"code": "a", "web": "b"}, "data": TextData(), **changed})
    assert words in str(caught.value)


def test_the_stream_of_batches_is_that_of_one_process_for_two(corpus):
    opened = Mixture(sources=corpus, data=TextData(sequence_length=16)).open(seed=0)

    def taken(rows):
        stream = batches(opened.train, global_batch_size=8, seed=0, rows=rows, order=opened.mixing)
        return [one.inputs for one in itertools.islice(stream, 3)]

    halves = zip(taken(np.arange(4)), taken(np.arange(4, 8)), strict=True)
    for whole, parts in zip(taken(None), halves, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))
