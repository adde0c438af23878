"""Tokens in nanoGPT's, llm.c's and Megatron's files are read as they are, document by document."""

import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers

from jaxtrain.config.errors import UserError
from jaxtrain.data.source import digest
from jaxtrain.data.text.formats import token_files
from jaxtrain.data.text.packing import pack, unigram_entropy
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare

END = 7
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(8, 300, size).tolist() for size in RNG.integers(1, 90, 60)]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """300 words, of which 7 is the end of a text."""
    vocabulary = {f"w{number}": number for number in range(300)}
    vocabulary["<|endoftext|>"] = vocabulary.pop(f"w{END}")
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0")).save(str(file))
    return str(file)


def nanogpt(path, documents):
    """As its prepare.py writes it: each document, then the token."""
    np.array([token for one in documents for token in [*one, END]], "<u2").tofile(path)


def llm_c(path, documents, magic=20240520, dtype="<u2", version=1):
    """As its data_common.py writes it: the token, then each document, behind 256 int32."""
    tokens = np.array([token for one in documents for token in [END, *one]], dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def llama_c(path, documents):
    llm_c(path, documents, 20240801, "<u4", 7)


def megatron(path, documents, *, code=4, dtype="<i4"):
    """As its indexed_dataset.py writes it: two sequences a document, the token behind it."""
    sequences = [part for one in documents for part in (one[:1], [*one[1:], END])]
    np.concatenate([np.array(one, dtype) for one in sequences]).tofile(path)
    sizes = np.array([len(one) for one in sequences], "<i4")
    pointers = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(sizes), len(documents) + 1)
    index += sizes.tobytes() + pointers.tobytes()
    index += np.arange(0, len(sizes) + 1, 2, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)


WRITERS = {"nanogpt": nanogpt, "llm.c": llm_c, "llama.c": llama_c, "megatron": megatron}


def arrays(documents, writer):
    first = writer in (llm_c, llama_c)
    dtype = {llama_c: np.uint32, megatron: np.int32}.get(writer, np.uint16)
    return [np.array([END, *one] if first else [*one, END], dtype) for one in documents]


