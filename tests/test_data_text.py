"""TextData: what each source holds, how it is split, and what is rejected in which words."""

import dataclasses
import math
import os
import pydoc_data.topics
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.config import reader, writer
from jaxtrain.config.errors import UserError
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.source import digest, is_heldout
from jaxtrain.data.text.documents import read_embedded
from jaxtrain.data.text.source import TextData


def text_of(packed):
    return bytes(packed.tokens).decode("utf-8")


@pytest.fixture
def folder(tmp_path):
    """Twenty text files in two folders, and things that are no text."""
    root = tmp_path / "corpus"
    for number in range(20):
        path = (
            root / ("b" if number % 2 else "a") / f"{number:02}.{('txt', 'md', 'py')[number % 3]}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {number} " * 5, encoding="utf-8")
    (root / "image.png").write_bytes(b"\x89PNG\xff")
    (root / "empty.txt").write_text("")
    (root / "blank.txt").write_text(" \n\t\n")
    (root / ".git").mkdir()
    (root / ".git" / "hidden.txt").write_text("hidden")
    return root


# -- sources --------------------------------------------------------------------------------------


def test_embedded_text_is_the_standard_library_and_the_language_reference():
    texts = list(read_embedded())
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "ast.py").read_text(encoding="utf-8") in texts
    assert (stdlib / "json" / "decoder.py").read_text(encoding="utf-8") in texts
    assert pydoc_data.topics.topics["lambda"] in texts
    assert not any("site-packages" in path.parts for path in stdlib.glob("json/*"))
    unittest_case = next(stdlib.glob("unittest/case.py")).read_text(encoding="utf-8")
    assert unittest_case in texts  # a library about tests is no test
    for excluded in ("idlelib/idle_test/test_config.py", "test/test_ast.py"):
        path = stdlib / excluded
        if path.is_file():
            assert path.read_text(encoding="utf-8") not in texts


def test_embedded_text_is_found_without_a_look_at_installed_packages(tmp_path, monkeypatch):
    for name in ("b.py", "a/c.py", "a/test/d.py", "site-packages/e.py", "config-3/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    seen, walked = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(Path(path).name) or walked(path))
    topics = pydoc_data.topics.topics
    assert list(read_embedded()) == ["a/c.py", "b.py", *(topics[name] for name in sorted(topics))]
    assert {"a", "config-3"} <= {*seen}
    assert not {"test", "site-packages"} & {*seen}


def test_embedded_opens_with_facts_that_add_up():
    data = TextData(sequence_length=128)
    opened = data.open(seed=0)
    facts = opened.facts
    assert facts["documents"] == facts["train_documents"] + facts["heldout_documents"] > 500
    assert facts["train_tokens"] == len(opened.train.tokens) > 1_000_000
    assert 0.01 < facts["heldout_tokens"] / facts["train_tokens"] < 0.15
    assert 0 < facts["unigram_entropy"] < math.log(256)
    assert opened.unit == "tokens"
    assert data.open(seed=1).digest == opened.digest
    assert len(opened.digest) == 64


def test_documents_end_with_byte_0_and_none_is_lost(folder):
    opened = TextData(source=str(folder), sequence_length=16).open(seed=0)
    assert opened.facts["documents"] == 20
    parts = text_of(opened.train).split("\0")[:-1] + text_of(opened.heldout).split("\0")[:-1]
    assert sorted(parts) == sorted(f"document {number} " * 5 for number in range(20))


def test_a_folder_is_read_in_order_of_its_paths(folder):
    opened = TextData(source=str(folder), sequence_length=16).open(seed=0)
    order = [*range(0, 20, 2), *range(1, 20, 2)]  # folder a, then folder b
    train = [f"document {number} " * 5 for number in order[:-1]]
    assert text_of(opened.train).split("\0")[:-1] == train
    assert text_of(opened.heldout) == f"document {order[-1]} " * 5 + "\0"


def test_one_file_is_cut_at_a_line_break(tmp_path):
    path = tmp_path / "play.txt"
    lines = [f"line {number} of the play, quoth she\r\n" for number in range(200)]
    path.write_bytes("".join(lines).encode("utf-8"))
    opened = TextData(source=str(path), sequence_length=32, heldout_fraction=0.1).open(seed=0)
    train, heldout = text_of(opened.train)[:-1], text_of(opened.heldout)[:-1]
    assert train + heldout == "".join(lines)
    assert heldout.startswith("line ")
    assert 0.08 < len(heldout) / len(train + heldout) < 0.1


def test_a_file_of_one_line_is_cut_within_it(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("word " * 200)
    opened = TextData(source=str(path), sequence_length=8, heldout_fraction=0.25).open(seed=0)
    assert opened.facts["heldout_tokens"] == 251


def test_synthetic_tokens_are_random_and_a_function_of_the_seed():
    data = TextData(source="synthetic", synthetic_vocab_size=1000, sequence_length=64)
    opened, same, other = data.open(seed=1), data.open(seed=1), data.open(seed=2)
    assert data.vocab_size == 1000
    assert opened.tokenizer is None
    row = opened.train.example(5, None)
    jax.tree.map(np.testing.assert_array_equal, row, same.train.example(5, None))
    assert row.inputs.tolist() != other.train.example(5, None).inputs.tolist()
    assert row.inputs.tolist() != opened.heldout.example(5, None).inputs.tolist()
    assert row.inputs[1:].tolist() == row.targets[:-1].tolist()
    assert row.inputs.dtype == np.int32
    tokens = np.concatenate([opened.train.example(i, None).inputs for i in range(400)])
    assert tokens.min() == 0
    assert tokens.max() == 999
    assert opened.facts["unigram_entropy"] == math.log(1000)
    assert opened.digest == same.digest != other.digest


def test_abstract_batch_is_what_examples_stack_to():
    for data in (TextData(source="synthetic", sequence_length=12),):
        row = data.open(seed=0).train.example(0, None)
        expected = jax.tree.map(lambda leaf: ((4, *leaf.shape), leaf.dtype), row)
        found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), data.abstract_batch(4))
        assert found == expected


