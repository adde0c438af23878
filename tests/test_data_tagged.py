"""TaggedText: words and their tags out of files, told at their tokens, learned and predicted."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from conftest import predicted

from jaxtrain import load_config
from jaxtrain.__main__ import main
from jaxtrain.analysis.verify.shrink import shrink
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.classed import TaggedText
from jaxtrain.models.recurrent.rnn import GRU
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.training.preflight.preflight import check

TOLD = {"objective": "token_classification", "num_classes": 3}
SENTENCES = [
    (["EU", "rejects", "Ölmann", "call"], ["ORG", "O", "PER", "O"]),
    (["Peter", "."], ["PER", "O"]),
]
CONLL = """-DOCSTART- -X- O O

EU NNP I-NP ORG
rejects VBZ I-VP O
Ölmann NNP I-NP PER
call NN I-NP O

Peter NNP I-NP PER
. . O O
"""


def lines_of(sentences) -> str:
    return "\n".join(json.dumps({"tokens": w, "tags": t}) for w, t in sentences)


@pytest.fixture
def source(tmp_path):
    def write(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("name", ["a.conll", "a.jsonl"])
def test_both_kinds_of_files_give_the_same_rows(source, name):
    content = CONLL if name.endswith("conll") else lines_of(SENTENCES)
    data = TaggedText(
        source=source(name, content), num_classes=3, sequence_length=32, heldout_fraction=0.5
    )
    assert data.class_names() == ["O", "ORG", "PER"]
    opened = data.open(seed=0)
    row = opened.train.example(0, None)
    text = "EU rejects Ölmann call".encode()
    assert bytes(row.inputs[: len(text)].tolist()) == text
    assert row.segment_ids.sum() == len(text)
    # At the first byte of each word: E, r, the first of two of Ö, c.
    places = np.flatnonzero(row.loss_mask).tolist()
    assert places == [0, 3, 11, 19]
    assert row.targets[places].tolist() == [1, 0, 2, 0]
    held = opened.heldout.example(0, None)
    assert held.targets[held.loss_mask > 0].tolist() == [2, 0]
    last = dataclasses.replace(data, pooling="last", begin=7).open(seed=0).train.example(0, None)
    assert np.flatnonzero(last.loss_mask).tolist() == [2, 10, 18, 23]
    assert last.inputs[0] == 7


def test_words_are_told_at_the_tokens_that_tokenizers_give_them(tmp_path):
    """By `word_ids` of WordPiece, of words that were parted before."""
    words = ["un", "##happi", "##ly", "play", "##ing", ".", "the", "[UNK]"]
    model = tokenizers.models.WordPiece({w: n for n, w in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.save(str(tmp_path / "tokenizer.json"))
    data = TaggedText(tokenizer=str(tmp_path / "tokenizer.json"), source="x.jsonl")
    sentence = ["the", "unhappily", "playing", "xyz", ".", "un"]
    tokens, places = data.tokens_of(sentence, data.open_tokenizer())
    theirs = made.encode(sentence, is_pretokenized=True)
    assert tokens == theirs.ids
    assert places == [theirs.word_ids.index(number) for number in range(len(sentence))]
    data = dataclasses.replace(data, pooling="last")
    _, places = data.tokens_of(sentence, data.open_tokenizer())
    last = [len(theirs.ids) - 1 - theirs.word_ids[::-1].index(n) for n in range(len(sentence))]
    assert places == last


def test_words_behind_the_end_of_a_row_are_left_out_and_counted(source):
    data = TaggedText(
        source=source("a.jsonl", lines_of(SENTENCES * 2)), num_classes=3, sequence_length=12,
        heldout_fraction=0.5,
    )  # fmt: skip
    opened = data.open(seed=0)
    assert opened.facts["texts_cut"] == 2
    row = opened.train.example(0, None)
    assert np.flatnonzero(row.loss_mask).tolist() == [0, 3, 11]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.xml", "", r"ends in .jsonl, .json, .conll"),
        ("a.conll", "EU ORG\nrejects\n", r"line 2 has one column, 'rejects'"),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}', r"line 1 has 1 words .* and 0 tags"),
        ("a.jsonl", '{"tokens": "a", "tags": []}', r"'tokens' is not a list of strings"),
        ("a.jsonl", '{"tokens": ["a"], "tag": ["O"]}', r"no field 'tags'; did you mean 'tag'"),
        ("a.jsonl", lines_of(SENTENCES), r"num_classes = 2, but .* has 3 \(O, ORG, PER\)"),
    ],
)
def test_files_that_are_none_of_tags_are_refused_by_their_place(source, name, content, sentence):
    with pytest.raises(UserError, match=sentence):
        TaggedText(source=source(name, content)).open(seed=0)


def test_predictions_are_of_the_words_places(source):
    data = TaggedText(source=source("a.conll", CONLL), num_classes=3, sequence_length=16)
    model = GRU(vocab_size=256, num_layers=1, embed_dim=8, context_length=16, **TOLD)

    def logits(batch):
        told = np.zeros((*batch.inputs.shape, 3))
        told[..., 2] = np.isin(batch.inputs, [ord("P"), ord("U")]) * np.log(2)
        return told

    found = list(predicted(["Up Paul", "so"], model, data, logits, top=1))
    assert [(one.name, one.label) for one in found] == [
        ("text 1, Up", "PER"), ("text 1, Paul", "PER"), ("text 2, so", "O"),
    ]  # fmt: skip
    assert found[0].classes[0][1] == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"'sixteen' of text 1 is behind TaggedText.sequence_len"):
        list(predicted("fifteen or more sixteen", model, data, logits, top=1))


def test_models_fit_and_verify_shrinks(source):
    config = load_config("bert_tiny")
    model = BERT(vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, context_length=16, **TOLD)
    data = TaggedText(num_classes=3, sequence_length=16, synthetic_vocab_size=64)
    train = dataclasses.replace(config.train, model=model, data=data)
    config = dataclasses.replace(config, train=train)
    check(config, device_count=1, platform="cpu")
    check(shrink(config).config, device_count=1, platform="cpu")
    more = dataclasses.replace(train, data=dataclasses.replace(data, num_classes=4))
    with pytest.raises(UserError, match=r"smaller than TaggedText.num_classes=4"):
        check(dataclasses.replace(config, train=more), device_count=1, platform="cpu")
    opened = data.open(seed=0)
    row = opened.train.example(0, None)
    assert row.loss_mask.sum() == row.segment_ids.sum()


@pytest.mark.slow  # a run like that of test_text_classification, with a label for each word
def test_a_run_learns_and_predicts_tags(source, tmp_path, capsys):
    rng, kinds = np.random.default_rng(0), {"fruit": ["apple", "lime"], "tool": ["saw", "axe"]}
    sentences = []
    for _ in range(120):
        tags = rng.choice(list(kinds), 3).tolist()
        sentences.append(([str(rng.choice(kinds[tag])) for tag in tags], tags))
    bindings = [
        "Train.model = @GRU()", "Train.data = @TaggedText()", "GRU.vocab_size = 256",
        "GRU.num_layers = 1", "GRU.embed_dim = 32", "GRU.context_length = 24",
        "GRU.objective = 'token_classification'", "GRU.bidirectional = True",
        "TaggedText.sequence_length = 24", "Train.steps = 40", "Train.global_batch_size = 16",
        "Train.save_every = 0", "Train.log_every = 20", "Mesh.fsdp = -1",
        "Optimizer.learning_rate = 1e-2", "Precision.compute = 'float32'",
        f"TaggedText.source = {source('words.jsonl', lines_of(sentences))!r}",
    ]  # fmt: skip
    config = tmp_path / "words.gin"
    config.write_text("\n".join(bindings))
    workdir = str(tmp_path / "run")
    assert main(["train", str(config), "--workdir", workdir]) == 0
    capsys.readouterr()
    assert main(["eval", "--workdir", workdir]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_accuracy"] == found["eval_macro_f1"] == 1.0
    assert np.sum(found["eval_confusion"]) == 36
    assert main(["predict", "--workdir", workdir, "lime saw axe", "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["lime: fruit", "saw: tool", "axe: tool"]
