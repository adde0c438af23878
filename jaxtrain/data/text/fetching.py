"""Brings a token store from a bucket to this machine, where its windows are mapped."""

import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.config.buckets import BucketPath
from jaxtrain.config.disks import writing
from jaxtrain.config.files import cache_folder, refused_path, write_atomically
from jaxtrain.data.source import part_digest
from jaxtrain.data.text.store import SPLITS, STORE_FILE, TOKENIZER_FILE, files_of, is_store
from jaxtrain.data.text.tokenizing import BusyStoreError, alone

_RANGE_BYTES = 1 << 26  # asked for at a time
_WAIT_SECONDS = 1.0


def fetched(store: BucketPath, say: Callable[[str], None]) -> Path:
    """The folder in the cache that holds a copy; made at the first call, in bounded memory.

    A copy that was stopped goes on where it was; of several processes of a machine one makes it.

    Args:
      store: the store in the bucket.
      say: takes a line for people.

    Raises:
      BucketError: the bucket does not answer.
      FullDiskError: there is no room; the next call goes on.
    """
    content = (store / STORE_FILE).read_bytes()
    # By what the store says of itself, its digests among that: another store is another folder.
    folder = cache_folder("stores") / part_digest(str(store).encode() + content)[:32]
    if not is_store(folder):
        say(f"TextData.source = {str(store)!r}: fetched to {folder}, for the next starts too")
    with refused_path(f"the cache folder {folder}", needs="set JAXTRAIN_CACHE to another"):
        folder.mkdir(parents=True, exist_ok=True)
        while not is_store(folder):
            try:
                with alone(folder), writing(folder):
                    _fetch(store, folder, content)
            except BusyStoreError:
                time.sleep(_WAIT_SECONDS)
    return folder


def _fetch(store: BucketPath, folder: Path, content: bytes) -> None:
    sizes = {row.name: row.bytes for row in store.stored()}
    wanted = [file.name for split in SPLITS for file in files_of(folder, split)]
    for name in [*wanted, TOKENIZER_FILE]:
        file = folder / name
        # What the bucket lacks `open_store` names.
        if name not in sizes or file.is_file():
            continue
        part = folder / f"{name}.part"
        with part.open("ab") as stream:
            while stream.tell() < sizes[name]:
                begin = stream.tell()
                end = min(begin + _RANGE_BYTES, sizes[name])
                stream.write((store / name).read_range(begin, end))
        part.replace(file)
    write_atomically(folder / STORE_FILE, content)
