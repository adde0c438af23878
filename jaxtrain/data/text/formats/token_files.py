"""Token files of other programs, pre-tokenized: nanoGPT, llm.c and Megatron (.bin, .idx).

nanoGPT (data/openwebtext/prepare.py): `.bin`, uint16 from the first byte on, or uint32 where a
vocabulary has more ids; documents end with the end-of-text token. llm.c (dev/data/data_common.py):
`.bin` headed by 256 int32 (magic, version, number of tokens), documents begin with that token.
Megatron-LM (megatron/core/datasets/indexed_dataset.py): `.bin` and `.idx`, which has the dtype and
the starts of sequences and documents.

Facts of such files that need all tokens (documents, digests, the largest id) are
kept in the cache folder for the next launch.
"""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import alone, cache_folder, make_once, write_atomically, writing
from jaxtrain.config.untrusted import parse_json
from jaxtrain.data.source import part_digest
from jaxtrain.data.text.packing import PackedText, unigram_entropy
from jaxtrain.data.token_arrays import Joined
from jaxtrain.data.tokenization.tokenizer import Tokenizer

# By magic: the version, and the type for tokens.
_LLM_C = {20240520: (1, np.dtype(np.uint16)), 20240801: (7, np.dtype(np.uint32))}
_LLM_C_HEADER = 256  # int32
# Files that begin like these are not tokens: headers of llm.c's other files, and other formats.
_NO_TOKENS = {
    np.int32(20240522).tobytes(): "llm.c's multiple-choice questions",
    np.int32(20240326).tobytes(): "llm.c's weights of a model",
    np.int32(20240327).tobytes(): "llm.c's state of a model",
    b"PK\x03\x04": "a zip archive, as PyTorch saves weights",
    b"GGUF": "a GGUF model",
    b"\x93NUM": "NumPy's .npy",
    b"\x28\xb5\x2f\xfd": "data packed by zstd",
}
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32",
    8: "uint16",
}  # fmt: skip
_SLICE = 1 << 24  # tokens processed together
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Memory-mapped file for tokens.

    Attributes:
      path: where it is.
      tokens: mapped, [tokens].
      starts: starts of documents, int64; None: they follow from the end-of-text token.
      end_of_text_first: whether that token begins a document instead of ending it.
    """

    path: Path
    tokens: np.ndarray
    starts: np.ndarray | None
    end_of_text_first: bool


def read_file(path: Path, vocab_size: int) -> TokenFile:
    """Return the memory-mapped tokens of a file.

    Args:
      path: the file.
      vocab_size: of the tokenizer; a file without a dtype is uint16, or
        uint32 if the ids need it.

    Raises:
      UserError: it is truncated, or has an unknown layout or version.
    """
    index = path.with_suffix(".idx")
    if index.is_file():
        return _megatron(path, index)
    head = np.fromfile(path, "<i4", 3)
    if len(head) == 3 and int(head[0]) in _LLM_C:
        return _llm_c(path, head)
    if len(head) and (other := _NO_TOKENS.get(head[:1].tobytes())) is not None:
        raise UserError(
            f"TextData.source: {path} begins like {other}, and holds no tokens; a .bin file is "
            "nanoGPT's, llm.c's, or Megatron's with its .idx next to it"
        )
    tokens = _map(path, 0, np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4"))
    if tokens.dtype.itemsize == 2 and len(tokens) > 2 and not tokens[1:_SLICE:2].any():
        raise UserError(
            f"TextData.source: in {path} every second uint16 is 0, as if tokens were uint32; for "
            f"a tokenizer of {vocab_size:,} ids write it as uint16, or with a header as llm.c's"
        )
    return TokenFile(path, tokens, None, end_of_text_first=False)


def _llm_c(path: Path, head: np.ndarray) -> TokenFile:
    (version, dtype), begin, count = _LLM_C[int(head[0])], _LLM_C_HEADER * 4, int(head[2])
    if head[1] != version:
        raise UserError(
            f"TextData.source: {path} is in version {head[1]} of llm.c's layout {head[0]}; it must "
            f"be {version}"
        )
    wanted, found = begin + count * dtype.itemsize, path.stat().st_size
    if wanted != found:
        raise UserError(
            f"TextData.source: {path} says that it holds {count:,} tokens, {wanted:,} bytes, and "
            f"has {found:,}; make it again"
        )
    return TokenFile(path, _map(path, begin, dtype), None, end_of_text_first=True)


def _megatron(path: Path, index: Path) -> TokenFile:
    content, again = index.read_bytes(), "make both again"
    try:
        if not content.startswith(_MEGATRON):
            raise ValueError("it does not begin like a Megatron index")
        at = len(_MEGATRON)
        version = int(np.frombuffer(content, "<u8", 1, at)[0])
        if version != 1:
            raise ValueError(f"version {version}, and 1 is read")
        dtype = np.dtype(_MEGATRON_TYPES[content[at + 8]])
        if dtype.kind not in "iu":
            raise ValueError(f"it holds {dtype}, which is not a token type")
        sequences, documents = map(int, np.frombuffer(content, "<u8", 2, at + 9))
        at += 25
        if len(content) < at + 12 * sequences + 8 * documents:
            raise ValueError(f"{len(content):,} bytes are not those of its {sequences:,} sequences")
        sizes = np.frombuffer(content, "<i4", sequences, at)
        pointers = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
        first = np.frombuffer(content, "<i8", documents, at + 12 * sequences)
        rest = len(content) - at - 12 * sequences - 8 * documents
        if rest:
            raise ValueError(f"{rest:,} more bytes, such as the modes of a multimodal dataset")
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        if not len(first) or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
            raise ValueError("its documents are not those of its sequences")
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(
            f"TextData.source: {index} is not a complete Megatron index ({error}); {again}"
        ) from error
    tokens = _map(path, 0, dtype)
    if len(tokens) != begins[-1] or not np.array_equal(pointers, begins[:-1] * dtype.itemsize):
        raise UserError(
            f"TextData.source: {path} has {len(tokens):,} tokens, and {index.name} lists "
            f"{begins[-1]:,} concatenated; {again}"
        )
    return TokenFile(path, tokens, np.unique(begins[first[:-1]]), end_of_text_first=False)


def _map(path: Path, begin: int, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size - begin
    if size <= 0 or size % dtype.itemsize:
        raise UserError(
            f"TextData.source: {path} has {size:,} bytes, which is not a multiple of {dtype} "
            "tokens; a .bin file is nanoGPT's, llm.c's, or Megatron's with its .idx next to it"
        )
    return np.memmap(path, dtype, "r", begin)


@dataclasses.dataclass(frozen=True)
class TokenSplits:
    """Token files, split and ready to be cut into rows.

    Attributes:
      train: what to train on.
      heldout: the held-out rows.
      digests: of the tokens and offsets of each split.
      unigram_entropy: as `packing.unigram_entropy`.
    """

    train: PackedText
    heldout: PackedText
    digests: tuple[str, ...]
    unigram_entropy: float


def open_token_files(
    paths: list[AnyPath],
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    origin: str,
    separate: bool,
    heldout_split: str | None,
    heldout_fraction: float,
) -> TokenSplits:
    """Open token files; the first time reads all of them.

    Args:
      paths: the files, in the order of their tokens.
      tokenizer: the tokenizer; gives the vocabulary, and the token between documents.
      sequence_length: of rows.
      origin: TextData.tokenizer.
      separate: as `PackedText.separate`.
      heldout_split: the files with this word in their names are held out; None: the last part is,
        from a document's start.
      heldout_fraction: how large that part is.

    Raises:
      UserError: a file is in a bucket or incomplete, has an id that the tokenizer lacks, or no
        file name has the word; or the cache folder cannot be written.
    """
    on_disk = [path for path in paths if isinstance(path, Path)]
    if len(on_disk) < len(paths):
        raise UserError(
            f"TextData.source: {paths[0]}: files of tokens are memory-mapped; copy them to a "
            "local disk"
        )
    held = [_is_held_out(path, heldout_split) for path in on_disk]
    if heldout_split is not None and (not any(held) or all(held)):
        names = ", ".join(path.name for path in on_disk[:3])
        raise UserError(
            f"TextData.heldout_split = {heldout_split!r}: {'all' if all(held) else 'none'} of the "
            f"{len(on_disk)} files of tokens ({names}) have it as a word in their names"
        )
    files = [read_file(path, tokenizer.vocab_size) for path in on_disk]
    groups = [
        [file for file, out in zip(files, held, strict=True) if out == wanted]
        for wanted in (False, True)
    ]
    known = _load_or_read(groups, tokenizer, origin, None if any(held) else heldout_fraction)
    tokens = [Joined([file.tokens for file in group]) for group in groups if group]
    if len(tokens) == 1:
        cut = known.cut
        tokens = [_part(groups[0], 0, cut), _part(groups[0], cut, None)]
    train, heldout = (
        PackedText(one, offsets, sequence_length, separate)
        for one, offsets in zip(tokens, known.offsets, strict=True)
    )
    return TokenSplits(train, heldout, known.digests, known.unigram_entropy)


def _is_held_out(path: Path, word: str | None) -> bool:
    return word is not None and word in re.split(r"[^A-Za-z0-9]+", path.stem)


def _part(files: list[TokenFile], begin: int, end: int | None) -> Joined:
    """Part of the tokens of concatenated files."""
    found, offset = [], 0
    for file in files:
        last = None if end is None else max(0, end - offset)
        found.append(file.tokens[max(0, begin - offset) : last])
        offset += len(file.tokens)
    return Joined(found)


# -- facts that need all tokens ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Known:
    """Facts of token files, cached for later attempts.

    Attributes:
      cut: the first token of the held-out part of the files; -1 if files are held out.
      offsets: starts of documents, and the end, of each split: int64.
      digests: of the tokens and offsets of each split.
      unigram_entropy: as `packing.unigram_entropy`.
    """

    cut: int
    offsets: tuple[np.ndarray, np.ndarray]
    digests: tuple[str, ...]
    unigram_entropy: float


def _load_or_read(
    groups: list[list[TokenFile]],
    tokenizer: Tokenizer,
    origin: str,
    fraction: float | None,
) -> _Known:
    """Return the facts of token files from the cache folder, or by reading the files."""
    states = [_state(file.path) for file in itertools.chain(*groups)]
    sizes = [len(group) for group in groups]
    described = [_FORMAT, states, sizes, tokenizer.digest, tokenizer.end_of_text, fraction]
    folder = cache_folder("tokens") / part_digest(json.dumps(described).encode())[:32]
    index = folder / "index.json"
    arrays = folder / "train.npy", folder / "heldout.npy"

    def look() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder), writing(folder):
            known = _read_through(groups, tokenizer, origin, fraction)
            for file, array in zip(arrays, known.offsets, strict=True):
                np.save(file, array)
            fields = {name: value for name, value in vars(known).items() if name != "offsets"}
            write_atomically(index, json.dumps(fields).encode())

    # One process per machine reads all tokens; files that others have mapped stay.
    make_once(folder, index.is_file, look)
    kept = parse_json(index.read_bytes())
    offsets = np.load(arrays[0], "r"), np.load(arrays[1], "r")
    return _Known(kept["cut"], offsets, tuple(kept["digests"]), kept["unigram_entropy"])


def _state(path: Path) -> tuple[str, int, int]:
    """Return the identity of a file's content: path, size in bytes, modification time in ns."""
    state = path.stat()
    return str(path.resolve()), state.st_size, state.st_mtime_ns


