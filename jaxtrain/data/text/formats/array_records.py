"""ArrayRecord files of tf.train.Example as documents.

Its protocol buffer (https://www.tensorflow.org/api_docs/python/tf/train/Example) is compiled into
TFDS, so that no TensorFlow is needed to read it.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.text.documents import BadRecord

_AT_ONCE = 256  # records


def read(path: AnyPath, text_field: str) -> Iterator[str | BadRecord]:
    """Yield the text of each record of a file, in order.

    Raises:
      UserError: the file is in a bucket, is not an ArrayRecord file, or is damaged.
    """
    if not isinstance(path, Path):
        raise UserError(
            f"TextData.source: {path}: ArrayRecord files are read from a local disk; copy it to one"
        )
    # Imported here: few sources need it.
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        # A truncated file opens without an error, as one without records.
        if not reader.ok():
            raise RuntimeError("its end is missing or damaged")
        count = reader.num_records()
        for begin in range(0, count, _AT_ONCE):
            end = min(begin + _AT_ONCE, count)
            for number, record in enumerate(reader.read(begin, end), begin + 1):
                yield _text(record, f"{path}: record {number:,}", text_field)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(
            f"TextData.source: {path} is not a complete ArrayRecord file "
            f"({str(error).splitlines()[0]}); write it again, or remove it from the source"
        ) from error


def _text(record: bytes, where: str, text_field: str) -> str | BadRecord:
    # Imported here, in 0.2 s: few sources need it. Its classes are made at run time.
    from google.protobuf.message import DecodeError

    schema: Any = importlib.import_module("tensorflow_datasets.proto.tf_example_generated_pb2")
    try:
        features = schema.Example.FromString(record).features.feature
    except DecodeError as error:
        return BadRecord(f"{where}: no tf.train.Example ({error})")
    if text_field not in features:
        return BadRecord(f"{where}: no feature {text_field!r}{did_you_mean(text_field, features)}")
    values = features[text_field].bytes_list.value
    if len(values) != 1:
        return BadRecord(f"{where}: {text_field!r} is not a single text, but {len(values)} of them")
    try:
        return values[0].decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(f"{where}: {text_field!r} is not UTF-8 text (byte {error.start})")
