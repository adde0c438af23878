"""Fill in the middle: the documents of a row come back from its parts, told in another order."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers

from jaxtrain.config.errors import UserError
from jaxtrain.data.loader import batches
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.text.fill_in_middle import FillInMiddle
from jaxtrain.data.text.source import TextData
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

PRE, SUF, MID = "\x01", "\x02", "\x03"
BYTES = {"prefix": PRE, "suffix": SUF, "middle": MID}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "naïve", "çafé", "on"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """120 documents of 40 to 80 words, each with its number in front; of a folder."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for number in range(120):
        words = rng.choice(WORDS, rng.integers(40, 80))
        (root / f"{number:03}.txt").write_text(f"{number} " + " ".join(words))
    return root


@pytest.fixture(scope="module")
def bpe(corpus, tmp_path_factory):
    """A byte-pair tokenizer.json with the usual names of sentinels."""
    made = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    texts = [path.read_text() for path in corpus.iterdir()]
    made.train_from_iterator(texts, vocab_size=400, special_tokens=special)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made.save(str(path))
    return path


def opened(corpus, length=1024, **settings):
    data = TextData(source=str(corpus), sequence_length=length, heldout_fraction=0.3, **settings)
    return data.open(seed=0)


def documents(row):
    """What a row has of each document, with the last target."""
    for number in range(1, int(row.segment_ids.max()) + 1):
        (places,) = np.nonzero(row.segment_ids == number)
        yield np.append(row.inputs[places], row.targets[places[-1]])


def put_back(text, pre=PRE, suf=SUF, mid=MID):
    """A whole document as it was."""
    if not text.startswith(pre):
        return text
    prefix, _, rest = text[len(pre) :].partition(suf)
    suffix, found, middle = rest.partition(mid)
    assert found, text
    return prefix + middle + suffix  # of SPM the prefix is empty: it stands before the middle


def test_documents_come_back_from_their_parts(corpus):
    plain = opened(corpus, packing="best_fit")
    moved = opened(corpus, packing="best_fit", fill_in_middle=FillInMiddle(rate=0.8, **BYTES))
    ways, whole = {"plain": 0, "psm": 0, "spm": 0}, 0
    for index in range(len(plain.train)):
        row = plain.train.example(index, None)
        expected = {bytes(one.astype(np.uint8)).decode().rstrip("\0") for one in documents(row)}
        for epoch in range(4):
            row = moved.train.example(index, np.random.default_rng((index, epoch)))
            for one in documents(row):
                text = bytes(one.astype(np.uint8)).decode(errors="replace")
                way = "plain" if text[0] != PRE else "spm" if text[1:2] == SUF else "psm"
                ways[way] += 1
                if text.endswith("\0"):  # the end of a row that is full is left out
                    assert put_back(text.rstrip("\0")) in expected
                    whole += 1
    count = sum(ways.values())
    assert ways["plain"] / count == pytest.approx(0.2, abs=4 * (0.16 / count) ** 0.5)
    assert ways["spm"] / count == pytest.approx(0.4, abs=4 * (0.24 / count) ** 0.5)
    assert whole > 0.6 * count


def test_targets_are_the_next_tokens_and_padding_counts_nowhere(corpus):
    moved = opened(corpus, fill_in_middle=FillInMiddle(rate=1.0, **BYTES))
    row = moved.train.example(1, np.random.default_rng(0))
    real = row.segment_ids > 0
    assert real.sum() > 1000
    np.testing.assert_array_equal(row.loss_mask, real)
    same = row.segment_ids[1:] == row.segment_ids[:-1]
    np.testing.assert_array_equal((row.targets[:-1] == row.inputs[1:])[same & real[1:]], True)
    assert (row.positions[np.flatnonzero(~same) + 1] == 0).all()
    assert (np.diff(row.positions)[same & real[1:]] == 1).all()
    for leaf in (row.inputs, row.targets, row.positions):
        assert not leaf[~real].any()


