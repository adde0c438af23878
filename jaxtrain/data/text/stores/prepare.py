"""`prepare`: tokenize the text of a `TextData` into a token store."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.data.source import Split, existing_path, is_store, part_digest
from jaxtrain.data.text.documents import Document, Files, Records, Text, is_packed
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.store import TOKENIZER_FILE, TOKENIZER_FILES, Store
from jaxtrain.data.text.stores.tokenizing import Texts, split_documents, tokenize

# The settings that select the documents.
_OF_DOCUMENTS = (
    "source", "heldout_fraction", "data_dir", "train_split", "heldout_split", "text_feature",
    "text_field", "bad_records",
)  # fmt: skip


def source_characters(data: TextData) -> int | None:
    """Return the approximate number of characters; None if it is not known without reading them."""
    files = data.files()
    if files is None or any(is_packed(path) for path in _paths(files)):
        return None
    return data.size()


def identity(data: TextData) -> str:
    """Return the identity of a text on this machine's disks, as it is now, and of its settings."""
    files = data.files()
    return _identity(data, [] if files is None else _paths(files))


def _identity(data: TextData, paths: list[AnyPath]) -> str:
    described = [f"{name} {getattr(data, name)!r}" for name in _OF_DOCUMENTS]
    described += map(str, _states(paths))
    return part_digest("\n".join(described).encode())


def prepare(
    data: TextData, folder: Path, *, workers: int, progress: Callable[[int, int], None]
) -> Store:
    """Tokenize text into a store, from which `TextData.open` returns the same as from the source.

    An earlier interrupted launch with the same settings is resumed.

    Args:
      data: the source and the tokenizer.
      folder: of the store.
      workers: processes that tokenize; 1: this one.
      progress: called with the characters and tokens done so far.

    Raises:
      UserError: as `TextData.open`; the source is not on a disk; the folder has other contents.
    """
    store = tokenize(
        texts_of(data), data.open_tokenizer, folder, workers=workers, progress=progress
    )
    if data.tokenizer != "byte":
        path = existing_path("TextData.tokenizer", data.tokenizer)
        write_atomically(folder / TOKENIZER_FILE, path.read_bytes())
        for name in TOKENIZER_FILES[1:]:
            if (path.parent / name).is_file():
                write_atomically(folder / name, (path.parent / name).read_bytes())
    return store


def texts_of(data: TextData) -> Texts:
    """Return the documents of a source, read one part at a time.

    Raises:
      UserError: no such source, or it is not text on this machine's disks.
    """
    path, origin = data.path(), f"TextData.source = {data.source!r}"
    if path is not None and is_store(path):
        raise UserError(f"{origin} is a store already; name the text that it was made of")
    if data.is_tokens():
        raise UserError(f"{origin} holds tokens already, and a run reads them as they are")
    files = data.files()
    paths = [] if files is None else _paths(files)
    if data.source == "synthetic" or any(isinstance(path, BucketPath) for path in paths):
        raise UserError(f"{origin} cannot be prepared: name text on this machine's disks")
    records = Records(data.text_field, data.bad_records)

    def facts() -> dict[str, int | str]:
        found = {} if files is None else {**files["train"].facts(), **records.facts()}
        return {"source": data.source, **found}

    return Texts(
        documents=_documents(data, files, records),
        heldout_fraction=None if data.heldout_split is not None else data.heldout_fraction,
        identity=_identity(data, paths),
        facts=facts,
    )


def training_text(data: TextData) -> Iterator[str]:
    """Yield the characters of the training documents, in parts of any size.

    Raises:
      UserError: as in `texts_of`.
    """
    for split, document, begin, end in split_documents(texts_of(data)):
        if split == "train":
            yield from document.parts(begin, end)


def _documents(
    data: TextData, files: dict[Split, Files] | None, records: Records
) -> dict[Split, Callable[[], Iterator[Document]]]:
    if files is not None:
        return {
            split: functools.partial(of_split.documents, records)
            for split, of_split in files.items()
        }

    def read(split: str, setting: str) -> Iterator[Document]:
        yield from map(Text, data.read(split, setting))

    found: dict[Split, Callable[[], Iterator[Document]]] = {
        "train": functools.partial(read, data.train_split, "TextData.train_split")
    }
    if data.heldout_split is not None:
        found["heldout"] = functools.partial(read, data.heldout_split, "TextData.heldout_split")
    return found


def _paths(files: dict[Split, Files]) -> list[AnyPath]:
    return [path for of_split in files.values() for path in of_split.paths]


def _states(paths: list[AnyPath]) -> list[tuple[str, int, int]]:
    """Return each file with its size in bytes and its modification time in ns."""
    found = []
    for path in paths:
        assert isinstance(path, Path), "on a disk"
        state = path.stat()
        found.append((str(path), state.st_size, state.st_mtime_ns))
    return found
