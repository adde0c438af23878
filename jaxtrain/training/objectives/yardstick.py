"""Baselines of metrics: units, unigram entropy, uniform guess."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The value of a metric that a model must beat to have learned anything.

    Attributes:
      metric: its name among those of training, such as `loss`.
      label: what has this value, such as "the text's unigram entropy".
      value: the metric of what the label names.
    """

    metric: str
    label: str
    value: float


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """How an objective's metrics are to be read.

    Attributes:
      unit: of the loss, such as 'nats a token'; '' if it has none.
      metrics: the other metrics that are drawn, each in a panel below the loss.
      baselines: what they are compared with; the first is named at a run's end.
      scale: of the loss's axis; 'log' where it falls over several orders of magnitude.
    """

    unit: str = ""
    metrics: tuple[str, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    scale: Literal["linear", "log"] = "linear"

    def sentence(self, values: Mapping[str, Any]) -> str | None:
        """`Held-out loss 2.1000 nats a token, against the text's unigram entropy 3.2500`; None
        without a baseline.

        Args:
          values: of an evaluation: each metric's name after `eval_`.
        """
        if not self.baselines:
            return None
        metric, label, baseline = dataclasses.astuple(self.baselines[0])
        unit = f" {self.unit}" if self.unit and metric == "loss" else ""
        found = values[f"eval_{metric}"]
        name = metric.replace("_", " ")
        return f"Held-out {name} {found:.4f}{unit}, against {label} {baseline:.4f}"


def text_entropy(facts: Mapping[str, Any], metric: str = "loss") -> tuple[Baseline, ...]:
    """The unigram entropy of the text, in nats a token; none of data that do not have it."""
    entropy = facts.get("unigram_entropy")
    label = "the text's unigram entropy"
    return () if entropy is None else (Baseline(metric, label, float(entropy)),)


def uniform_guess(classes: int) -> tuple[Baseline, ...]:
    """The cross entropy and the accuracy of a guess in which all classes are equally likely."""
    label = f"a uniform guess among {classes} classes"
    return Baseline("loss", label, math.log(classes)), Baseline("accuracy", label, 1 / classes)
