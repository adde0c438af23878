"""Folders written by `save_to_disk` of Hugging Face `datasets`."""

from collections.abc import Iterable
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import path_errors
from jaxtrain.config.key_table import (
    KeyTable,
    Nested,
    Only,
    ignore_keys,
    only,
    read_keys,
    validate_keys,
)
from jaxtrain.config.untrusted import read_json_object

# Of state.json, as `datasets` 1 to 5 wrote it.
STATE_KEYS: KeyTable = {
    "_data_files": Nested(
        {
            **read_keys("filename"),
            "skip": Only((None, 0), reason="part of a file's rows are skipped"),
            "take": Only((None,), reason="part of a file's rows are skipped"),
        }
    ),
    **dict.fromkeys(
        ("_indices_data_files", "_indices_files"),
        Only((None, []), reason=(
            "another file selects or shuffles the rows; save a flattened copy with "
            "Dataset.flatten_indices().save_to_disk()"
        )),
    ),
    **ignore_keys("columns are named by settings", "_format_columns", "_output_all_columns"),
    **ignore_keys("it sets the type of array that the library returns", "_format_type",
                 "_format_kwargs"),
    **ignore_keys("it names the dataset's state or split", "_fingerprint", "_split"),
    "_indexes": Only((None, {}), reason="search indexes are not read"),
    **ignore_keys("the files were written after it", "_inplace_history"),
}  # fmt: skip
# Of dataset_info.json: the fields of `datasets.DatasetInfo`.
INFO_KEYS: KeyTable = {
    **read_keys("features"),
    **ignore_keys(
        "it describes the dataset, its sources and its sizes",
        "description", "citation", "homepage", "license", "builder_name", "dataset_name",
        "config_name", "version", "splits", "download_checksums", "download_size",
        "post_processing_size", "dataset_size", "size_in_bytes", "task_templates",
    ),
    **ignore_keys("columns are named by settings", "supervised_keys"),
    "post_processed": only(None),
}  # fmt: skip

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved(folder: AnyPath) -> bool:
    """Whether a folder was written by `save_to_disk`, for one dataset or several splits."""
    return has_splits(folder) or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


def holds_saved(names: Iterable[str]) -> bool:
    """Return the same from the names of its contents, which takes one bucket request."""
    names = set(names)
    return _SPLITS in names or {_STATE, _INFO} <= names


def has_splits(folder: AnyPath) -> bool:
    """Whether a folder has several splits."""
    return (folder / _SPLITS).is_file()


def arrow_files(folder: AnyPath, split: str, setting: str) -> list[AnyPath]:
    """Return the Arrow files of a split, in the order of their rows.

    Args:
      folder: of `is_saved`.
      split: its name; any for a folder without splits.
      setting: the binding that names the split.

    Raises:
      UserError: no such split, or the folder is incomplete.
    """
    if has_splits(folder):
        listed = _entry(folder / _SPLITS, _json(folder / _SPLITS), "splits", list)
        splits = _names(folder / _SPLITS, listed)
        if split not in splits:
            raise UserError(
                f"{setting} = {split!r}: {folder} has no such split{did_you_mean(split, splits)}"
            )
        folder = folder / split
    state = _json(folder / _STATE)
    validate_keys(state, STATE_KEYS, where=str(folder / _STATE))
    validate_keys(_json(folder / _INFO), INFO_KEYS, where=str(folder / _INFO))
    listed = _entry(folder / _STATE, state, "_data_files", list)
    names = [_entry(folder / _STATE, file, "filename", str) for file in listed]
    files = [folder / name for name in _names(folder / _STATE, names)]
    where = folder / _STATE
    with path_errors(str(where), needs="save the dataset again"):
        for file in files:
            # A path that leads out of the folder would be read like the dataset's own.
            if file.parent != folder or not file.is_file():
                raise UserError(
                    f"{folder / _STATE} names {file}, which is not there; save it again"
                )
    return files


def column_feature(folder: AnyPath, split: str, column: str) -> dict[str, Any]:
    """Return the feature of a column in dataset_info.json, such as its class names; may be empty.

    Args:
      folder, split: as in `arrow_files`, which has checked them.
      column: its name.
    """
    folder = folder / split if has_splits(folder) else folder
    features = _json(folder / _INFO).get("features") or {}
    found = features.get(column) if isinstance(features, dict) else None
    return found if isinstance(found, dict) else {}


def _json(file: AnyPath) -> dict[str, Any]:
    return read_json_object(file, advice="save the dataset again")


def _entry(file: AnyPath, content: Any, key: str, kind: type) -> Any:
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, kind):
        raise _damage_error(file, f"{key} = {found!r}")
    return found


def _names(file: AnyPath, found: list[Any]) -> list[str]:
    """Return the names that a file lists, at least one."""
    if not found or not all(isinstance(one, str) and one and "\0" not in one for one in found):
        raise _damage_error(file, f"names {found!r}")
    return found


def _damage_error(file: AnyPath, what: str) -> UserError:
    return UserError(f"{file} is damaged ({what}); save the dataset again")
