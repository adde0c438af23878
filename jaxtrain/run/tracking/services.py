"""Experiment trackers: Weights & Biases, MLflow, or a callback.

Each is imported where a run asks for it.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config.errors import UserError
from jaxtrain.training.settings import Tracker

# (step, metrics): the numbers of one line of metrics.jsonl.
Track = Callable[[int, Mapping[str, float]], None]


class Service(Protocol):
    """Where metrics go.

    Attributes:
      name: what it is called.
      run: by which name it knows the run; a later start says it again.
    """

    name: str
    run: str | None

    def track(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Takes the numbers of one line; what it raises is tried again with the next ones."""
        ...

    def close(self) -> None:
        """Takes what it has not taken yet to its server."""
        ...


class Function:
    """A function of the user's as a service."""

    name = "track"
    run: str | None = None

    def __init__(self, track: Track) -> None:
        """Args: track: called with a step and its metrics."""
        self._track = track

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """As in Service."""
        self._track(step, metrics)

    def close(self) -> None:
        """Nothing is left."""


class WandB:
    """A run of Weights & Biases; `WANDB_MODE`, `WANDB_API_KEY` and so on hold as ever."""

    name = "wandb"

    def __init__(
        self, settings: Tracker, run_name: str, run: str | None, folder: Path | None, config: str
    ) -> None:
        """As of `open_service`."""
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb = _import("wandb")
        self._run = wandb.init(
            project=settings.project,
            name=run_name,
            id=run,
            resume=None if run is None else "allow",
            dir=None if folder is None else str(folder),
            config={"config.gin": config},
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run: str | None = self._run.id

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """As in Service."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """As in Service."""
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment; `MLFLOW_TRACKING_URI` says where."""

    name = "mlflow"

    def __init__(
        self, settings: Tracker, run_name: str, run: str | None, folder: Path | None, config: str
    ) -> None:
        """As of `open_service`."""
        del folder
        _import("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient()
        self.run: str | None = run
        if run is None:
            found = self._client.get_experiment_by_name(settings.project)
            experiment = (
                self._client.create_experiment(settings.project)
                if found is None
                else found.experiment_id
            )
            self.run = self._client.create_run(experiment, run_name=run_name).info.run_id
            self._client.set_tag(self.run, "config.gin", config)
        else:
            self._client.set_terminated(run, "RUNNING")

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """As in Service."""
        now = int(time.time() * 1e3)
        metric = self._entities.Metric
        found = [metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run, metrics=found)

    def close(self) -> None:
        """As in Service."""
        self._client.set_terminated(self.run)


_SERVICES: dict[str, Callable[..., Service]] = {"wandb": WandB, "mlflow": MLflow}


def open_service(
    settings: Tracker, run: str | None, *, folder: Path | None, named: str, config: str
) -> Service:
    """The service that a run's settings name.

    Args:
      settings: which.
      run: by which name it knows the run since an earlier start; None: this is the first.
      folder: of the run on this machine, for files of the service's own.
      named: what the run is called where the settings do not say it.
      config: the run's settings as gin text.

    Raises:
      UserError: it is not installed, or rejects to begin.
    """
    assert settings.name is not None, "a service"
    name = settings.run_name or named
    try:
        return _SERVICES[settings.name](settings, name, run, folder, config)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - each service has errors of its own
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"Tracker.name = {settings.name!r}: it cannot be reached ({said}); log in or set its "
            "environment variables, or use Tracker.name = None"
        ) from error


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"Tracker.name = {module!r} needs jaxtrain[{module}] ({error}); run: "
            f"pip install 'jaxtrain[{module}]'"
        ) from error
