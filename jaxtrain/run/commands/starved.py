"""Detection of data starvation (steps that wait for batches), with advice."""

import dataclasses
import os
from typing import Any

from jaxtrain.config.values import settings_of
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.stores import DEMO
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.source import Dataset, is_store
from jaxtrain.data.text.source import TextData
from jaxtrain.run.attempts.goodput import PRODUCTIVE, Account

# Of the time of steps and their batches: less is noise.
_SHARE = 0.05
_SECONDS = 30.0


def advise_on_waiting(account: Account, data: Any, dataset: Dataset) -> str | None:
    """Advice where a run waited for batches for more than 5% of its steps' time.

    `None` too where steps took less than 30 seconds: the first batches always take time.

    Args:
      account: where the time went.
      data: the settings of its data.
      dataset: the data.
    """
    waited, worked = account.seconds["data"], account.seconds[PRODUCTIVE]
    if worked < _SECONDS or waited <= _SHARE * (waited + worked):
        return None
    cores = os.cpu_count() or 1
    if isinstance(data, ImageData) and data.workers < cores:
        advice = f"set ImageData.workers (now {data.workers}; this machine has {cores} cores)"
    elif _is_read_while_training(data):
        advice = "bring it to a local disk, or give the process more cores"
    else:
        advice = "give the process more cores"  # its rows are made of what is in memory
    share = waited / (waited + worked)
    return f"Steps waited for batches of {_name(data, dataset)} {share:.0%} of their time: {advice}"


def _name(data: Any, dataset: Dataset) -> str:
    """The data by the setting that says where they are, or by their class."""
    name, source = type(data).__name__, dataset.facts.get("source")
    settings = settings_of(type(data)) if dataclasses.is_dataclass(data) else {}
    for setting in ("source", "sources"):
        if setting in settings and source is not None:
            return f"{name}.{setting} = {str(source)!r}"
    return f"@{name}()"


def _is_read_while_training(data: Any) -> bool:
    """Whether examples are read from files when they are drawn, and not from memory."""
    if isinstance(data, ImageData):
        return data.source not in (*DEMO, "synthetic")
    if isinstance(data, Mixture):
        of = [dataclasses.replace(data.data, source=one) for one in data.sources.values()]
        return any(map(_is_read_while_training, of))
    if not isinstance(data, TextData):
        return False
    path = data.path()
    return data.is_tokens() or (path is not None and is_store(path))
