"""Parallel tokenization of documents into a token store, resumable.

A job is several pieces of text. Its tokens are appended, in the order of jobs, to the files of
their split; then the files' sizes are written to a journal. A launch after a kill truncates the
files to the journal's sizes and skips finished jobs.
"""

import contextlib
import dataclasses
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import LOCK, alone, write_atomically, writing
from jaxtrain.config.untrusted import parse_json
from jaxtrain.data.source import STORE_FILE, Split, is_held_out, is_store, part_digest, sentences
from jaxtrain.data.text.documents import Document
from jaxtrain.data.text.packing import unigram_entropy
from jaxtrain.data.text.stores.store import (
    SPLITS,
    Part,
    Store,
    checksums_of,
    file_checksum,
    files_of,
    open_store,
    sample_digest,
)
from jaxtrain.data.token_arrays import block_checksums
from jaxtrain.data.tokenization.tokenizer import TextPiece, Tokenizer, closing, cut

JOB_CHARACTERS = 1 << 22
_JOBS_AHEAD = 2  # per process: pending results stay in memory
_JOURNAL = "progress.json"
PIECES = 2  # version of how long documents are cut: a resumed launch must cut them the same way
_START_AGAIN = "name another folder, or remove this one"


@dataclasses.dataclass(frozen=True)
class Texts:
    """Documents to tokenize.

    Attributes:
      documents: of each split of the source; of one without splits, all documents under
        "train".
      heldout_fraction: the share to hold out; None if the source names both splits.
      identity: identifies this source and its settings.
      facts: returns `Store.facts`, once all documents were read.
    """

    documents: dict[Split, Callable[[], Iterator[Document]]]
    heldout_fraction: float | None
    identity: str
    facts: Callable[[], dict[str, int | str]]


@dataclasses.dataclass
class Written:
    """Progress of writing a split's files.

    Attributes:
      texts: documents that were started.
      documents: finished documents with tokens.
      tokens: of these, and of the unfinished one.
      unended: tokens of the unfinished one.
    """

    texts: int = 0
    documents: int = 0
    tokens: int = 0
    unended: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a document; `ends` says whether it is the last one."""

    split: Split
    part: TextPiece
    begins: bool
    ends: bool


def tokenize(
    texts: Texts,
    tokenizer: Callable[[], Tokenizer],
    folder: Path,
    *,
    workers: int,
    progress: Callable[[int, int], None],
) -> Store:
    """Tokenize texts into a store; an interrupted attempt resumes.

    Args:
      texts: what to tokenize.
      tokenizer: opens the tokenizer; picklable.
      folder: of the store; new, empty, or of the interrupted launch.
      workers: processes that tokenize; 1: this one, with the tokenizer's threads.
      progress: called with the characters and tokens done so far.

    Raises:
      UserError: the folder has other contents, or the source has changed since the interrupted
        launch; the source is empty, or has too few documents to hold one out.
      FullDiskError: there is no room; the next launch resumes.
    """
    own = tokenizer()
    identity: dict[str, object] = {
        "texts": texts.identity,
        "tokenizer": own.digest,
        "end_of_text": own.end_of_text,
        "special_tokens": [list(own.before), list(own.after)],
        "pieces": PIECES,
    }
    is_new = _make(folder)
    _validate_others(folder)  # before the lock file is added
    with writing(folder), alone(folder), _remove_on_failure(folder, is_new=is_new):
        journal = _begin(folder, identity)
        if is_store(folder):
            return open_store(folder)
        jobs = itertools.islice(_jobs(texts, own), journal.jobs, None)
        with contextlib.ExitStack() as stack:
            writer = _Writer(folder, own, journal, stack)
            for job, arrays in stack.enter_context(_encode_jobs(jobs, tokenizer, own, workers)):
                writer.add(job, arrays)
                write_atomically(folder / _JOURNAL, journal.text(identity))
                progress(journal.characters, sum(part.tokens for part in journal.parts.values()))
        return _seal(folder, texts, own, journal)


def _make(folder: Path) -> bool:
    """Create the folder; return whether it did not exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


