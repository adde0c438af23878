"""Tokenizers: bytes, and tokenizer.json files against the library that wrote them."""

import hashlib

import numpy as np
import pytest
import tokenizers
from conftest import unreadable
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxtrain.config.errors import UserError
from jaxtrain.data.text.source import TextData
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer

CORPUS = [
    "def f(x):\n    return x + 1\n",
    "Grüße aus Köln – 你好\n",
    "the cat sat on the mat\n",
] * 9


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE of 300 tokens, as GPT-2's is made."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture
def bpe_path(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    bpe.save(str(path))
    return path


def test_bytes_are_the_utf8_bytes_and_come_back():
    tokenizer = ByteTokenizer()
    text = "naïve – 你好\n"
    assert tokenizer.encode(text) == list(text.encode("utf-8"))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (ids,) = tokenizer.encode_documents([text])
    assert ids.tolist() == tokenizer.encode(text)
    assert ids.dtype == np.uint8


def test_bytes_that_are_no_text_decode_to_the_replacement_character():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xC3]) == "\ufffd"
    # A model's vocabulary may be padded beyond 256 to divide over a mesh.
    assert tokenizer.decode([104, 300, 105]) == "h\ufffdi"


def test_byte_vocabulary_divides_over_tensor_axes():
    assert ByteTokenizer().vocab_size == 256
    assert ByteTokenizer().end_of_text == 0
    assert TextData().vocab_size == 256


def test_file_gives_the_librarys_ids(bpe, bpe_path):
    tokenizer = FileTokenizer(bpe_path)
    for text in CORPUS[:3]:
        assert tokenizer.encode(text) == bpe.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    batches = list(tokenizer.encode_documents(CORPUS))
    assert [ids.tolist() for ids in batches] == [bpe.encode(text).ids for text in CORPUS]
    assert batches[0].dtype == np.uint16
    assert tokenizer.vocab_size == bpe.get_vocab_size() == 300
    assert tokenizer.end_of_text == bpe.token_to_id("<|endoftext|>")
    assert tokenizer.digest == hashlib.sha256(bpe_path.read_bytes()).hexdigest()
    assert TextData(tokenizer=str(bpe_path)).vocab_size == 300


def test_files_own_truncation_and_padding_are_off(bpe_path):
    cutting = tokenizers.Tokenizer.from_file(str(bpe_path))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=50)
    cutting.save(str(bpe_path))
    ids = FileTokenizer(bpe_path).encode(CORPUS[0])
    assert len(ids) > 4
    assert FileTokenizer(bpe_path).decode(ids) == CORPUS[0]


def test_vocab_size_covers_holes_in_the_ids(tmp_path):
    path = tmp_path / "tokenizer.json"
    holes = models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")
    tokenizers.Tokenizer(holes).save(str(path))
    tokenizer = FileTokenizer(path)
    assert tokenizer.vocab_size == 70_001
    assert tokenizer.end_of_text is None
    assert tokenizer.dtype == np.uint32


@pytest.mark.parametrize("content", [b"", b"not json", b"[1, 2]", b'{"model": {}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer.json' is not a Hugging Face tokenizer.json"):
        TextData(tokenizer=str(path)).open_tokenizer()


def test_a_tokenizer_that_may_not_be_read_is_refused(tmp_path):
    path = tmp_path / "folder" / "tokenizer.json"
    path.parent.mkdir()
    path.touch()
    for place in (path, path.parent):
        unreadable(place)
        with pytest.raises(UserError, match=r"TextData.tokenizer = .*: Permission denied \("):
            TextData(tokenizer=str(path)).open_tokenizer()


def test_a_missing_tokenizer_is_refused_with_the_nearest_name(bpe_path):
    wrong = str(bpe_path).replace("tokenizer.json", "tokeniser.json")
    with pytest.raises(UserError) as refusal:
        TextData(tokenizer=wrong).open(seed=0)
    assert f"TextData.tokenizer = {wrong!r}: no such file or folder" in str(refusal.value)
    assert f"did you mean {str(bpe_path)!r}?" in str(refusal.value)
    with pytest.raises(UserError, match=r"'bytes'.*did you mean 'byte'\?"):
        TextData(tokenizer="bytes").open(seed=0)


def test_a_folder_as_tokenizer_is_refused_with_the_file_in_it(bpe_path):
    with pytest.raises(
        UserError, match=r"is a folder, not a file; did you mean '.*tokenizer.json'"
    ):
        TextData(tokenizer=str(bpe_path.parent)).open_tokenizer()


def test_end_of_text_names_a_token(bpe, bpe_path):
    chosen = TextData(tokenizer=str(bpe_path), end_of_text="<pad>").open_tokenizer()
    assert chosen.end_of_text == bpe.token_to_id("<pad>")
    with pytest.raises(UserError, match=r"'<endoftext>'.*did you mean '<\|endoftext\|>'\?"):
        TextData(tokenizer=str(bpe_path), end_of_text="<endoftext>").open_tokenizer()
    with pytest.raises(UserError, match="the byte tokenizer ends documents with byte 0"):
        TextData(end_of_text="<pad>").open_tokenizer()
