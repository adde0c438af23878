"""Long documents tokenized in pieces: the ids are those that `tokenizers` gives of the whole."""

import dataclasses
import random

import numpy as np
import pytest
from foreign_tokenizers import CORPUS, KINDS, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config.errors import UserError
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.tokenization import tokenizer
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer, cut, tokens_of

PARTS = [
    *"".join(CORPUS).splitlines(keepends=True), "\n", "\n\n", "  \n", "/ slash\n", ");\n", "</s>",
    "=" * 70 + "\n", "</s>\n", "x\r\n", "\t\n", "1,000\n", "你好\n", "...\n", "a b  c   d\n",
]  # fmt: skip


def long_text(seed: int, lines: int = 300) -> str:
    return "".join(random.Random(seed).choices(PARTS, k=lines))


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """A tokenizer of another library, and ours of its file."""
    theirs = trained(request.param)
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    theirs.save(str(path))
    return theirs, FileTokenizer(path)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(tokenizer, "AROUND", 128)


def test_the_ids_are_those_of_the_whole(both):
    theirs, ours = both
    texts = [long_text(seed) for seed in range(4)] + ["short", "", "\n"]
    pieces = [list(cut([text], ours.border)) for text in texts]
    if theirs.token_to_id("two\nthree") is None:  # all but one kind have borders at lines
        assert all(len(found) > 8 for found in pieces[:4])
    assert ["".join(piece.text for piece in found) for found in pieces] == texts
    for text, ids in zip(texts, ours.encode_documents(texts), strict=True):
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_pieces_do_not_depend_on_the_parts_that_are_read(both):
    _, ours = both
    text = long_text(9)
    expected = list(cut([text], ours.border))
    for size in (1, 7, 1000):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert list(cut(parts, ours.border)) == expected


def test_a_store_has_the_ids_of_the_whole(both, tmp_path):
    theirs, ours = both
    texts = [long_text(20 + number) for number in range(3)]
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text, newline="")
    theirs.save(str(tmp_path / "tokenizer.json"))
    data = TextData(
        source=str(tmp_path / "corpus"), sequence_length=8, heldout_fraction=0.4,
        tokenizer=str(tmp_path / "tokenizer.json"),
    )  # fmt: skip
    prepare(data, tmp_path / "store", workers=1, progress=lambda characters, tokens: None)
    stored = dataclasses.replace(data, source=str(tmp_path / "store")).open(seed=0)
    read = data.open(seed=0)
    assert stored.digest == read.digest
    expected = [theirs.encode(text).ids + [ours.end_of_text] for text in texts]
    found = [
        np.asarray(split.tokens[begin:end]).tolist()
        for split in (stored.train, stored.heldout)
        for begin, end in zip(split.offsets, split.offsets[1:], strict=False)
    ]
    assert sorted(found) == sorted(expected)


def test_a_text_without_borders_is_left_whole(both):
    theirs, ours = both
    for text in (
        "no line end" * 300,
        "\n".join([" indented"] * 300),
        "x" * 2000 + "\n" + "y" * 999,
    ):
        assert len(list(cut([text], ours.border))) == 1
        (ids,) = ours.encode_documents([text])
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_after_many_lines_that_are_no_border_the_rest_is_whole():
    asked = []
    text = "line\n" * 5000
    pieces = list(cut([text], lambda left, right: asked.append(left)))
    assert [piece.text for piece in pieces] == [text]
    assert len(asked) == 100


def test_bytes_in_pieces():
    text = long_text(3)
    pieces = list(cut([text], ByteTokenizer().border))
    assert len(pieces) > 8
    found = np.concatenate(list(ByteTokenizer().encode_pieces(pieces)))
    assert found.tobytes() == text.encode()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(PARTS), max_size=60), st.integers(20, 90))
def test_any_text_in_pieces_of_any_size(lines, size):
    for theirs in _SOME:
        text = "".join(lines)
        encode = theirs.encode

        def border(left, right, encode=encode):
            whole = encode(left + right, add_special_tokens=False)
            number = tokenizer.border_at(whole.ids, whole.offsets, len(left))
            return None if number is None else (whole.ids[number - 1], whole.ids[number])

        found = []
        for piece in cut([text], border, size=size, around=160):
            whole = encode(piece.before + piece.text + piece.after, add_special_tokens=False)
            found += tokens_of(piece, whole.ids, whole.offsets)
        assert found == encode(text, add_special_tokens=False).ids


_SOME = [trained("llama2"), trained("gpt4o")]


def test_a_border_that_is_read_in_two_ways_is_an_error(both):
    theirs, ours = both
    first, second, *_ = cut([long_text(1)], ours.border)
    wrong = dataclasses.replace(first, ends=(first.ends[0], first.ends[0] + 1))
    for piece in (wrong, dataclasses.replace(second, begins=wrong.ends)):
        with pytest.raises(UserError, match="too long to be tokenized at once"):
            list(ours.encode_pieces([piece]))
