"""The metrics log of a run: its units, its FLOPs, what its loss is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxtrain.data.source import Dataset
from jaxtrain.metrics import METRICS_FILE, MetricsLog, peak_flops, read_lines
from jaxtrain.plot import reference_losses
from jaxtrain.settings import Config


def open_log(
    config: Config,
    dataset: Dataset,
    devices: Sequence[jax.Device],
    *,
    folder: Path | None,
    first: int,
    last: int,
    terminal: Console,
    history: list[dict[str, Any]],
) -> MetricsLog:
    """Args: folder: of metrics.jsonl; None keeps it in memory. first, last: steps done, to do."""
    train = config.train
    shape = train.data.abstract_batch(train.global_batch_size).inputs.shape
    is_text = dataset.unit == "tokens"
    peak = peak_flops(devices[0].device_kind)
    return MetricsLog(
        folder,
        total_steps=last,
        unit=dataset.unit,
        units_per_step=train.global_batch_size * (shape[1] if is_text else 1),
        flops_per_step=flops_per_step(config, is_text=is_text),
        peak_flops=None if peak is None else peak * len(devices),
        first_step=first,
        log_every=train.log_every,
        terminal=terminal,
        references=reference_losses(dataset.facts),
        guard=config.guard,
        history=history,
    )


def flops_per_step(config: Config, *, is_text: bool) -> float:
    """Floating-point operations of one optimizer step, by the model's closed form."""
    train, model = config.train, config.train.model
    closed_form: Any = model  # each kind of model has one of the two
    shape = train.data.abstract_batch(train.global_batch_size).inputs.shape
    if is_text:
        return closed_form.flops_per_token(shape[1]) * shape[1] * train.global_batch_size
    return closed_form.flops_per_image(shape[1:]) * train.global_batch_size


def is_evaluated(folder: Path, step: int) -> bool:
    """Whether a run's metrics hold an evaluation of `step`, or there are none at all."""
    file = folder / METRICS_FILE
    if not file.exists():
        return True
    return any(line["step"] == step and "eval_loss" in line for line in read_lines(file))