@dataclasses.dataclass(frozen=True)
class Root:
    """A whole configuration of data alone."""

    text: TextData
    image: ImageData
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def test_settings_are_read_from_gin_and_written_back():
    bindings = ["TextData.sequence_length = 32", "ImageData.mean = (1, 2, 3)"]
    bindings += ["ImageData.channels = 3", "ImageData.crop = 'pad'"]
    root = reader.load(Root, None, bindings, search_path=Path())
    assert root.text == TextData(sequence_length=32)
    assert root.image == ImageData(mean=(1.0, 2.0, 3.0), channels=3, crop="pad")
    again = writer.to_gin(root).splitlines()
    assert reader.load(Root, None, [a for a in again if a], search_path=Path()) == root
    with pytest.raises(UserError, match="ImageData.crop = 'random'.*'none', 'pad', 'resized'"):
        reader.load(Root, None, ["ImageData.crop = 'random'"], search_path=Path())


def test_paths_are_written_absolute_and_nothing_else_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded").write_text("a file that is called like a word")

    def written(*bindings):
        root = reader.load(Root, None, bindings, search_path=Path())
        assert reader.load(Root, None, writer.to_gin(root).splitlines(), search_path=Path()) == root
        text = writer.to_gin(root, absolute=True)
        lines = dict(line.split(" = ") for line in text.splitlines() if line)
        return [lines[binding.split(" = ")[0]] for binding in bindings]

    here = str(tmp_path)
    paths = ("TextData.source", "TextData.tokenizer", "TextData.data_dir", "ImageData.source",
             "ImageData.data_dir")  # fmt: skip
    for path, absolute in (("a/b", f"{here}/a/b"), ("/a", "/a"), ("~/a", str(Path.home() / "a"))):
        assert written(*(f"{name} = {path!r}" for name in paths)) == [repr(absolute)] * len(paths)
    for binding in (
        "TextData.source = 'embedded'",
        "TextData.source = 'synthetic'",
        "TextData.source = 'tfds:imdb_reviews'",
        "TextData.source = 'gs://bucket/text'",
        "TextData.tokenizer = 'byte'",
        "TextData.data_dir = None",
        "ImageData.source = 'digits'",
        "ImageData.source = 'mnist5k'",
    ):
        assert written(binding) == [binding.split(" = ")[1]]


# -- digest and split -----------------------------------------------------------------------------


def test_a_digest_knows_where_its_parts_end():
    found = {digest({}, parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [])}
    assert len(found) == 4
    array = np.arange(6, dtype=np.uint16)
    assert digest({}, [array]) == digest({}, [array.tobytes()]) != digest({"a": 1}, [array])
    assert digest({}, [array[::2]]) == digest({}, [array[::2].copy()])


def test_the_digest_covers_content_split_and_row_length(folder):
    def digest_of(**settings):
        base = {"source": str(folder), "sequence_length": 16, "heldout_fraction": 0.1}
        return TextData(**(base | settings)).open(seed=0).digest

    first = digest_of()
    assert digest_of() == first
    assert digest_of(sequence_length=17) != first
    assert digest_of(heldout_fraction=0.2) != first
    (folder / "a" / "00.txt").write_text("document 0 changed")
    assert digest_of() != first


