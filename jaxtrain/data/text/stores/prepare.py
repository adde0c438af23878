"""`prepare`: tokenize the text of a `TextData` into a token store, on a disk or in a bucket."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.config.buckets import AnyPath, BucketPath, require
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import (
    alone,
    cache_folder,
    make_once,
    remove_tree,
    write_atomically,
    writing,
)
from jaxtrain.data.source import STORE_FILE, Split, existing_path, is_store, part_digest
from jaxtrain.data.text.documents import Document, Files, Records, Text, is_packed
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.store import (
    SPLITS,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    Store,
    checksums_of,
    files_of,
)
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


# -- stores in a bucket: download and upload -------------------------------------------------------
# The documents' offsets are needed for every row, and are a hundredth of the tokens' size; a row of
# tokens is one read from the bucket. A store is written to a local disk before its upload.

WHOLE_BYTES = 1 << 30  # of tokens; larger files stay in the bucket
_RANGE_BYTES = 1 << 26  # per request


def fetch(store: BucketPath, report: Callable[[str], None]) -> tuple[Path, BucketPath | None]:
    """Return the cache folder with a copy of the store; downloaded at first call, in bounded
    memory.

    An interrupted copy is resumed; one process per machine copies.

    Args:
      store: the store in the bucket.
      report: called with each line to print.

    Returns:
      The folder, and where the tokens are; None: in the folder.

    Raises:
      BucketError: the bucket does not answer.
      FullDiskError: there is no room; the next call resumes.
    """
    content = (store / STORE_FILE).read_bytes()
    # Keyed by the store's description, digests included: another store has another folder.
    folder = cache_folder("stores") / part_digest(str(store).encode() + content)[:32]
    tokens, others = zip(*(files_of(folder, split) for split in SPLITS), strict=True)
    if not is_store(folder):
        sizes = {row.name: row.bytes for row in store.list_objects()}
        of_tokens = sum(sizes.get(file.name, 0) for file in tokens)
        whole = of_tokens <= WHOLE_BYTES
        wanted = [file.name for file in (*others, *(tokens if whole else ()))]
        wanted += [*(checksums_of(folder, split).name for split in SPLITS), *TOKENIZER_FILES]
        origin = f"TextData.source = {str(store)!r}"
        report(
            f"{origin}: fetched to {folder}, also for later runs"
            if whole
            else f"{origin}: its tokens ({of_tokens:,} bytes) stay in the bucket, and rows are "
            f"read there; where documents begin is fetched to {folder}"
        )

        def fetch() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with alone(folder), writing(folder):
                for name in wanted:
                    # `open_store` reports files that the bucket lacks.
                    if name in sizes:
                        _fetch(store / name, sizes[name], folder / name)
                write_atomically(folder / STORE_FILE, content)

        make_once(folder, lambda: is_store(folder), fetch)
    return folder, None if all(file.is_file() for file in tokens) else store


def _fetch(source: BucketPath, size: int, file: Path) -> None:
    if file.is_file():
        return
    part = file.with_name(f"{file.name}.part")
    with part.open("ab") as stream:
        while (begin := stream.tell()) < size:
            stream.write(source.read_range(begin, min(begin + _RANGE_BYTES, size)))
    part.replace(file)


_PROBE = ".writable"


def prepare_in_bucket(
    data: TextData,
    out: BucketPath,
    *,
    workers: int,
    progress: Callable[[int, int], None],
    report: Callable[[str], None],
) -> Store:
    """Prepare a token store in a folder of a bucket, like `prepare`; an interrupted attempt
    resumes.

    The store is kept in the cache folder until all of it was sent; the file that says that the
    store is complete is sent last.

    Args:
      data: as in `prepare`.
      out: empty, or of an interrupted launch on this machine.
      workers: as in `prepare`.
      progress: as in `prepare`.
      report: called with each line to print.

    Raises:
      UserError: as in `prepare`; or there is something else in the folder.
      BucketError: the bucket does not answer; the next launch resumes.
    """
    require("--out", out)
    folder = cache_folder("stores") / part_digest(f"made for {out}".encode())[:32]
    names = [file.name for split in SPLITS for file in files_of(folder, split)]
    names += [*(checksums_of(folder, split).name for split in SPLITS), TOKENIZER_FILE]
    there = {row.name: row.bytes for row in out.list_objects()} if out.exists() else {}
    if others := sorted(there.keys() - {*names, STORE_FILE, _PROBE}):
        raise UserError(
            f"--out {out}: there are other objects in it, such as {others[0]}; name another folder"
        )
    if STORE_FILE in there and not is_store(folder):
        raise UserError(
            f"--out {out}: there is a store in it already; train on it, or name another folder"
        )
    # Write permission is checked before hours of work, not after.
    (out / _PROBE).write_bytes(b"")
    (out / _PROBE).unlink()
    store = prepare(data, folder, workers=workers, progress=progress)
    with alone(folder):
        for file in (folder / name for name in names if (folder / name).is_file()):
            sent = folder / f"{file.name}.sent"
            if not sent.exists() or there.get(file.name) != file.stat().st_size:
                report(f"sending {file.name} ({file.stat().st_size:,} bytes) to {out}")
                (out / file.name).upload(file)
                sent.touch()
        (out / STORE_FILE).write_bytes((folder / STORE_FILE).read_bytes())
        remove_tree(folder)
    return store
