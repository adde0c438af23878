"""Which source a run waited for, and what makes it quicker."""

import os
from typing import Any

from jaxtrain.data.images.source import ImageData
from jaxtrain.data.source import Dataset
from jaxtrain.run.attempts.goodput import PRODUCTIVE, Account

_SHARE = 0.05  # of the time of steps and their batches; less is not worth a word


def starved(account: Account, data: Any, dataset: Dataset) -> str | None:
    """A sentence where a run waited for batches for more than a twentieth of its steps' time.

    Args:
      account: where the time went.
      data: the settings of its data.
      dataset: the data.
    """
    waited, worked = account.seconds["data"], account.seconds[PRODUCTIVE]
    if waited <= _SHARE * (waited + worked):
        return None
    name, source = type(data).__name__, dataset.facts.get("source")
    named = f"@{name}()" if source is None else f"{name}.source = {str(source)!r}"
    cores = os.cpu_count() or 1
    if isinstance(data, ImageData) and data.workers < cores:
        advice = f"set ImageData.workers (now {data.workers}; this machine has {cores} cores)"
    elif source in ("embedded", "synthetic"):
        advice = "give the process more cores"  # no disk has it
    else:
        advice = "bring it to a local disk, or give the process more cores"
    share = waited / (waited + worked)
    return f"Steps waited for batches of {named} {share:.0%} of their time: {advice}"
