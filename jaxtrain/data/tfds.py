"""TensorFlow Datasets without TensorFlow: random access to array_record files."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.config.buckets import BucketPath, require, to_path
from jaxtrain.config.errors import UserError, did_you_mean, nearest


def open_builder(name: str, data_dir: str | None, setting: str) -> Any:
    """Return the TFDS builder of a dataset prepared, as array_record, in `data_dir`.

    Raises:
      UserError: unknown, not prepared, or prepared in another format, with how to prepare it.
    """
    # Imported here: most runs read no TFDS, and it takes half a second.
    import tensorflow_datasets as tfds

    folder = None if data_dir is None else to_path(data_dir)
    if isinstance(folder, BucketPath):
        require(f"{setting.partition('.')[0]}.data_dir =", folder)
    where = "TFDS's default folder" if data_dir is None else repr(data_dir)
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        # Without the community's: listing those needs the network and TensorFlow.
        known = tfds.list_builders(with_community_datasets=False)
        if folder is not None and folder.is_dir():
            known += [inside.name for inside in folder.iterdir()]
        close = nearest(re.split("[/:]", name)[0], known)
        hint = f"; did you mean 'tfds:{close}'?" if close else ""
        raise UserError(
            f"{setting} = 'tfds:{name}': neither tensorflow-datasets nor data_dir ({where}) has it"
            f"{hint}"
        ) from error
    except AssertionError as error:  # raised by TFDS for a version that it cannot read
        raise UserError(f"{setting} = 'tfds:{name}': {error}") from error
    argument = "" if data_dir is None else f", data_dir={data_dir!r}"
    how = (
        f'python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}{argument}, '
        "file_format='array_record').download_and_prepare()\""
    )
    if not builder.is_prepared():
        raise UserError(
            f"{setting} = 'tfds:{name}' is not prepared in data_dir ({where}); prepare it with: "
            f"{how}"
        )
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise UserError(
            f"{setting} = 'tfds:{name}' is prepared as {builder.info.file_format.value}, which "
            f"random access without TensorFlow cannot read; prepare it as array_record: {how}"
        )
    return builder


def open_split(builder: Any, split: str, setting: str, *, skip: Sequence[str] = ()) -> Any:
    """Return the records of a split for random access, each a dict; features in `skip` stay
    encoded.

    Raises:
      UserError: the data set has no such split.
    """
    import tensorflow_datasets as tfds

    if split not in builder.info.splits:
        raise UserError(
            f"{setting} = {split!r}: {builder.info.full_name} has no such split"
            f"{did_you_mean(split, builder.info.splits)}"
        )
    decoders = {feature: tfds.decode.SkipDecoding() for feature in skip}
    return builder.as_data_source(split, decoders=decoders or None)


def check_feature(builder: Any, feature: str, kind: str, setting: str) -> Any:
    """Return the feature of that name.

    Raises:
      UserError: the data set has no feature of that name and class `kind` in tfds.features.
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    fitting = [key for key in features if isinstance(features[key], getattr(tfds.features, kind))]
    if feature not in fitting:
        raise UserError(
            f"{setting} = {feature!r}: {builder.info.full_name} has no {kind} feature of that name"
            f"{did_you_mean(feature, fitting)}"
        )
    return features[feature]


def read_text(builder: Any, split: str, setting: str, *, feature: str) -> Iterator[str]:
    """Yield the text of each record of a split, in order.

    Raises:
      UserError: no such split, no such text feature, or a record that cannot be read.
    """
    check_feature(builder, feature, "Text", "TextData.text_feature")
    records = open_split(builder, split, setting)
    name = f"{setting} = {split!r} of {builder.info.full_name}"
    for encoded in read_feature(records, feature, name):
        yield encoded.decode("utf-8")  # without TensorFlow text stays bytes


def read_feature(records: Sequence[dict[str, Any]], feature: str, name: str) -> Iterator[Any]:
    """Yield one feature of each record.

    Args:
      records: from `open_split`.
      feature: its name.
      name: of the records, for the message.

    Raises:
      UserError: a record cannot be read. All are needed before training, so none is
        skipped: documents are packed in order, and classes are split by their labels.
    """
    for number in range(len(records)):
        try:
            yield records[number][feature]
        except RuntimeError as error:  # array_record's, if the bytes do not match their hash
            raise UserError(
                f"{name}: record {number} cannot be read ({str(error).splitlines()[0]}); prepare "
                "the data set again"
            ) from error
