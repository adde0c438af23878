"""`Tracker`: settings of experiment trackers."""

import dataclasses
from typing import Literal

from jaxtrain.config.reader import configurable


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracker:
    """A service that takes the metrics of a run, besides metrics.jsonl and TensorBoard.

    Attributes:
      name: 'wandb' (Weights & Biases, with jaxtrain[wandb]) or 'mlflow' (jaxtrain[mlflow]), each of
        which finds its server by its own environment variables; None: none.
      project: Weights & Biases' project, or MLflow's experiment.
      run_name: what the run is called there; None: as its folder.
    """

    name: Literal["wandb", "mlflow"] | None = None
    project: str = "jaxtrain"
    run_name: str | None = None
