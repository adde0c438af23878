"""Token stores: the same rows as from the text, whatever happens while they are made."""

import contextlib
import dataclasses
import gzip
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.source import STORE_FILE, is_held_out, is_heldout
from jaxtrain.data.text import documents
from jaxtrain.data.text.packing import PackedText
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores import tokenizing
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.text.stores.store import open_store, sample_digest
from jaxtrain.data.token_arrays import Verified
from jaxtrain.data.tokenization import tokenizer

WORDS = ["def", "return", "\n", "\n    ", "x", "é", "你好", "=", " ", "'\U0001f600'", "\r\n"]


def some_text(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """Byte pairs learned from some of the text, with a token that ends documents."""
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<other>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    learned.train_from_iterator([some_text(99, 2000)], trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    learned.save(str(file))
    return str(file)


@pytest.fixture(params=["folder", "one file", "json lines"])
def source(request, tmp_path):
    """Text in each of its forms, blank documents among them."""
    root = tmp_path / "corpus"
    root.mkdir()
    if request.param == "one file":
        lines = [f"line {seed} {some_text(seed, 20)}" for seed in range(150)]
        (root / "all.txt").write_text("\n".join(lines))
        return str(root / "all.txt")
    if request.param == "json lines":
        records = [json.dumps({"text": some_text(seed, 90)}) for seed in range(24)]
        records.insert(3, json.dumps({"text": " \n"}))
        (root / "all.jsonl.gz").write_bytes(gzip.compress("\n".join(records).encode()))
        return str(root / "all.jsonl.gz")
    for seed in range(24):
        (root / f"{seed:02}.txt").write_text(some_text(seed, 30 * seed))
    (root / "image.png").write_bytes(b"no text")
    return str(root)


def made(data: TextData, folder: Path, workers: int = 1):
    return prepare(data, folder, workers=workers, progress=lambda characters, tokens: None)


def assert_same(store: TextData, text: TextData) -> None:
    """The same rows, facts and digest, so that a run may go on with either."""
    found, expected = store.open(seed=0), text.open(seed=0)
    assert found.digest == expected.digest
    assert found.facts == {**expected.facts, "source": store.source}
    for split in ("train", "heldout"):
        rows, others = getattr(found, split), getattr(expected, split)
        assert isinstance(rows.tokens, Verified)  # mapped, not read
        everything = np.arange(len(others))
        jax.tree.map(
            np.testing.assert_array_equal, rows.examples(everything), others.examples(everything)
        )


@pytest.mark.parametrize("tokenizer", ["byte", "file"])
def test_rows_and_digest_are_those_of_the_text(
    source, tokenizer, tokenizer_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenizing, "JOB_CHARACTERS", 700)
    name = "byte" if tokenizer == "byte" else tokenizer_file
    text = TextData(source=source, sequence_length=16, tokenizer=name)
    made(text, tmp_path / "store")
    assert_same(dataclasses.replace(text, source=str(tmp_path / "store")), text)
    copy = tmp_path / "store" / "tokenizer.json"
    assert copy.is_file() == (tokenizer == "file")


def test_several_processes_make_the_same_store(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr(tokenizing, "JOB_CHARACTERS", 500)
    (tmp_path / "corpus").mkdir()
    for seed in range(12):
        (tmp_path / "corpus" / f"{seed:02}.txt").write_text(some_text(seed, 400))
    data = TextData(
        source=str(tmp_path / "corpus"),
        sequence_length=16,
        tokenizer=tokenizer_file,
        heldout_fraction=0.2,
    )
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    stores = [made(data, tmp_path / str(workers), workers) for workers in (1, 2)]
    assert stores[0].parts == stores[1].parts
    assert os.environ["RAYON_NUM_THREADS"] == "3"  # the user's, who may have set it


def files(folder: Path) -> dict[str, bytes]:
    names = [path.name for path in folder.iterdir() if path.suffix in (".tokens", ".offsets")]
    return {name: (folder / name).read_bytes() for name in [*names, STORE_FILE]}


def test_a_stopped_start_goes_on_to_the_same_bytes(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "JOB_CHARACTERS", 200)
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer, "AROUND", 30)
    data = TextData(source=source, sequence_length=16)
    made(data, tmp_path / "straight")
    calls = 0

    def stop(characters, tokens):
        nonlocal calls
        calls += 1
        if calls % 5 == 4:
            raise KeyboardInterrupt

    stops = 0
    while not (tmp_path / "stopped" / STORE_FILE).is_file():
        try:
            prepare(data, tmp_path / "stopped", workers=1, progress=stop)
        except KeyboardInterrupt:
            stops += 1
            # What a kill may leave behind the journal's sizes.
            for path in (tmp_path / "stopped").glob("*.[to]*s"):
                with path.open("ab") as file:
                    file.write(b"left over")
    assert stops > 3
    assert files(tmp_path / "stopped") == files(tmp_path / "straight")


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    """SIGKILL, in the middle of it; a second start meanwhile is rejected."""
    (tmp_path / "big.txt").write_text("".join(f"line {n} of many\n" for n in range(1_500_000)))
    out = tmp_path / "store"
    words = ["prepare", str(tmp_path / "big.txt"), "--out", str(out)]
    child = subprocess.Popen([sys.executable, "-m", "jaxtrain", *words], stderr=subprocess.PIPE)
    journal = out / "progress.json"
    while not (journal.is_file() and json.loads(journal.read_text())["jobs"] >= 1):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGSTOP)
    data = TextData(source=str(tmp_path / "big.txt"), sequence_length=4096)
    with pytest.raises(UserError, match="another process prepares it now"):
        made(data, out)
    child.kill()
    child.wait()
    jobs = json.loads(journal.read_text())["jobs"]
    assert not (out / STORE_FILE).exists()
    assert main(words) == 0
    assert json.loads(journal.read_text())["jobs"] > jobs
    assert_same(dataclasses.replace(data, source=str(out)), data)


def test_a_temporary_file_of_a_writer_that_was_killed_or_is_at_work_is_no_other_file(
    stored, tmp_path
):
    data, text = stored
    out = tmp_path / "new"
    out.mkdir()
    (out / ".progress.json.0123.tmp").write_bytes(b"{")
    made(text, out)
    assert files(out) == files(Path(data.source))
    assert not list(out.glob("*.tmp"))


def test_a_store_that_another_process_made_meanwhile_stays(stored, tmp_path, monkeypatch):
    _, text = stored
    (tmp_path / "other.txt").write_text("another text\n" * 500)
    other = TextData(source=str(tmp_path / "other.txt"), sequence_length=16)
    out, alone, before = tmp_path / "new", tokenizing.alone, []

    def alone_after_another(folder):
        monkeypatch.setattr(tokenizing, "alone", alone)
        made(other, folder)
        before.append(files(folder))
        return alone(folder)

    monkeypatch.setattr(tokenizing, "alone", alone_after_another)
    with pytest.raises(UserError, match="started with other texts"):
        made(text, out)
    assert [files(out)] == before


# Starts Python twice; the blocks themselves are in the fast part.
@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path):
    """A document of 200 MB: its text alone would not fit into what is allowed."""
    line = "a line of text, as there are many in large files: they repeat themselves.\n"
    with (tmp_path / "big.txt").open("w") as file:
        for _ in range(200):
            file.write(line * (1_000_000 // len(line)))
    code = """
import resource, sys
from pathlib import Path
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.text.source import TextData
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
peaks = []
prepare(
    TextData(source=sys.argv[1]), Path(sys.argv[2]), workers=1,
    progress=lambda characters, tokens: peaks.append(peak()),
)
print(peak() - peaks[2])
"""
    words = [sys.executable, "-c", code, str(tmp_path / "big.txt"), str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    # Mapped files count as far as they were read: those of this store, once. Beside them little.
    mapped = sum(path.stat().st_size for path in (tmp_path / "store").glob("*.[to]*s"))
    assert int(done.stdout) < mapped + 40e6


@pytest.mark.slow
@pytest.mark.rotated("promises")
def test_four_gigabytes_are_prepared_in_half_of_one(tmp_path):
    """More characters than a uint32 counts, and a ninth of a byte of memory for each.

    The command needs 0.25 GB of its own for any text. Mapped files are the system's to take back.
    """
    line = "a line of text, as there are many in large files: they repeat themselves.\n"
    block = (line * (10**7 // len(line))).encode()
    with (tmp_path / "big.txt").open("wb") as file:
        while file.tell() < 4_400_000_000:
            file.write(block)
    size = (tmp_path / "big.txt").stat().st_size
    words = ["prepare", str(tmp_path / "big.txt"), "--out", str(tmp_path / "store")]
    limits = (500_000_000, 500_000_000)
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain", *words],
        capture_output=True, text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each thread's buffers count, too
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limits),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = open_store(tmp_path / "store").parts
    assert sum(part.tokens for part in parts.values()) == size + 2  # both parts end


def test_opening_reads_next_to_nothing(tmp_path):
    """Of 40 GB, which are holes on this disk."""
    store = made(TextData(source=str(small(tmp_path)), sequence_length=16), tmp_path / "store")
    said = json.loads((tmp_path / "store" / STORE_FILE).read_text())
    tokens = tmp_path / "store" / "train.tokens"
    os.truncate(tokens, 40 * 10**9)
    said["parts"]["train"]["tokens"] = 40 * 10**9
    of_zeros = [zlib.crc32(bytes(size)) for size in (1 << 16, 40 * 10**9 % (1 << 16))]
    checksums = np.repeat(np.array(of_zeros, "<u4"), [40 * 10**9 >> 16, 1])
    checksums.tofile(tmp_path / "store" / "train.crc32")
    said["parts"]["train"]["samples"][0] = sample_digest(tokens)
    said["parts"]["train"]["checksums"][0] = crc_of_blocks(checksums.tobytes())
    (store.folder / STORE_FILE).write_text(json.dumps(said))

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    data = TextData(source=str(tmp_path / "store"), sequence_length=16)
    dataset = data.open(seed=0)
    assert isinstance(dataset.train, PackedText)
    assert len(dataset.train) == (40 * 10**9 - 1) // 16 + 1
    dataset.train.example(2 * 10**9, None)
    assert read() - before < 20e6


def crc_of_blocks(content: bytes) -> int:
    """CRC-32 of the little-endian CRC-32s of the blocks of 64 kB."""
    blocks = (content[begin : begin + 65536] for begin in range(0, len(content), 65536))
    return zlib.crc32(b"".join(struct.pack("<I", zlib.crc32(block)) for block in blocks))


def small(folder: Path) -> Path:
    root = folder / "small"
    root.mkdir()
    for seed in range(20):
        (root / f"{seed:02}.txt").write_text(some_text(seed, 60))
    return root


# -- parts ----------------------------------------------------------------------------------------


@given(
    text=st.text(alphabet="ab \n\t\u2028\r你\U0001f600", max_size=300),
    begin=st.integers(0, 60),
    end=st.none() | st.integers(60, 320),
    fraction=st.floats(0.01, 0.99),
)
def test_a_file_read_in_parts_has_the_characters_of_the_whole_text(
    tmp_path_factory, text, begin, end, fraction
):
    file = tmp_path_factory.getbasetemp() / "pieces.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "READ_BYTES", 7)
        document = documents.TextFile(file)
        assert "".join(document.parts(begin, end)) == text[begin:end]
        assert "".join(document.parts()) == text
        assert document.is_blank() == (not text.strip())
        assert document.cut_at_line(fraction) == documents.cut_at_line(text, fraction)


@given(st.integers(0, 10**7), st.floats(1e-4, 0.9999))
def test_who_is_held_out_does_not_depend_on_who_follows(place, fraction):
    window = is_heldout(place % 5000 + 3, fraction)
    assert is_held_out(place % 5000, fraction) == window[place % 5000]


def test_a_file_that_is_no_text_is_named_with_the_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "READ_BYTES", 5)
    for number, (content, byte) in enumerate(
        [(b"twelve bytes\xff and more", 12), ("four你".encode()[:-1], 4), (b"\xff", 0)]
    ):
        file = tmp_path / f"{number}.txt"
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"{number}.txt is not UTF-8 text \(byte {byte}\)"):
            made(TextData(source=str(file)), tmp_path / f"store{number}")


# -- rejections


@pytest.fixture
def stored(tmp_path):
    """A store and the settings that open it."""
    text = TextData(source=str(small(tmp_path)), sequence_length=16)
    made(text, tmp_path / "store")
    return dataclasses.replace(text, source=str(tmp_path / "store")), text


def test_a_store_of_another_tokenizer_or_split_is_refused(stored, tokenizer_file, tmp_path):
    data, text = stored
    with pytest.raises(UserError, match="use TextData.tokenizer = 'byte'"):
        dataclasses.replace(data, tokenizer=tokenizer_file).open(seed=0)
    with pytest.raises(UserError, match=r"heldout_fraction = 0.1, but .* holds out 0.05"):
        dataclasses.replace(data, heldout_fraction=0.1).open(seed=0)
    made(dataclasses.replace(text, tokenizer=tokenizer_file), tmp_path / "pairs")
    pairs = dataclasses.replace(data, source=str(tmp_path / "pairs"))
    with pytest.raises(UserError, match=r"use TextData.tokenizer = '.*/pairs/tokenizer.json'"):
        pairs.open(seed=0)
    whole = dataclasses.replace(pairs, tokenizer=str(tmp_path / "pairs" / "tokenizer.json"))
    assert len(whole.open(seed=0).train) > 0
    with pytest.raises(UserError, match=r"TextData.end_of_text is the token 1, but .* with 0"):
        dataclasses.replace(whole, end_of_text="<other>").open(seed=0)


def test_a_store_whose_files_are_not_those_that_were_written_is_refused(stored):
    data, _ = stored
    folder = Path(data.source)
    tokens = folder / "train.tokens"
    whole, said = tokens.read_bytes(), (folder / STORE_FILE).read_text()

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            data.open(seed=0)

    tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("train.tokens was changed after it was prepared")
    tokens.write_bytes(whole[:-1])
    refused(rf"train.tokens was changed .* \({len(whole) - 1:,} bytes, {len(whole):,} were written")
    tokens.unlink()
    refused("lacks train.tokens")
    tokens.write_bytes(whole)
    (folder / STORE_FILE).write_text(said.replace('"format": 2', '"format": 9'))
    refused("has format 9; this version reads 2")
    for damaged in (said[:-20], "[]", said.replace('"uint8"', '"no such"')):
        (folder / STORE_FILE).write_text(damaged)
        refused(rf"{STORE_FILE} is (damaged|not (a )?JSON).*; prepare the text again")
    (folder / STORE_FILE).write_text(said)
    assert len(data.open(seed=0).train) > 0


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A store of 6 MB of tokens, of which a start reads less than 5."""
    root = tmp_path_factory.mktemp("large")
    (root / "big.txt").write_text("".join(f"line {n:>8} of many\n" for n in range(270_000)))
    made(TextData(source=str(root / "big.txt")), root / "store")
    return root / "store"


# The cases that are left run the same code.
@pytest.mark.slow_cases("stream", "padded")
@pytest.mark.parametrize("packing", ["stream", "best_fit", "padded"])
def test_a_damaged_block_of_tokens_is_reported_where_it_is_read(large, tmp_path, packing):
    """In a block between the 64 samples that are read at the start."""
    folder = shutil.copytree(large, tmp_path / "store")
    data = TextData(
        source=str(folder), sequence_length=100, packing=packing, separate_documents=True
    )
    rows = data.open(seed=0).train
    everything = np.arange(len(rows))
    whole = rows.examples(everything).inputs
    tokens = folder / "train.tokens"
    content = bytearray(tokens.read_bytes())
    at = 40 * -(-len(content) // 64) + 65536 + 1000
    content[at] ^= 4
    tokens.write_bytes(content)
    rows = data.open(seed=0).train
    if packing == "stream":
        clean = everything[: at // 65536 * 65536 // 100]
        np.testing.assert_array_equal(rows.examples(clean).inputs, whole[clean])
    begin = at // 65536 * 65536
    with pytest.raises(UserError, match=rf"train.tokens is damaged: its bytes {begin:,} to "):
        rows.examples(everything)


@pytest.mark.parametrize("name", ["train.offsets", "heldout.offsets", "train.crc32"])
def test_damaged_offsets_and_checksums_are_refused_at_the_start(large, tmp_path, name):
    folder = shutil.copytree(large, tmp_path / "store")
    content = bytearray((folder / name).read_bytes())
    content[9] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} was changed after it was prepared"):
        open_store(folder)


def test_a_store_of_format_1_is_read(large, tmp_path):
    """Written before tokens had checksums."""
    folder = shutil.copytree(large, tmp_path / "store")
    said = json.loads((folder / STORE_FILE).read_text())
    for part in said["parts"].values():
        del part["checksums"]
    (folder / STORE_FILE).write_text(json.dumps({**said, "format": 1}))
    for file in folder.glob("*.crc32"):
        file.unlink()
    data, new = (TextData(source=str(path), sequence_length=100) for path in (folder, large))
    rows, others = data.open(seed=0).train, new.open(seed=0).train
    some = np.arange(500)
    np.testing.assert_array_equal(rows.examples(some).inputs, others.examples(some).inputs)
    assert isinstance(rows.tokens, np.memmap)


def test_what_cannot_be_prepared_is_refused_and_nothing_is_lost(stored, tmp_path):
    data, text = stored
    before = files(Path(data.source))
    assert made(text, Path(data.source)) == open_store(Path(data.source))  # it is there already
    (Path(text.source) / "00.txt").write_text("changed since")
    refusals = [
        (text, Path(data.source), "started with other texts or settings"),
        (data, tmp_path / "of store", "is a store already"),
        (TextData(source="synthetic"), tmp_path / "random", "cannot be prepared"),
        (text, Path(text.source), "there are other files in it, such as 00.txt"),
    ]
    for settings, folder, words in refusals:
        with pytest.raises(UserError, match=words):
            made(settings, folder)
    assert files(Path(data.source)) == before
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    with pytest.raises(UserError, match="the text is empty, so there is nothing to train on"):
        made(TextData(source=str(blank)), tmp_path / "empty")
    blank.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="is not UTF-8 text"):  # the same, not a store begun before
        made(TextData(source=str(blank)), tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(UserError, match="is not UTF-8 text"):
        made(TextData(source=str(blank)), own)
    assert list(own.iterdir()) == []  # the folder is the user's
    (own / "notes").touch()
    with pytest.raises(UserError, match="other files in it, such as notes"):
        made(text, own)
    assert [file.name for file in own.iterdir()] == ["notes"]
    (tmp_path / "two.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    two = made(TextData(source=str(tmp_path / "two.jsonl")), tmp_path / "two")
    assert [two.parts[split].texts for split in ("train", "heldout")] == [1, 1]


def test_the_command_says_what_it_made_and_refuses_with_2(tmp_path, capsys, tokenizer_file):
    root, out = small(tmp_path), tmp_path / "store"
    words = ["prepare", str(root), "--tokenizer", tokenizer_file, "--out", str(out)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "tokens of 19 documents to train on" in told
    assert f'TextData.source="{out}"\' -b \'TextData.tokenizer="{tokenizer_file}"\'' in told
    for more, said in (
        (["--workers", "0"], "--workers 0: use 1 to"),
        (["--out", "/proc/no/such"], "--out /proc/no/such"),
        (["-b", "TextData.text_field=3"], "TextData.text_field"),
    ):
        with contextlib.suppress(SystemExit):
            assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["prepare", "resnet_digits", "--out", str(tmp_path / "images")]) == 2
    assert "its data are ImageData" in capsys.readouterr().err
