"""Upload of a token store to a bucket, written to a local disk first."""

from collections.abc import Callable

from jaxtrain.config.buckets import BucketPath, require
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import cache_folder, remove_tree
from jaxtrain.data.file_lock import alone
from jaxtrain.data.source import STORE_FILE, is_store, part_digest
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.text.stores.store import SPLITS, TOKENIZER_FILE, Store, checksums_of, files_of

_PROBE = ".writable"


def prepare_in_bucket(
    data: TextData,
    out: BucketPath,
    *,
    workers: int,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Store:
    """As `prepare`, into a folder of a bucket; a start that was stopped goes on where it was.

    What is made lies in the cache folder until all of it was sent; the file that says that the
    store is whole goes last.

    Args:
      data: as of `prepare`.
      out: empty, or of an earlier start on this machine.
      workers: as of `prepare`.
      progress: as of `prepare`.
      say: takes a line for people.

    Raises:
      UserError: as of `prepare`; or there is something else in the folder.
      BucketError: the bucket does not answer; the next start goes on.
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
    # Whether it may be written is known before hours of work, not after them.
    (out / _PROBE).write_bytes(b"")
    (out / _PROBE).unlink()
    store = prepare(data, folder, workers=workers, progress=progress)
    with alone(folder):
        for file in (folder / name for name in names if (folder / name).is_file()):
            sent = folder / f"{file.name}.sent"
            if not sent.exists() or there.get(file.name) != file.stat().st_size:
                say(f"sending {file.name} ({file.stat().st_size:,} bytes) to {out}")
                (out / file.name).upload(file)
                sent.touch()
        (out / STORE_FILE).write_bytes((folder / STORE_FILE).read_bytes())
        remove_tree(folder)
    return store
