"""Images in Parquet files, in Hugging Face's form, unpacked once into Arrow files.

Parquet packs rows together, some hundred images that are read to have one; in an Arrow file, mapped
from the cache folder, a row is one read.
"""

from pathlib import Path
from typing import Any

from jaxtrain.config.buckets import BucketPath, Place
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import cache_folder, writing
from jaxtrain.data.file_lock import alone, make_once
from jaxtrain.data.images.saved import ArrowFile, SavedImages, check_columns, open_arrow
from jaxtrain.data.source import part_digest
from jaxtrain.data.text.records import arrow

_SETTING = "ImageData.source"
_ROWS = 64  # unpacked at a time


def is_parquet(name: str) -> bool:
    """Whether a name is that of a Parquet file."""
    return name.lower().endswith(".parquet")


def open_parquet(
    paths: list[Place], *, image_field: str, label_field: str
) -> tuple[SavedImages, list[str] | None]:
    """The images of files, and the names of their classes where `datasets` wrote such.

    Args:
      paths: at least one.
      image_field: the column of encoded images, or of records with `bytes`.
      label_field: the column of labels, whole numbers from 0 on.

    Raises:
      UserError: a file is in a bucket, cut short or no Parquet file; or as of `open_arrow`.
    """
    fields = {"image_field": image_field, "label_field": label_field}
    return open_arrow([_unpack_once(_on_disk(path), **fields) for path in paths], **fields)


def _on_disk(path: Place) -> Path:
    if isinstance(path, BucketPath):
        raise UserError(
            f"{_SETTING}: {path} is in a bucket, and its images are unpacked to this machine; copy "
            "the file to a disk"
        )
    return path


def _unpack_once(path: Path, *, image_field: str, label_field: str) -> ArrowFile:
    """The Arrow file of a Parquet file, made where there is none yet of it as it is now."""
    state = path.stat()
    key = f"{path.absolute()} {state.st_size} {state.st_mtime_ns} {image_field} {label_field}"
    folder = cache_folder("images") / part_digest(key.encode())[:32]
    file = folder / "rows.arrow"
    if not file.is_file():
        columns = [image_field, label_field]
        opened = _open(path)
        check_columns(opened.schema_arrow, path, image_field=image_field, label_field=label_field)
        make_once(folder, file.is_file, lambda: _unpack(path, opened, columns, file))
    return ArrowFile(file, path)


def _open(path: Path) -> Any:
    parquet = arrow("pyarrow.parquet", path, _SETTING)
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:  # of pyarrow, all
        raise _no_parquet(path, error) from error


def _unpack(path: Path, opened: Any, columns: list[str], file: Path) -> None:
    pyarrow, ipc = (arrow(name, path, _SETTING) for name in ("pyarrow", "pyarrow.ipc"))
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    whole = opened.schema_arrow
    schema = pyarrow.schema([whole.field(name) for name in columns], metadata=whole.metadata)
    batches = opened.iter_batches(_ROWS, columns=columns)
    with alone(file.parent), writing(file), part.open("wb") as stream:
        with ipc.new_stream(stream, schema) as writer:
            while True:
                try:
                    batch = next(batches, None)
                except (ValueError, OSError, NotImplementedError, MemoryError) as error:
                    raise _no_parquet(path, error) from error
                if batch is None:
                    break
                writer.write_batch(batch.select(columns))
        part.replace(file)


def _no_parquet(path: Path, error: Exception) -> UserError:
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{_SETTING}: {path} is no whole Parquet file ({said}); make it again")
