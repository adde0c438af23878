"""Images in Arrow files of Hugging Face `datasets`, memory-mapped, or unpacked from Parquet."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import alone, cache_folder, make_once, writing
from jaxtrain.config.untrusted import MalformedError, parse_json
from jaxtrain.data.images.stores import decode
from jaxtrain.data.source import part_digest
from jaxtrain.data.text.documents import arrow
from jaxtrain.data.text.formats.saved_datasets import arrow_files, column_feature

_SETTING = "ImageData.source"


@dataclasses.dataclass(frozen=True)
class ArrowFile:
    """File in Arrow's stream format.

    Attributes:
      path: where it is.
      named: the path that the user gave: itself, or the file that it was unpacked from.
    """

    path: Path
    named: Path


@dataclasses.dataclass(frozen=True)
class SavedImages:
    """Rows of a split; implements LabelledImages. Each process maps the files itself.

    Attributes:
      files: its files.
      ends: int64 [files], rows up to the end of each.
      image_field: the column of encoded images.
      of_class: int64 [rows].
      identity: each file's name, rows and size.
    """

    files: tuple[ArrowFile, ...]
    ends: np.ndarray
    image_field: str
    of_class: np.ndarray
    identity: str

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Read one image and its label, as in `LabelledImages`."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        row = index - (int(self.ends[number - 1]) if number else 0)
        file = self.files[number]
        name = f"{file.named}, row {row + 1:,}"
        one = _map(file.path).column(self.image_field).slice(row, 1)
        with _load(file.path):
            one.validate(full=True)  # pyarrow crashes the process at a wrong offset
        value = one[0].as_py()
        content = value["bytes"] if isinstance(value, dict) else value
        if content is None:
            raise UserError(
                f"{_SETTING}: {name} has no image in it (a path alone, or null); save the dataset "
                "with its images"
            )
        return decode(io.BytesIO(content), _SETTING, name), int(self.of_class[index])

    def labels(self) -> np.ndarray:
        """Return the labels of all images, as in `LabelledImages`."""
        return self.of_class

    def content(self) -> list[bytes | np.ndarray]:
        """Return the inputs of the digest, as in `LabelledImages`."""
        return [self.identity.encode(), self.of_class]


def open_saved(
    folder: AnyPath, split: str, setting: str, *, image_field: str, label_field: str
) -> tuple[SavedImages, list[str] | None]:
    """Return the images of a split, and the class names if the dataset has them.

    Args:
      folder: of `saved_datasets.is_saved`.
      split: its name; any for a folder without splits.
      setting: the binding that names the split.
      image_field: the column of encoded images, or of records with `bytes`.
      label_field: the column of labels, integers from 0.

    Raises:
      UserError: the folder is in a bucket or incomplete, there is no such split, no such column, a
        column of another type, or a row without a label.
    """
    if isinstance(folder, BucketPath):
        raise UserError(
            f"{_SETTING}: {folder} is in a bucket, and its files are read by random access; copy "
            "it to a disk of this machine"
        )
    paths = [Path(str(path)) for path in arrow_files(folder, split, setting)]
    mode = column_feature(folder, split, image_field).get("mode")
    if mode is not None:
        raise UserError(
            f"{_SETTING}: {folder} converts the images of {image_field!r} to the mode {mode!r}, "
            "which is not supported; save it with features that have no mode, and set "
            "ImageData.channels"
        )
    images, names = open_arrow(
        [ArrowFile(path, path) for path in paths], image_field=image_field, label_field=label_field
    )
    # As in `datasets`: dataset_info.json takes precedence over the files.
    return images, column_feature(folder, split, label_field).get("names") or names


def open_arrow(
    files: list[ArrowFile], *, image_field: str, label_field: str
) -> tuple[SavedImages, list[str] | None]:
    """Return the images of consecutive files, and the class names if they have them.

    Raises:
      UserError: a file is incomplete or lacks a column, a column has another type, or a row has
        no label.
    """
    tables = [_map(file.path) for file in files]
    schema = tables[0].schema
    labels = []
    for table, file in zip(tables, files, strict=True):
        check_columns(table.schema, file.named, image_field=image_field, label_field=label_field)
        labels.append(_labels(table.column(label_field), file.named, label_field))
    ends = np.cumsum([len(one) for one in labels])
    if not ends[-1]:
        raise UserError(f"{_SETTING}: {files[0].named} holds no rows; use one that does")
    identity = "\n".join(
        f"{file.named.name}\0{len(one)}\0{file.named.stat().st_size}"
        for file, one in zip(files, labels, strict=True)
    )
    images = SavedImages(tuple(files), ends, image_field, np.concatenate(labels), identity)
    return images, _class_names(schema, label_field)


def check_columns(schema: Any, path: Path, *, image_field: str, label_field: str) -> None:
    """Raise UserError unless a file has columns of encoded images and of labels."""
    for name, of in (("image_feature", image_field), ("label_feature", label_field)):
        if of not in schema.names:
            raise UserError(
                f"ImageData.{name} = {of!r}: {path} has no such column"
                f"{did_you_mean(of, schema.names)}"
            )
    types = arrow("pyarrow.types", path, _SETTING)
    kind = schema.field(image_field).type
    of_bytes = kind.field("bytes").type if _has_bytes(types, kind) else kind
    # Null if no row of a file has an image: errors are raised when a row is read.
    known = types.is_binary, types.is_large_binary, types.is_null
    if not any(is_known(of_bytes) for is_known in known):
        raise UserError(
            f"ImageData.image_feature = {image_field!r}: in {path} it holds {kind}, but it must "
            "hold encoded images; name another column"
        )
    kind = schema.field(label_field).type
    if not types.is_integer(kind):
        raise UserError(
            f"ImageData.label_feature = {label_field!r}: in {path} it holds {kind}, but it must "
            "hold integers; name another column"
        )


def _has_bytes(types: Any, kind: Any) -> bool:
    return types.is_struct(kind) and any(field.name == "bytes" for field in kind)


def _labels(column: Any, path: Path, field: str) -> np.ndarray:
    with _load(path):
        column.validate(full=True)
    found = None if column.null_count else column.to_numpy().astype(np.int64)
    if found is None or found.min(initial=0) < 0:
        raise UserError(
            f"ImageData.label_feature = {field!r}: {path} has rows without a label (null or under "
            "0); leave them out"
        )
    return found


def _class_names(schema: Any, field: str) -> list[str] | None:
    """Return the class names that `datasets` wrote into a file's schema, or None."""
    try:
        metadata = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
    except MalformedError:
        return None  # names are optional
    for name in ("info", "features", field):
        metadata = metadata.get(name) if isinstance(metadata, dict) else None
    names = metadata.get("names") if isinstance(metadata, dict) else None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_list else None


