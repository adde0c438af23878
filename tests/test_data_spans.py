"""SpanData: rows lose the spans that T5's paper says, and their targets tell them."""

import itertools
import json

import jax
import numpy as np
import pytest
import tokenizers

from jaxtrain import load_config
from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.loader import batches
from jaxtrain.data.pairs.spans import Corruption, SpanData, WithSentinels, span_mask
from jaxtrain.data.text.source import TextData
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer
from jaxtrain.training.preflight.preflight import check

END, BEGIN = 1, 0


def stated(length, corrupted, mean_length, rng):
    """The mask as the paper's own code states it (t5.data, random_spans_noise_mask), in loops."""
    lost = min(max(int(np.round(length * corrupted)), 1), length - 1)
    spans = max(int(np.round(lost / mean_length)), 1)

    def segmentation(items, parts):
        cut_behind = set(rng.permutation(items - 1)[: parts - 1].tolist())
        sizes, size = [], 0
        for item in range(items):
            size += 1
            if item in cut_behind or item == items - 1:
                sizes.append(size)
                size = 0
        return sizes

    left = segmentation(length - lost, spans)
    gone = segmentation(lost, spans)
    mask = []
    for some, others in zip(left, gone, strict=True):
        mask += [False] * some + [True] * others
    return mask


def stated_pair(tokens, mask, sentinels):
    """Figure 2 of the paper: `X` for each span in the source, and before it in the target."""
    source, target, names = [], [], iter(sentinels)
    for is_lost, run in itertools.groupby(zip(tokens, mask, strict=True), key=lambda one: one[1]):
        own = [token for token, _ in run]
        if is_lost:
            name = next(names)
            source += [name]
            target += [name, *own]
        else:
            source += own
    return [*source, END], [*target, END]


@pytest.mark.parametrize(
    ("length", "corrupted", "mean_length"),
    [
        (2, 0.15, 3.0),
        (7, 0.15, 3.0),
        (64, 0.15, 3.0),
        (512, 0.15, 3.0),
        (40, 0.5, 1.5),
        (9, 0.9, 9),
    ],
)
def test_spans_are_those_of_the_papers_procedure(length, corrupted, mean_length):
    rng = np.random.default_rng(0)
    tokens, sentinels = rng.integers(2, 250, length), tuple(range(999, 500, -1))
    told = Corruption(corrupted, mean_length, sentinels, END, BEGIN, (600, 600))
    for seed in range(20):
        mask = stated(length, corrupted, mean_length, np.random.default_rng(seed))
        found = span_mask(length, corrupted, mean_length, np.random.default_rng(seed))
        assert found.tolist() == mask
        row = told.of(tokens, np.random.default_rng(seed))
        source, target = stated_pair(tokens.tolist(), mask, sentinels)
        assert row.source[row.source_segment_ids > 0].tolist() == source
        assert row.targets[row.loss_mask > 0].tolist() == target
        assert row.inputs[row.segment_ids > 0].tolist() == [BEGIN, *target[:-1]]


def test_each_way_of_cutting_is_as_likely_as_any_other():
    rng, draws = np.random.default_rng(0), 6000
    counts: dict[bytes, int] = {}
    for _ in range(draws):
        mask = span_mask(10, 0.4, 2.0, rng)  # 4 lost in 2 spans: 3 ways, 6 left in 2 parts: 5
        counts[mask.tobytes()] = counts.get(mask.tobytes(), 0) + 1
    assert len(counts) == 15
    expected = draws / 15
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 36.1  # of 14 degrees of freedom, one in a thousand


def test_a_whole_row_fills_its_places_and_a_batch_is_of_seed_and_step(tmp_path):
    """Sources and targets of whole rows have no padding; what is lost depends on nothing else."""
    text = TextData(source=written(tmp_path), sequence_length=64)
    data = SpanData(text=text)
    opened, shapes = data.open(seed=0), data.abstract_batch(8)
    assert (data.source_length, data.target_length) == (64 - 10 + 3 + 1, 10 + 3 + 1)
    assert data.vocab_size == opened.facts["vocab_size"] == 256 + 3
    assert "unigram_entropy" not in opened.facts
    made = {"global_batch_size": 8, "seed": 5}
    stream = batches(opened.train, threads=0, **made)
    first, second = next(stream), next(stream)
    assert jax.tree.map(np.shape, first) == jax.tree.map(lambda x: x.shape, shapes)
    assert (first.source_segment_ids == 1).all()
    assert (first.loss_mask == 1).all()
    part = batches(opened.train, threads=2, start=1, rows=np.array([6, 2]), **made)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[[6, 2]]), next(part), second)
    part.close()
    # The same rows in another epoch lose other spans, in another run the same.
    again = next(batches(data.open(seed=0).train, threads=0, **made))
    jax.tree.map(np.testing.assert_array_equal, again, first)
    epoch = len(opened.train)
    rows = [opened.train.example(3, np.random.default_rng((5, p))) for p in (3, 3 + epoch)]
    assert (rows[0].source != rows[1].source).any()
    held = opened.heldout.example(0, None)
    jax.tree.map(np.testing.assert_array_equal, held, opened.heldout.example(0, None))
    assert SpanData(text=text, corrupted=0.2).open(seed=0).digest != opened.digest


def written(folder):
    """Files of a few words."""
    rng = np.random.default_rng(0)
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choice(["one", "two", "six"], 80)))
    return str(folder)


