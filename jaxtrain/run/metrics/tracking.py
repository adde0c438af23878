"""Experiment trackers (Weights & Biases, MLflow, a callback), each line delivered exactly once.

A tracker's library is imported only if used. A line is sent once a checkpoint of its
step or a later one is on disk: steps that a killed run has to repeat were not sent. A file in the
run's folder records each service's position.
"""

import contextlib
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.config.untrusted import MalformedError, read_json_object
from jaxtrain.run.metrics.files import METRICS_FILE, numbers_of, parse_line
from jaxtrain.training.settings import Config, Tracker

# (step, metrics): the numbers of one line of metrics.jsonl.
Track = Callable[[int, Mapping[str, float]], None]


class Service(Protocol):
    """Interface of a metrics service.

    Attributes:
      name: its name.
      run: its id of the run; a later attempt passes it again.
    """

    name: str
    run: str | None

    def track(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Receive the metrics of one line; on errors it is retried with the next ones."""
        ...

    def close(self) -> None:
        """Flush pending metrics to its server."""
        ...


class Function:
    """A user function as a service."""

    name = "track"
    run: str | None = None

    def __init__(self, track: Track) -> None:
        """Args: track: called with a step and its metrics."""
        self._track = track

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """As in Service."""
        self._track(step, metrics)

    def close(self) -> None:
        """Nothing is pending."""


class WandB:
    """A run of Weights & Biases; `WANDB_MODE`, `WANDB_API_KEY` etc. apply as usual."""

    name = "wandb"

    def __init__(
        self, settings: Tracker, run_name: str, run: str | None, folder: Path | None, config: str
    ) -> None:
        """As in `open_service`."""
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
    """A run of an MLflow experiment, at `MLFLOW_TRACKING_URI`."""

    name = "mlflow"

    def __init__(
        self, settings: Tracker, run_name: str, run: str | None, folder: Path | None, config: str
    ) -> None:
        """As in `open_service`."""
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
    """Return the service that a run's settings name.

    Args:
      settings: the tracker's settings.
      run: its id of the run from an earlier attempt; None: this is the first.
      folder: of the run on this machine, for the service's own files.
      named: the run's name if the settings have none.
      config: the run's settings as gin text.

    Raises:
      UserError: it is not installed, or fails to start.
    """
    assert settings.name is not None, "a service"
    name = settings.run_name or named
    try:
        return _SERVICES[settings.name](settings, name, run, folder, config)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - each service has errors of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"Tracker.name = {settings.name!r}: it cannot be reached ({reason}); log in or set its "
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


class Tracking:
    """Delivery position of one service in one run's lines; in one process only."""

    def __init__(
        self,
        service: Callable[[str | None], Service],
        name: str,
        folder: Path | None,
        lines: list[dict[str, Any]],
        report: Callable[[str], None],
    ) -> None:
        """Open the service.

        Args:
          service: opens it, given its id of the run; None for a new one.
          name: of the service.
          folder: of metrics.jsonl; None: `lines` are all lines.
          lines: of a run without a folder.
          report: called with each line to print.

        Raises:
          UserError: the service is not available.
        """
        self._metrics = None if folder is None else folder / METRICS_FILE
        self._file = None if folder is None else folder / f"tracker_{name}.json"
        self._lines, self._report = lines, report
        position: dict[str, Any] = {"run": None, "done": 0}
        if self._file is not None and self._file.is_file():
            position = _position(self._file)
        self._done = position["done"]  # bytes of metrics.jsonl, or lines
        self._service = service(position["run"])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tracker {name}")
        if self._file is not None and position["run"] != self._service.run:
            self._save()

    def go_on(self) -> None:
        """The log is open: dropped lines had never been sent."""
        self._thread.submit(self._cut).result()

    def up_to(self, step: int) -> None:
        """Send the lines up to a step whose checkpoint is on disk, in a background thread."""
        self._thread.submit(self._give, step)

    def close(self) -> None:
        """Wait until pending lines are sent, as far as the service accepts them."""
        self._thread.shutdown()
        try:
            self._service.close()
        except Exception as error:  # noqa: BLE001 - a run that is done is not lost by it
            self._report(f"{self._service.name} was not closed: {error}")

    def _cut(self) -> None:
        if self._metrics is not None:
            there = self._metrics.stat().st_size if self._metrics.exists() else 0
        else:
            there = len(self._lines)
        self._done = min(self._done, there)

    def _give(self, step: int) -> None:
        try:
            for line, done in self._waiting():
                if line["step"] > step:
                    break
                self._service.track(line["step"], numbers_of(line))
                self._done = done
        except Exception as error:  # noqa: BLE001 - no service's failure ends a training
            self._report(
                f"{self._service.name} did not accept the metrics up to step {step} ({error}); "
                "they are sent again at the next checkpoint"
            )
        if self._file is not None:
            self._save()

    def _waiting(self) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield each unsent line, and the position after it."""
        if self._metrics is None:
            for number in range(self._done, len(self._lines)):
                yield self._lines[number], number + 1
            return
        with self._metrics.open("rb") as stream:
            # To the start of a line: a repair may have removed damaged lines before it.
            stream.seek(stream.read(self._done).rfind(b"\n") + 1)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                with contextlib.suppress(MalformedError):  # the next resume reports it
                    yield parse_line(line), stream.tell()

    def _save(self) -> None:
        assert self._file is not None, "a run with a folder"
        position = {"run": self._service.run, "done": self._done}
        write_atomically(self._file, json.dumps(position).encode())


def _position(file: Path) -> dict[str, Any]:
    """Read the position that `Tracking` has written; UserError if the file is damaged."""
    advice = "remove it: all lines are then sent again, as a new run"
    position = read_json_object(file, advice=advice)
    run, done = position.get("run"), position.get("done")
    if not (run is None or isinstance(run, str)) or not isinstance(done, int) or done < 0:
        raise UserError(f"{file} is damaged; {advice}")
    return {"run": run, "done": done}


def trackings(
    config: Config,
    track: Track | None,
    *,
    folder: Path | None,
    named: str,
    lines: list[dict[str, Any]],
    report: Callable[[str], None],
) -> list[Tracking]:
    """Return the trackers of a run's metrics: of several processes only the first has any.

    Args:
      config: the configuration.
      track: a user function, or None.
      folder: of the run on this machine.
      named: the run's name if the settings have none.
      lines: those of a run without a folder.
      report: called with each line to print.

    Raises:
      UserError: the service is not available.
    """
    if jax.process_index():
        return []
    found = []
    if config.tracker.name is not None:
        service = functools.partial(
            open_service,
            config.tracker,
            folder=folder,
            named=named,
            config=config.operative(),
        )
        found.append(Tracking(service, config.tracker.name, folder, lines, report))
    if track is not None:
        function = Function(track)
        found.append(Tracking(lambda run: function, function.name, folder, lines, report))
    return found