@functools.lru_cache(maxsize=4096)
def _map(path: Path) -> Any:
    """Memory-map the table of a file in Arrow's stream format, without reading it."""
    pyarrow = arrow("pyarrow", path, _SETTING)
    ipc = arrow("pyarrow.ipc", path, _SETTING)
    with _load(path):
        return ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


@contextlib.contextmanager
def _load(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:  # of pyarrow, all
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{_SETTING}: {path} is not a complete Arrow file ({reason}); save the dataset again"
        ) from error


_ROWS = 64  # converted at a time


def is_parquet(name: str) -> bool:
    """Whether a name is that of a Parquet file."""
    return name.lower().endswith(".parquet")


def open_parquet(
    paths: list[AnyPath], *, image_field: str, label_field: str
) -> tuple[SavedImages, list[str] | None]:
    """Return the images of Parquet files, and the class names if `datasets` wrote them.

    Args:
      paths: at least one.
      image_field: the column of encoded images, or of records with `bytes`.
      label_field: the column of labels, integers from 0.

    Raises:
      UserError: a file is in a bucket, truncated or not a Parquet file; or as in `open_arrow`.
    """
    fields = {"image_field": image_field, "label_field": label_field}
    return open_arrow([_unpack_once(_on_disk(path), **fields) for path in paths], **fields)


def _on_disk(path: AnyPath) -> Path:
    if isinstance(path, BucketPath):
        raise UserError(
            f"{_SETTING}: {path} is in a bucket, and its images are unpacked to this machine; copy "
            "the file to a disk"
        )
    return path


def _unpack_once(path: Path, *, image_field: str, label_field: str) -> ArrowFile:
    """Return the Arrow file of a Parquet file, converted if the cache has none of its current
    content.
    """
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
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{_SETTING}: {path} is not a complete Parquet file ({reason}); make it again")