@contextlib.contextmanager
def _remove_on_failure(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Restore a folder's former contents if its texts are rejected within the context.

    The texts are then fixed, and the next launch would find a store made from other texts.

    Args:
      folder: of the store, locked: another process may have filled it until now.
      is_new: whether it was created for the store.
    """
    for name in _leftovers(folder):
        (folder / name).unlink()
    is_bare = {path.name for path in folder.iterdir()} == {LOCK}
    try:
        yield
    except UserError:
        if is_bare:
            for file in list(folder.iterdir()):
                file.unlink()
            if is_new:
                folder.rmdir()
        raise


# -- the journal --------------------------------------------------------------------------------


@dataclasses.dataclass
class _Journal:
    """Progress recorded after each job, from which tokenization resumes."""

    parts: dict[Split, Written]
    jobs: int = 0
    characters: int = 0

    def text(self, identity: dict[str, object]) -> bytes:
        fields = {
            "identity": identity,
            "jobs": self.jobs,
            "characters": self.characters,
            "parts": {split: dataclasses.asdict(part) for split, part in self.parts.items()},
        }
        return json.dumps(fields).encode()


def _leftovers(folder: Path) -> set[str]:
    """Return the temporary files of the journal: of an active writer, or of a killed one."""
    return {path.name for path in folder.glob(f".{_JOURNAL}.*.tmp")}


def _validate_others(folder: Path) -> None:
    """Raise UserError for a folder that holds something other than an unfinished store."""
    others = sorted({path.name for path in folder.iterdir()} - {LOCK} - _leftovers(folder))
    if others and not (folder / _JOURNAL).exists():
        raise UserError(
            f"--out {folder}: there are other files in it, such as {others[0]}; {_START_AGAIN}"
        )


def _begin(folder: Path, identity: dict[str, object]) -> _Journal:
    """Return the journal of an earlier attempt in a folder, or a new one."""
    try:
        content = parse_json((folder / _JOURNAL).read_bytes())
    except FileNotFoundError:
        journal = _Journal({split: Written() for split in SPLITS})
        write_atomically(folder / _JOURNAL, journal.text(identity))
        return journal
    except ValueError as error:
        raise UserError(
            f"--out {folder}: {_JOURNAL} is damaged ({error}); {_START_AGAIN}"
        ) from error
    if content["identity"] != identity:
        changed = [name for name in identity if content["identity"].get(name) != identity[name]]
        what = "other texts or settings" if "texts" in changed else "another tokenizer"
        raise UserError(f"--out {folder}: it was started with {what}; {_START_AGAIN}")
    parts: dict[Split, Written] = {split: Written(**content["parts"][split]) for split in SPLITS}
    return _Journal(parts, content["jobs"], content["characters"])


# -- jobs ---------------------------------------------------------------------------------------


def _jobs(texts: Texts, tokenizer: Tokenizer) -> Iterator[list[Piece]]:
    """Yield the jobs of a source, always in the same order."""
    job, characters = list[Piece](), 0
    for piece in _all_pieces(texts, tokenizer):
        job.append(piece)
        characters += len(piece.part.text)
        if characters >= JOB_CHARACTERS:
            yield job
            job, characters = [], 0
    if job:
        yield job


def _all_pieces(texts: Texts, tokenizer: Tokenizer) -> Iterator[Piece]:
    for split, document, begin, end in split_documents(texts):
        before, first = None, True
        for part in cut(document.parts(begin, end), tokenizer.border):
            if before is not None:
                yield Piece(split, before, first, ends=False)
                first = False
            before = part
        assert before is not None, "a text has a piece at least"
        yield Piece(split, before, first, ends=True)


def split_documents(texts: Texts) -> Iterator[tuple[Split, Document, int, int | None]]:
    """Yield each document that is not blank, its split, and which of its characters are in it."""
    fraction = texts.heldout_fraction
    if fraction is None:
        for split, documents in texts.documents.items():
            for document in documents():
                if not document.is_blank():
                    yield split, document, 0, None
        return
    found = (one for one in texts.documents["train"]() if not one.is_blank())
    first = list(itertools.islice(found, 2))
    if len(first) == 1:
        cut = first[0].cut_at_line(1.0 - fraction)
        yield "train", first[0], 0, cut
        yield "heldout", first[0], cut, None
        return
    # As `hold_out`: the last one if no other is held out.
    waiting, any_held = None, False
    for index, document in enumerate(itertools.chain(first, found)):
        if waiting is not None:
            yield "train", waiting, 0, None
        waiting = None
        if is_held_out(index, fraction):
            any_held = True
            yield "heldout", document, 0, None
        elif any_held:
            yield "train", document, 0, None
        else:
            waiting = document
    if waiting is not None:
        yield "heldout", waiting, 0, None


@contextlib.contextmanager
def _encode_jobs(
    jobs: Iterator[list[Piece]], tokenizer: Callable[[], Tokenizer], own: Tokenizer, workers: int
) -> Iterator[Iterator[tuple[list[Piece], list[np.ndarray]]]]:
    """Yield each job with the token ids of its pieces, in the order of jobs."""
    if workers == 1:
        yield ((job, list(own.encode_pieces(piece.part for piece in job))) for job in jobs)
        return
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_open, initargs=(tokenizer,)
    )

    def in_order() -> Iterator[tuple[list[Piece], list[np.ndarray]]]:
        waiting = deque[tuple[list[Piece], Future[list[np.ndarray]]]]()
        for job in jobs:
            waiting.append((job, pool.submit(_encode, [piece.part for piece in job])))
            if len(waiting) > _JOBS_AHEAD * workers:
                first, ids = waiting.popleft()
                yield first, ids.result()
        for first, ids in waiting:
            yield first, ids.result()

    try:
        yield in_order()
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer  # of a process that tokenizes


def _open(tokenizer: Callable[[], Tokenizer]) -> None:
    global _tokenizer
    # One tokenizer thread per process: together as many as processes.
    os.environ["RAYON_NUM_THREADS"] = "1"
    _tokenizer = tokenizer()


def _encode(pieces: list[TextPiece]) -> list[np.ndarray]:
    return list(_tokenizer.encode_pieces(pieces))


# -- files --------------------------------------------------------------------------------------


class _Writer:
    """Writer that appends jobs to the files of both splits."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, journal: _Journal, stack: contextlib.ExitStack
    ) -> None:
        self._journal = journal
        self._begin = np.array(tokenizer.before, tokenizer.dtype)
        self._end = np.array(closing(tokenizer), tokenizer.dtype)
        self._files: dict[Split, tuple[BinaryIO, BinaryIO]] = {}
        for split, part in journal.parts.items():
            tokens, offsets = (stack.enter_context(_open_file(f)) for f in files_of(folder, split))
            tokens.truncate(part.tokens * tokenizer.dtype.itemsize)
            offsets.truncate((part.documents + 1) * 8 if journal.jobs else 0)
            for file in (tokens, offsets):
                file.seek(0, os.SEEK_END)
            if not journal.jobs:
                offsets.write(np.zeros(1, np.int64).tobytes())
            self._files[split] = tokens, offsets

    def add(self, job: list[Piece], arrays: list[np.ndarray]) -> None:
        """Append the tokens of a job, and sync them to disk."""
        for piece, ids in zip(job, arrays, strict=True):
            part, (tokens, offsets) = self._journal.parts[piece.split], self._files[piece.split]
            part.texts += piece.begins
            if len(ids) and not part.unended:
                tokens.write(self._begin.tobytes())
                part.tokens += len(self._begin)
            tokens.write(ids.tobytes())
            part.unended += len(ids)
            part.tokens += len(ids)
            if piece.ends and part.unended:
                tokens.write(self._end.tobytes())
                part.tokens += len(self._end)
                part.documents, part.unended = part.documents + 1, 0
                offsets.write(np.int64(part.tokens).tobytes())
            self._journal.characters += len(piece.part.text)
        for file in itertools.chain(*self._files.values()):
            file.flush()
            os.fsync(file.fileno())
        self._journal.jobs += 1