def test_cuts_are_between_characters_anywhere(corpus):
    moved = opened(corpus, packing="best_fit", fill_in_middle=FillInMiddle(spm=0.0, **BYTES))
    shares = []
    for seed in range(120):
        row = moved.train.example(seed % len(moved.train), np.random.default_rng(seed))
        for one in documents(row):
            if one[-1] == 0 and one[0] == 1:  # the end of a row may cut anything
                text = bytes(one.astype(np.uint8)).decode()
                prefix, _, rest = text[1:-1].partition(SUF)
                suffix, _, middle = rest.partition(MID)
                whole = len(prefix) + len(suffix) + len(middle)
                shares.append((len(prefix) / whole, len(middle) / whole, len(suffix) / whole))
    # Two cuts anywhere: each part is a third on average, with a variance of 1/18.
    assert len(shares) > 100
    error = 4 * (1 / 18 / len(shares)) ** 0.5
    np.testing.assert_allclose(np.mean(shares, 0), 1 / 3, atol=error)


def test_parts_are_encoded_on_their_own_by_a_tokenizer_of_words(corpus, bpe):
    settings = {"tokenizer": str(bpe), "packing": "best_fit", "length": 512}
    plain = opened(corpus, **settings)
    moved = opened(corpus, fill_in_middle=FillInMiddle(rate=1.0), **settings)
    tokenizer = plain.tokenizer
    seen = 0
    for index in range(10):
        expected = [tokenizer.decode(one) for one in documents(plain.train.example(index, None))]
        for one in documents(moved.train.example(index, np.random.default_rng(index))):
            text = tokenizer.decode(one)
            if not text.endswith("<|endoftext|>"):
                continue
            names = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
            back = put_back(text.removesuffix("<|endoftext|>"), *names)
            assert back + "<|endoftext|>" in expected
            assert text.startswith("<|fim_prefix|>")
            seen += 1
    assert seen > 20


def test_held_out_rows_are_as_they_were_and_epochs_differ(corpus):
    settings = FillInMiddle(**BYTES)
    plain, moved = opened(corpus), opened(corpus, fill_in_middle=settings)
    jax.tree.map(
        np.testing.assert_array_equal,
        plain.heldout.example(0, None),
        moved.heldout.example(0, None),
    )
    jax.tree.map(
        np.testing.assert_array_equal, plain.train.example(0, None), moved.train.example(0, None)
    )
    assert plain.digest != moved.digest
    one, same, other = (
        moved.train.example(0, np.random.default_rng(seed)).inputs for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(moved.train.document_lengths(), plain.train.document_lengths())


def test_rows_of_batches_are_those_of_any_process_and_of_mixtures_too(corpus):
    data = TextData(sequence_length=128, fill_in_middle=FillInMiddle(rate=1.0, **BYTES))
    sources = {"all": str(corpus), "same": str(corpus)}
    found = Mixture(data=data, sources=sources, weights={"all": 0.5, "same": 0.5}).open(seed=0)
    assert {source.name for source in found.mixing.sources} == {"all", "same"}

    def batch(rows):
        return next(
            batches(
                found.train, global_batch_size=8, seed=3, start=2, rows=np.array(rows), threads=0,
                order=found.mixing,
            )
        )  # fmt: skip

    whole, part = batch(range(8)), batch([6, 1])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[[6, 1]], b), whole, part)
    assert (whole.inputs == 1).any(1).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 1.5}, "FillInMiddle.rate = 1.5: use a fraction from 0 to 1"),
        ({"spm": -0.5}, "FillInMiddle.spm = -0.5: use a fraction from 0 to 1"),
        ({"prefix": "a", "suffix": "a"}, "must be three different tokens"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        FillInMiddle(**settings)


def test_tokens_that_are_not_there_are_refused_with_the_nearest(corpus, bpe):
    with pytest.raises(UserError, match="one character of one byte, such as"):
        opened(corpus, fill_in_middle=FillInMiddle())
    wrong = dataclasses.replace(FillInMiddle(), middle="<|fim_midle|>")
    with pytest.raises(UserError, match=r"has no such token; did you mean '<\|fim_middle\|>'"):
        opened(corpus, tokenizer=str(bpe), fill_in_middle=wrong)
    with pytest.raises(UserError, match="'synthetic' has no text to fill in"):
        TextData(source="synthetic", fill_in_middle=FillInMiddle()).open(seed=0)
    with pytest.raises(UserError, match="separate_documents = False does not separate"):
        TextData(separate_documents=False, fill_in_middle=FillInMiddle())


def test_a_model_that_tells_hidden_tokens_is_refused():
    config = load_config("bert_tiny", bindings=["TextData.fill_in_middle = @FillInMiddle()"])
    with pytest.raises(UserError, match=r"fill_in_middle is for models that predict the next"):
        preflight.check(config, device_count=1, platform="cpu", kind="cpu")