def test_what_is_lost_and_what_is_left_are_the_text(tmp_path):
    """Of rows that packing pads too: sentinels are filled in by what stands behind them."""
    text = TextData(source=written(tmp_path), sequence_length=300, packing="best_fit")
    data = SpanData(text=text, mean_length=2.0)
    opened, tokenizer = data.open(seed=0), data.open_tokenizer()
    plain = text.open(seed=0)
    for index in range(5):
        row = opened.train.example(index, np.random.default_rng(index))
        source = tokenizer.decode(row.source[row.source_segment_ids > 0])
        target = tokenizer.decode(row.targets[row.segment_ids > 0])
        assert source.endswith("\0")
        parts = target[:-1].split("<extra_id_")[1:]
        assert len(parts) > 20
        for part in parts:
            number, _, lost = part.partition(">")
            source = source.replace(f"<extra_id_{number}>", lost)
        original = plain.train.example(index, None)
        ids = original.inputs[original.segment_ids > 0]
        assert source[:-1] == bytes(ids.tolist()).decode()


def test_a_last_row_has_no_padding_in_it_where_documents_are_not_kept_apart(tmp_path):
    """Bytes of 0, which would be told as text."""
    text = TextData(source=written(tmp_path), sequence_length=300, separate_documents=False)
    heldout = SpanData(text=text).open(seed=0).heldout
    plain = text.open(seed=0).heldout.example(len(heldout) - 1, None)
    real = int(plain.loss_mask.sum())
    assert 0 < real < 300
    row = heldout.example(len(heldout) - 1, None)
    told = (row.source_segment_ids > 0).sum() + (row.segment_ids > 0).sum()
    spans = (row.source > 255).sum()
    assert told == real + 2 * spans + 2  # both have the sentinels and an end


def test_sentinels_are_tokens_with_names():
    tokenizer = WithSentinels(ByteTokenizer(), 3)
    ids = tokenizer.encode("aü<extra_id_1>b<extra_id_3>")
    assert ids == [*"aü".encode(), 257, *b"b<extra_id_3>"]
    assert tokenizer.decode(ids) == "aü<extra_id_1>b<extra_id_3>"
    assert tokenizer.encode_with_offsets("aü<extra_id_0>b")[1] == [0, 1, 1, 2, 14]
    assert tokenizer.token("X", "<extra_id_2>") == 256
    assert tokenizer.vocab_size == 259
    assert tokenizer.end_of_text == 0


def test_a_tokenizers_own_sentinels_are_taken_by_name(tmp_path):
    names = [f"<extra_id_{number}>" for number in range(3)]
    vocab = {name: n for n, name in enumerate(["<pad>", "</s>", "one", "two", "six", *names])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(names)
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    (tmp_path / "texts").mkdir()
    text = TextData(source=written(tmp_path / "texts"), tokenizer=str(file), sequence_length=64)
    data = SpanData(text=text, sentinels="<extra_id_{}>")
    opened = data.open(seed=0)
    row = opened.train.example(0, None)
    assert [token for token in row.targets.tolist() if token > 4] == [5, 6, 7]
    assert row.targets[-1] == vocab["</s>"]
    assert data.vocab_size == len(vocab)
    longer = SpanData(
        text=TextData(source=text.source, tokenizer=str(file), sequence_length=80),
        sentinels="<extra_id_{}>",
    )
    with pytest.raises(UserError, match=r"SpanData.sentinels = '<extra_id_3>'.*no such token"):
        longer.open(seed=0)


@pytest.mark.parametrize(
    ("changes", "text", "sentence"),
    [
        ({"corrupted": 1.0}, {}, "SpanData.corrupted=1.0: the masked fraction"),
        ({"mean_length": 0.5}, {}, "SpanData.mean_length=0.5; use at least 1"),
        ({"begin": -1}, {}, "SpanData.begin=-1; use 0 or more"),
        ({"sentinels": "<extra_id_0>"}, {}, "write {} for the number"),
        ({}, {"sequence_length": 1}, "at least 2 tokens"),
        ({}, {"packing": "padded"}, "use 'stream' or 'best_fit'"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text, sentence):
    with pytest.raises(UserError) as refusal:
        SpanData(text=TextData(**text), **changes)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        (
            "T5.vocab_size = 256",
            r"tokens and sentinels \(TextData.tokenizer='byte'\); use at least",
        ),
        ("T5.context_length = 64", r"source_length=\d+ is longer.*by a smaller TextData.sequence_"),
    ],
)
def test_models_that_cannot_take_them_are_refused(binding, sentence):
    with pytest.raises(UserError, match=sentence):
        check(load_config("t5_tiny", [binding]), device_count=1, platform="cpu")


@pytest.mark.slow  # two programs of a T5
def test_a_run_learns_to_tell_spans(tmp_path, capsys):
    bindings = [
        "Train.steps=8", "Schedule.warmup_steps=1", "Train.global_batch_size=8",
        "Train.log_every=1", "Train.save_every=0", "Train.eval_batches=1",
        f"TextData.source={written(tmp_path)!r}", "TextData.sequence_length=64",
        "T5.num_layers=1", "T5.context_length=64", "T5.embed_dim=16", "T5.num_heads=2",
        "T5.head_dim=8", "T5.mlp_dim=16",
    ]  # fmt: skip
    words = [word for binding in bindings for word in ("-b", binding)]
    workdir = tmp_path / "run"
    assert main(["train", "t5_tiny", *words, "--workdir", str(workdir)]) == 0
    said = capsys.readouterr().out
    assert "<extra_id_0>" in said
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    prompt = ["--prompt", "one <extra_id_0> six", "--max-new-tokens", "4"]
    assert main(["generate", "--workdir", str(workdir), *prompt]) == 0
