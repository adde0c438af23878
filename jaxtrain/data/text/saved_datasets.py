"""Folders that Hugging Face's `datasets` wrote by `save_to_disk`: the Arrow files of a split."""

import json
from collections.abc import Iterable
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError, did_you_mean

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved(folder: Place) -> bool:
    """Whether it is such a folder, of one dataset or of several splits."""
    return has_splits(folder) or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


def holds_saved(names: Iterable[str]) -> bool:
    """The same by the names of what is in it, which is one question to a bucket."""
    names = set(names)
    return _SPLITS in names or {_STATE, _INFO} <= names


def has_splits(folder: Place) -> bool:
    """Whether it is one of several splits."""
    return (folder / _SPLITS).is_file()


def arrow_files(folder: Place, split: str, setting: str) -> list[Place]:
    """The Arrow files of a split, in the order of their rows.

    Args:
      folder: of `is_saved`.
      split: which; of a folder without splits any will do.
      setting: the binding that names the split.

    Raises:
      UserError: no such split, or the folder is not whole.
    """
    if has_splits(folder):
        splits = _read(folder / _SPLITS, "splits")
        if split not in splits:
            raise UserError(
                f"{setting} = {split!r}: {folder} has no such split{did_you_mean(split, splits)}"
            )
        folder = folder / split
    files = [folder / file["filename"] for file in _read(folder / _STATE, "_data_files")]
    for file in files:
        # A name that leads elsewhere would be read like the dataset's own.
        if file.parent != folder or not file.is_file():
            raise UserError(f"{folder / _STATE} names {file}, which is not there; save it again")
    return files


def _read(file: Place, key: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}); save the dataset again"
        ) from error