def _open_file(path: Path) -> BinaryIO:
    path.touch()
    return path.open("r+b")


def _seal(folder: Path, texts: Texts, tokenizer: Tokenizer, journal: _Journal) -> Store:
    """Write the description that completes a store, and return the store."""
    count = sum(part.texts for part in journal.parts.values())
    facts = texts.facts()
    source = facts["source"]
    if not count:
        left_out = "".join(f"; {sentence}" for sentence in sentences(facts))
        raise UserError(
            f"TextData.source = {source!r}: the text is empty, so there is nothing to train "
            f"on{left_out}"
        )
    if not journal.parts["heldout"].texts:
        raise UserError(
            f"TextData.source = {source!r}: its held-out split has no text; use another "
            "TextData.heldout_split"
        )
    store = Store(
        folder=folder,
        tokenizer=tokenizer.digest,
        end_of_text=tokenizer.end_of_text,
        before=tokenizer.before,
        after=tokenizer.after,
        dtype=tokenizer.dtype.name,
        heldout_fraction=texts.heldout_fraction,
        unigram_entropy=0.0,
        facts=facts,
        parts={
            split: Part(part.texts, part.documents, part.tokens, ("", ""), ("", ""))
            for split, part in journal.parts.items()
        },
    )
    packed = {split: store.pack(split, 1, separate=True) for split in SPLITS}
    entropy = unigram_entropy(packed["train"], packed["heldout"], tokenizer.vocab_size)
    parts: dict[Split, Part] = {}
    for split, part in store.parts.items():
        arrays = packed[split].tokens, packed[split].offsets
        files, blocks = files_of(folder, split), checksums_of(folder, split)
        write_atomically(blocks, block_checksums(files[0]).tobytes())
        parts[split] = dataclasses.replace(
            part,
            digests=(part_digest(arrays[0]), part_digest(arrays[1])),
            samples=(sample_digest(files[0]), sample_digest(files[1])),
            checksums=(file_checksum(blocks), file_checksum(files[1])),
        )
    store = dataclasses.replace(store, unigram_entropy=entropy, parts=parts)
    write_atomically(folder / STORE_FILE, store.save().encode())
    return store
