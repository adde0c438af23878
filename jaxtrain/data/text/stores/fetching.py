"""Download of token stores from a bucket: small ones whole, large ones by range.

Where documents begin is needed for every row, and is a hundredth of the tokens; of those a row is
one read from the bucket.
"""

from collections.abc import Callable
from pathlib import Path

from jaxtrain.config.buckets import BucketPath
from jaxtrain.config.files import cache_folder, write_atomically, writing
from jaxtrain.data.file_lock import alone, make_once
from jaxtrain.data.source import STORE_FILE, is_store, part_digest
from jaxtrain.data.text.stores.store import SPLITS, TOKENIZER_FILES, checksums_of, files_of

WHOLE_BYTES = 1 << 30  # of tokens; more of them stay in the bucket
_RANGE_BYTES = 1 << 26  # asked for at a time


def fetch(store: BucketPath, say: Callable[[str], None]) -> tuple[Path, BucketPath | None]:
    """The folder in the cache that holds a copy; made at the first call, in bounded memory.

    A copy that was stopped goes on where it was; of several processes of a machine one makes it.

    Args:
      store: the store in the bucket.
      say: takes a line for people.

    Returns:
      The folder, and where the tokens are: None is there too.

    Raises:
      BucketError: the bucket does not answer.
      FullDiskError: there is no room; the next call goes on.
    """
    content = (store / STORE_FILE).read_bytes()
    # By what the store says of itself, its digests among that: another store is another folder.
    folder = cache_folder("stores") / part_digest(str(store).encode() + content)[:32]
    tokens, others = zip(*(files_of(folder, split) for split in SPLITS), strict=True)
    if not is_store(folder):
        sizes = {row.name: row.bytes for row in store.list_objects()}
        of_tokens = sum(sizes.get(file.name, 0) for file in tokens)
        whole = of_tokens <= WHOLE_BYTES
        wanted = [file.name for file in (*others, *(tokens if whole else ()))]
        wanted += [*(checksums_of(folder, split).name for split in SPLITS), *TOKENIZER_FILES]
        said = f"TextData.source = {str(store)!r}"
        say(
            f"{said}: fetched to {folder}, for the next starts too"
            if whole
            else f"{said}: its tokens ({of_tokens:,} bytes) stay in the bucket, and rows are read "
            f"there; where documents begin is fetched to {folder}"
        )

        def fetch() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with alone(folder), writing(folder):
                for name in wanted:
                    # What the bucket lacks `open_store` names.
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