def _read_through(
    groups: list[list[TokenFile]],
    tokenizer: Tokenizer,
    origin: str,
    fraction: float | None,
) -> _Known:
    starts = [_starts(group, tokenizer) for group in groups if group]
    tokens = [Joined([file.tokens for file in group]) for group in groups if group]
    for file in itertools.chain(*groups):
        least, most = _bounds(file.tokens)
        if least < 0 or most >= tokenizer.vocab_size:
            raise UserError(
                f"TextData.tokenizer = {origin!r} has the ids 0 to "
                f"{tokenizer.vocab_size - 1:,}, and {file.path} holds {least:,} to {most:,}; "
                "name the tokenizer.json that made them"
            )
    cut = -1
    if fraction is not None:
        cut = _cut(starts[0], len(tokens[0]), fraction)
        before = starts[0][starts[0] < cut]
        starts = [before, np.append(cut, starts[0][starts[0] > cut]) - cut]
        tokens = [_part(groups[0], 0, cut), _part(groups[0], cut, None)]
    offsets = [
        np.append(of, len(one)).astype(np.int64) for of, one in zip(starts, tokens, strict=True)
    ]
    packed = [PackedText(one, of, 1) for one, of in zip(tokens, offsets, strict=True)]
    entropy = unigram_entropy(packed[0], packed[1], tokenizer.vocab_size)
    digests = [
        digest
        for one, of in zip(tokens, offsets, strict=True)
        for digest in (part_digest(one), part_digest(of))
    ]
    return _Known(cut, (offsets[0], offsets[1]), tuple(digests), entropy)