def test_the_digest_covers_where_documents_end(tmp_path):
    digests = []
    for name, texts in (("one", ["ab\0c", "d" * 40]), ("two", ["ab", "c\0" + "d" * 40])):
        root = tmp_path / name
        root.mkdir()
        for number, text in enumerate([*texts, "h" * 40]):
            (root / f"{number}.txt").write_text(text)
        data = TextData(source=str(root), sequence_length=8, heldout_fraction=0.34)
        digests.append(data.open(seed=0).digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("count", [1, 19, 20, 100, 1000])
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.29, 0.5])
def test_the_held_out_share_is_spaced_evenly(count, fraction):
    held = np.flatnonzero(is_heldout(count, fraction))
    assert len(held) == math.floor(round(count * fraction, 9))
    if len(held) > 1:
        assert set(np.diff(held)) <= {math.floor(1 / fraction), math.ceil(1 / fraction)}


def test_a_twentieth_is_every_twentieth():
    assert np.flatnonzero(is_heldout(65, 0.05)).tolist() == [19, 39, 59]


# -- rejections


def refusal(**settings):
    with pytest.raises(UserError) as caught:
        TextData(**settings).open(seed=0)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("to be")
    wrong = str(tmp_path / "shakespear.txt")
    message = refusal(source=wrong)
    assert f"TextData.source = {wrong!r}: no such file or folder" in message
    assert f"did you mean {str(tmp_path / 'shakespeare.txt')!r}?" in message
    assert "did you mean 'embedded'?" in refusal(source="embeded")
    nowhere = refusal(source="/nowhere/at/all.txt")
    assert "it takes a path or one of 'embedded', 'synthetic', 'tfds:NAME'" in nowhere


def test_a_relative_path_is_hinted_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("notes")
    assert "did you mean 'notes.txt'?" in refusal(source="note.txt")
    assert "did you mean './notes.txt'?" in refusal(source="./note.txt")


@pytest.mark.parametrize("content", ["", " \n\n\t "])
def test_empty_text_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    assert f"TextData.source = {str(path)!r}: the text is empty" in refusal(source=str(path))
    assert f"TextData.source = {str(tmp_path)!r}: the text is empty" in refusal(
        source=str(tmp_path)
    )


def test_a_split_shorter_than_a_row_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a few words\n" * 20)
    message = refusal(source=str(path), sequence_length=64)
    assert "its held-out part has 1 document with 13 tokens" in message
    assert "one row of TextData.sequence_length = 64 needs 65" in message
    assert "its training part" in refusal(source=str(path), sequence_length=300)


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "a" / "link.txt").symlink_to(tmp_path / "secret.txt")
    message = refusal(source=str(folder))
    assert f"{folder / 'a' / 'link.txt'} is a link to {tmp_path / 'secret.txt'}" in message
    (folder / "a" / "link.txt").unlink()
    (folder / "everything").symlink_to(tmp_path)
    assert "outside the folder" in refusal(source=str(folder))


def test_a_link_within_the_folder_is_read_once(folder):
    (folder / "again.txt").symlink_to(folder / "a" / "00.txt")
    (folder / "again").symlink_to(folder / "a")
    opened = TextData(source=str(folder), sequence_length=16).open(seed=0)
    assert opened.facts["documents"] == 20


def test_a_file_that_is_not_utf8_is_refused(folder):
    (folder / "latin.txt").write_bytes("Köln".encode("latin-1"))
    message = refusal(source=str(folder))
    assert f"{folder / 'latin.txt'} is not UTF-8 text (byte 1)" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_length": 0}, "TextData.sequence_length = 0: a row has at least 1 token"),
        (
            {"heldout_fraction": 0.0},
            "TextData.heldout_fraction = 0.0: the held-out fraction is between 0",
        ),
        ({"heldout_fraction": 1.0}, "TextData.heldout_fraction = 1.0"),
        ({"synthetic_vocab_size": 1}, "TextData.synthetic_vocab_size = 1"),
        ({"heldout_split": "test"}, "TextData.heldout_split = 'test': only a 'tfds:NAME' source"),
        (
            {"source": "tfds:x", "heldout_split": "train"},
            "TextData.heldout_split = 'train' is TextData.train_split too",
        ),
        ({"source": "tfds:../x"}, "TextData.source = 'tfds:../x': after 'tfds:' comes NAME"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    assert words in refusal(**settings)
