"""Settings implied by the data: classes and channels of image folders."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.buckets import BucketPath, place
from jaxtrain.config.values import settings_of


def infer_settings(
    config: Any, bound: Collection[tuple[str, str]]
) -> Mapping[tuple[str, str], Any]:
    """Values of settings that are not bound, from a folder of class folders on this machine.

    Args:
      config: with its defaults.
      bound: (section, setting) of what is bound.

    Returns:
      The number of classes and the channels, for the data and for the model; nothing for other
      data, or if the folder is not here.

    Raises:
      UserError: the folder is one level too high.
    """
    data, model = config.train.data, config.train.model
    if data is None or "ImageData" not in (base.__name__ for base in type(data).__mro__):
        return {}
    if "://" in data.source or "tfds:" in data.source:
        return {}
    wanted = {
        (type(one).__name__, name)
        for one in (data, model)
        for name in ("num_classes", "channels")
        if name in settings_of(type(one))
    } - set(bound)
    root = place(data.source)
    if not wanted or isinstance(root, BucketPath) or not _is_folder(root):
        return {}
    from jaxtrain.data.images.class_folders import look_into

    found = look_into(root)
    if found is None or len(found.class_names) < 2:
        return {}
    values = {"num_classes": len(found.class_names), "channels": found.channels}
    # What is set for the data holds for the model.
    values |= {name: getattr(data, name) for name in values if ("ImageData", name) in bound}
    return {(section, name): values[name] for section, name in sorted(wanted)}


def _is_folder(root: Path) -> bool:
    try:
        return root.is_dir()
    except OSError:  # too long a name, or no permission: opening the data reports it
        return False