def _starts(files: list[TokenFile], tokenizer: Tokenizer) -> np.ndarray:
    """Return the document starts in concatenated files; each file starts a document."""
    found, before = [], 0
    for file in files:
        starts = file.starts
        if starts is None:
            behind = 0 if file.end_of_text_first else 1
            all_starts = [np.zeros(1, np.int64)]
            for begin in range(0, len(file.tokens), _SLICE):
                ends = np.flatnonzero(file.tokens[begin : begin + _SLICE] == tokenizer.end_of_text)
                all_starts.append(ends + begin + behind)
            starts = np.unique(np.concatenate(all_starts))
            starts = starts[starts < len(file.tokens)]
        found.append(starts + before)
        before += len(file.tokens)
    return np.concatenate(found)


def _cut(starts: np.ndarray, count: int, fraction: float) -> int:
    """Return the last document start before 1 - fraction of the tokens; that position for one
    document.
    """
    position = int(count * (1.0 - fraction))
    before = int(starts[np.searchsorted(starts, position, side="right") - 1])
    return before or position


def _bounds(tokens: np.ndarray) -> tuple[int, int]:
    slices = [tokens[begin : begin + _SLICE] for begin in range(0, len(tokens), _SLICE)]
    return min(int(one.min()) for one in slices), max(int(one.max()) for one in slices)