def assert_rows(found, expected):
    places = np.arange(len(expected))
    assert len(found) == len(expected)
    one, other = found.examples(places), expected.examples(places)
    for leaf, wanted in zip(vars(one).values(), vars(other).values(), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_rows_are_those_of_the_documents_in_memory(writer, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_SLICE", 100)
    texts = DOCUMENTS[:50], DOCUMENTS[50:]
    writer(tmp_path / "a_train_0.bin", texts[0][:20])
    writer(tmp_path / "a_train_1.bin", texts[0][20:])
    writer(tmp_path / "a_val_0.bin", texts[1])
    data = TextData(
        source=f"{tmp_path}/*.bin", sequence_length=16, tokenizer=tokenizer, heldout_split="val"
    )
    opened = data.open(seed=0)
    expected = [pack(arrays(of, writer), 16, np.dtype(np.int64)) for of in texts]
    assert_rows(opened.train, expected[0])
    assert_rows(opened.heldout, expected[1])
    assert opened.facts["train_documents"] == 50
    assert opened.facts["heldout_documents"] == 10
    assert opened.facts["unigram_entropy"] == pytest.approx(unigram_entropy(*expected, 300))
    index = sorted(token_files.cache_folder("tokens").glob("*/index.json"))
    kept = {file: file.stat().st_mtime_ns for file in index}
    again = data.open(seed=0)  # from what was kept
    assert again.digest == opened.digest
    assert_rows(again.train, expected[0])
    assert kept == {file: file.stat().st_mtime_ns for file in kept}


def test_of_several_processes_one_reads_all_tokens(tokenizer, tmp_path, monkeypatch):
    """The others take what it keeps; what they have mapped is not written again."""
    nanogpt(tmp_path / "tokens.bin", DOCUMENTS)
    look, looked = token_files._read_through, []

    def slowly(*arguments):
        looked.append(arguments)
        time.sleep(0.5)
        return look(*arguments)

    monkeypatch.setattr(token_files, "_read_through", slowly)
    data = TextData(source=str(tmp_path / "tokens.bin"), sequence_length=16, tokenizer=tokenizer)
    with ThreadPoolExecutor(3) as threads:  # locks are of open files: as if each were a process
        opened = list(threads.map(lambda _: data.open(seed=0), range(3)))
    assert len(looked) == 1
    assert len({one.digest for one in opened}) == 1


def test_a_single_file_holds_out_its_last_documents(tokenizer, tmp_path):
    nanogpt(tmp_path / "all.bin", DOCUMENTS)
    data = TextData(
        source=str(tmp_path / "all.bin"),
        sequence_length=16,
        tokenizer=tokenizer,
        heldout_fraction=0.2,
    )
    opened = data.open(seed=0)
    texts = arrays(DOCUMENTS, nanogpt)
    held = opened.facts["heldout_documents"]
    cut = sum(map(len, texts[:-held]))
    total = sum(map(len, texts))
    assert cut <= total * 0.8 < cut + len(texts[-held])
    assert_rows(opened.train, pack(texts[:-held], 16, np.dtype(np.uint16)))
    assert_rows(opened.heldout, pack(texts[-held:], 16, np.dtype(np.uint16)))
    parts = [opened.train.tokens[:], opened.train.offsets, opened.heldout.tokens[:]]
    header = json.loads(json.dumps(data._header(data.open_tokenizer())))
    assert opened.digest == digest(header, [*parts, opened.heldout.offsets])
    (tmp_path / "one.bin").write_bytes(np.arange(8, 208, dtype="<u2").tobytes())
    whole = TextData(source=str(tmp_path / "one.bin"), sequence_length=8, tokenizer=tokenizer)
    assert len(whole.open(seed=0).train.tokens) == 190  # one document, cut within


def test_ids_of_a_large_vocabulary_are_uint32(tmp_path):
    """As numpy writes the array of ids that nanoGPT's script makes, where uint16 is too narrow."""
    vocabulary = {f"w{number}": number for number in range(70_000)}
    vocabulary["<|endoftext|>"] = vocabulary.pop(f"w{END}")
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0")).save(str(file))
    documents = [[one + 69_000 for one in document] for document in DOCUMENTS]
    every = np.array([token for one in documents for token in [*one, END]], np.uint32)
    every.tofile(tmp_path / "all.bin")
    data = TextData(source=f"{tmp_path}/all.bin", sequence_length=16, tokenizer=str(file))
    opened = data.open(seed=0)
    found = np.concatenate([opened.train.tokens[:], opened.heldout.tokens[:]])
    np.testing.assert_array_equal(found, every)
    assert opened.facts["train_documents"] + opened.facts["heldout_documents"] == len(documents)


def refusal(**settings):
    with pytest.raises(UserError) as caught:
        TextData(sequence_length=16, **settings).open(seed=0)
    return str(caught.value)


def test_what_cannot_be_read_as_it_is_is_refused(tokenizer, tmp_path):
    path, index = tmp_path / "a.bin", tmp_path / "a.idx"
    llm_c(path, DOCUMENTS)
    said = {"source": str(path), "tokenizer": tokenizer}
    assert f"'byte' has the ids 0 to 255, and {path} holds 7 to 299" in refusal(source=str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert f"{path} says that it holds" in refusal(**said)
    for content in (b"\1", b""):
        path.write_bytes(content)
        assert "which is not a multiple of uint16 tokens" in refusal(**said)
    megatron(path, DOCUMENTS)
    whole = index.read_bytes()
    for content, words in (
        (whole[:-8], "is not a complete Megatron index"),
        (b"TNTIDX" + whole[6:], "it does not begin like a Megatron index"),
        (whole[:9] + b"\2" + whole[10:], "version 2, and 1 is read"),
        (whole[:-480] + b"\xff" * 480, "its documents are not those"),
        (whole[:-8] + struct.pack("<q", 2), "its documents are not those"),
        (whole + bytes(120), "120 more bytes, such as the modes of a multimodal dataset"),
        (whole[:17] + b"\7" + whole[18:], "it holds float32"),
        (whole[:17] + b"\x08" + whole[18:], "tokens, and a.idx lists"),
    ):
        index.write_bytes(content)
        assert words in refusal(**said), words
    index.unlink()
    llm_c(path, DOCUMENTS, version=2)
    assert "is in version 2 of llm.c's layout 20240520; it must be 1" in refusal(**said)
    llm_c(path, DOCUMENTS, magic=20240522)
    assert "begins like llm.c's multiple-choice questions, and holds no tokens" in refusal(**said)
    np.savez(tmp_path / "weights.npz", a=np.arange(8))
    path.write_bytes((tmp_path / "weights.npz").read_bytes())
    assert "begins like a zip archive" in refusal(**said)
    np.array([END, *DOCUMENTS[0]], "<u4").tofile(path)
    assert "every second uint16 is 0, as if tokens were uint32" in refusal(**said)
    nanogpt(path, DOCUMENTS)
    nanogpt(tmp_path / "b.bin", DOCUMENTS)
    words = {"source": f"{tmp_path}/*.bin", "tokenizer": tokenizer, "heldout_split": "val"}
    assert "none of the 2 files of tokens (a.bin, b.bin) have it" in refusal(**words)
    assert "only a 'tfds:NAME' source" in refusal(**said, heldout_split="val")
    with pytest.raises(UserError, match="holds tokens already"):
        prepare(TextData(**said), tmp_path / "store", workers=1, progress=lambda *_: None)
