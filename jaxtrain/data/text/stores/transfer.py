"""Token stores in a bucket: download, small arrays at once and large ones by range, and upload.

The documents' offsets are needed for every row, and are a hundredth of the tokens' size; a row of
tokens is one read from the bucket. A store is written to a local disk before its upload.
"""

from collections.abc import Callable
from pathlib import Path

from jaxtrain.config.buckets import BucketPath, require
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import (
    alone,
    cache_folder,
    make_once,
    remove_tree,
    write_atomically,
    writing,
)
from jaxtrain.data.source import STORE_FILE, is_store, part_digest
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.text.stores.store import (
    SPLITS,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    Store,
    checksums_of,
    files_of,
)

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
