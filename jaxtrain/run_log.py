"""What a run's metrics are: units, FLOPs, evaluations, what its loss is compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from jaxtrain.buckets import Place
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
    """The log of a run whose clock starts here.

    Args:
      config: the run's configuration.
      dataset: says what is counted, and what the loss is compared with.
      devices: of the whole mesh.
      folder: for metrics.jsonl and what is drawn of it; None writes no file.
      first: steps done.
      last: the step that the run ends with.
      terminal: where progress is shown.
      history: takes the lines where no file does.
    """
    train = config.train
    shape = train.data.abstract_batch(train.global_batch_size).inputs.shape
    peak = peak_flops(devices[0].device_kind)
    return MetricsLog(
        folder,
        total_steps=last,
        unit=dataset.unit,
        units_per_step=train.global_batch_size * (shape[1] if dataset.unit == "tokens" else 1),
        flops_per_step=flops_per_step(config),
        peak_flops=None if peak is None else peak * len(devices),
        first_step=first,
        log_every=train.log_every,
        terminal=terminal,
        references=reference_losses(dataset.facts),
        guard=config.guard,
        history=history,
    )


def flops_per_step(config: Config) -> float:
    """FLOPs that the model's mathematics needs for a global batch: 6 N a token and causal
    attention, without recomputation (arXiv 2204.02311, appendix B)."""
    train, model = config.train, config.train.model
    closed_form: Any = model  # each kind of model has one of the two
    shape = train.data.abstract_batch(train.global_batch_size).inputs.shape
    if hasattr(closed_form, "flops_per_token"):
        return closed_form.flops_per_token(shape[1]) * shape[1] * train.global_batch_size
    return closed_form.flops_per_image(shape[1:]) * train.global_batch_size


def lines_of(folder: Place) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; none where there is no such file yet."""
    file = folder / METRICS_FILE
    return read_lines(file) if file.exists() else []


def lacks_evaluation(folder: Path, step: int) -> bool:
    """Whether a run that has metrics has none of an evaluation at `step`; all processes ask.

    Process 0's word goes: of a run in a bucket the others have no such file.
    """
    lines = lines_of(folder)
    done = any(line["step"] == step and "eval_loss" in line for line in lines)
    lacks = bool(lines) and not done
    with jax.transfer_guard("allow"):
        return bool(multihost_utils.broadcast_one_to_all(np.bool_(lacks)))


def evaluation(sums: Mapping[str, Any]) -> dict[str, float]:
    """`eval_loss` and the task's metric from the sums over all held-out examples."""
    total = {name: float(value) for name, value in sums.items()}
    values = {"eval_loss": total["loss"] / total["weight"]}
    if "correct" in total:
        values["eval_accuracy"] = total["correct"] / total["weight"]
    else:
        with np.errstate(over="ignore"):  # a loss above 709 has no perplexity that is finite
            values["eval_perplexity"] = float(np.exp(values["eval_loss"]))
    return values
