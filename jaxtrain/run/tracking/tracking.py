"""Delivery of metrics to a tracker: each line that survives a resume, exactly once.

A line survives once a checkpoint of its step or a later one is on disk: steps that a killed run has
to repeat were not sent. A file in the run's folder has how far a service is.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.config.untrusted import MalformedError, read_json_object
from jaxtrain.run.metrics.files import METRICS_FILE, numbers_of, parse_line
from jaxtrain.run.tracking.services import Function, Service, Track, open_service
from jaxtrain.training.settings import Config

POSITION_FILES = "tracker_wandb.json", "tracker_mlflow.json", "tracker_track.json"


class Tracking:
    """How far one service is with one run's lines; of several processes one has it."""

    def __init__(
        self,
        service: Callable[[str | None], Service],
        name: str,
        folder: Path | None,
        lines: list[dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        """Opens the service.

        Args:
          service: opens it, given the name by which it knows the run; None for a new one.
          name: of the service.
          folder: where metrics.jsonl is; None: `lines` are all that there is.
          lines: of a run without a folder.
          say: takes a line for people.

        Raises:
          UserError: the service is not there.
        """
        self._metrics = None if folder is None else folder / METRICS_FILE
        self._file = None if folder is None else folder / f"tracker_{name}.json"
        self._lines, self._say = lines, say
        said: dict[str, Any] = {"run": None, "done": 0}
        if self._file is not None and self._file.is_file():
            said = _position(self._file)
        self._done = said["done"]  # bytes of metrics.jsonl, or lines
        self._service = service(said["run"])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tracker {name}")
        if self._file is not None and said["run"] != self._service.run:
            self._save()

    def go_on(self) -> None:
        """The log is open: of the lines that were dropped with it none was there."""
        self._thread.submit(self._cut).result()

    def up_to(self, step: int) -> None:
        """Gives away the lines up to a step whose checkpoint is on disk, beside the training."""
        self._thread.submit(self._give, step)

    def close(self) -> None:
        """Waits until what was to be given away is, as far as the service takes it."""
        self._thread.shutdown()
        try:
            self._service.close()
        except Exception as error:  # noqa: BLE001 - a run that is done is not lost by it
            self._say(f"{self._service.name} was not closed: {error}")

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
            self._say(
                f"{self._service.name} did not take the metrics up to step {step} ({error}); "
                "they are given to it again at the next checkpoint"
            )
        if self._file is not None:
            self._save()

    def _waiting(self) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Each line that was not given away, and how far the next one is."""
        if self._metrics is None:
            for number in range(self._done, len(self._lines)):
                yield self._lines[number], number + 1
            return
        with self._metrics.open("rb") as stream:
            # To the start of a line: a repair may have moved damaged lines from before it away.
            stream.seek(stream.read(self._done).rfind(b"\n") + 1)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                with contextlib.suppress(MalformedError):  # the next resume reports it
                    yield parse_line(line), stream.tell()

    def _save(self) -> None:
        assert self._file is not None, "a run with a folder"
        said = {"run": self._service.run, "done": self._done}
        write_atomically(self._file, json.dumps(said).encode())


def _position(file: Path) -> dict[str, Any]:
    """What `Tracking` has written down; UserError where the file is damaged."""
    advice = "remove it: the service then gets all lines again, as another run"
    said = read_json_object(file, advice=advice)
    run, done = said.get("run"), said.get("done")
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
    say: Callable[[str], None],
) -> list[Tracking]:
    """Who takes the metrics of a run: of several processes the first asks, the others nobody.

    Args:
      config: names a service, or none.
      track: a function of the user's, or None.
      folder: of the run on this machine.
      named: what the run is called where the settings do not say it.
      lines: those of a run without a folder.
      say: takes a line for people.

    Raises:
      UserError: the service is not there.
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
        found.append(Tracking(service, config.tracker.name, folder, lines, say))
    if track is not None:
        function = Function(track)
        found.append(Tracking(lambda run: function, function.name, folder, lines, say))
    return found
