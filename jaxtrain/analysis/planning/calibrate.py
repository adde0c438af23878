"""Calibration of a target by a measured step: `plan --measured SECONDS`, `plan --calibrate RUN`."""

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.analysis.planning.machines.calibration import Calibration
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.search.search import price
from jaxtrain.analysis.planning.search.variants import rejection_reason, slices_of
from jaxtrain.analysis.planning.timing.efficiency_factors import family_of
from jaxtrain.config.buckets import BucketPath, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.run.metrics.files import METRICS_FILE, lines_of
from jaxtrain.run.show.progress import human_seconds
from jaxtrain.training.settings import Config, load_config

# Leading lines of a run's metrics to skip: those steps wait for the compiler and the first batch.
FIRST_LINES = 2
# Minimum number of further lines for a median.
LEAST_LINES = 3


def calibrate(config: Config, target: Target, seconds: float, source: str) -> Target:
    """Return the target, calibrated by a measured step of this configuration on it.

    Args:
      config: the configuration of the measured run, with its own layout.
      target: the machine of the measured run.
      seconds: measured step time.
      source: origin of the measurement, for the plan's assumptions.

    Raises:
      UserError: the configuration cannot run there, no time is predicted for the chip, or the step
        took less than its FLOPs take at the chip's peak.
    """
    target = dataclasses.replace(target, calibration=None)
    message = rejection_reason(config, target)
    if message is not None:
        raise UserError(
            f"{source}: the measured configuration cannot run on {target.name!r}, so nothing can "
            f"be predicted for it: {message}"
        )
    time = price(config, target).time
    predicted, profile = time.seconds, time.profile
    if predicted is None or profile is None:
        raise UserError(
            f"{source}: no time is predicted for {target.name!r}, so there is nothing to "
            "calibrate; name a target with a known peak, such as 'v5e:2x4' or 'h100:1x8'"
        )
    at_peak = predicted * (time.mfu or 0.0)
    if seconds < at_peak:
        raise UserError(
            f"{source}: {human_seconds(seconds)} is less than the {human_seconds(at_peak)} that "
            f"the FLOPs of a step take at the peak of {target.name!r}; the target and the "
            f"configuration must be those of the measured run (Train.global_batch_size="
            f"{config.train.global_batch_size})"
        )
    found = Calibration(seconds, predicted, source, family_of(config.train.model), profile)
    return dataclasses.replace(target, calibration=found)


def by_measured(config: Config, target: Target, seconds: float) -> Target:
    """Return the target, calibrated by a step of `config` that took `seconds`.

    Raises:
      UserError: see `calibrate`; or `seconds` is not a finite number above 0.
    """
    source = f"--measured={seconds:g}"
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(f"{source}; use the seconds of a step, such as 12.3")
    return calibrate(config, target, seconds, source)


def by_run(folder: str | Path, target: Target, *, allow_imports: bool = False) -> Target:
    """Return the target, calibrated by a run's median step.

    The run may have had another layout, another model and another number of the target's chips.

    Args:
      folder: the run's workdir, with its `config.gin` and `metrics.jsonl`.
      target: a machine with the chips on which the run was trained.
      allow_imports: whether the run's configuration may import modules.

    Raises:
      UserError: see `calibrate`; or it is not a run, has too few steps, or used simulated devices.
    """
    source = f"--calibrate {folder}"
    workdir = to_path(str(folder))
    needs = "use a run's folder that can be read"
    with path_errors(source, needs=needs), tempfile.TemporaryDirectory() as copies:
        file = workdir / "config.gin"
        if not file.is_file():
            raise UserError(f"{source}: no run there (no config.gin); {needs}")
        if isinstance(file, BucketPath):
            copy = Path(copies) / file.name
            copy.write_bytes(file.read_bytes())
            file = copy
        config = load_config(file, allow_imports=allow_imports)
        lines = lines_of(workdir)
    if config.mesh.simulated_devices:
        raise UserError(
            f"{source}: the run was trained on simulated CPU devices "
            f"(Mesh.simulated_devices={config.mesh.simulated_devices}); use a run on "
            f"{target.chip.name}"
        )
    seconds = median_step(lines, source)
    ran_on = _machine(config, target, source)
    made = calibrate(config, ran_on, seconds, source)
    return dataclasses.replace(target, calibration=made.calibration)


def median_step(lines: Sequence[Mapping[str, Any]], source: str) -> float:
    """Return the median `step_seconds` of a run's metrics after the first lines.

    Raises:
      UserError: there are too few lines.
    """
    steps = [line["step_seconds"] for line in lines if line.get("step_seconds")]
    least = FIRST_LINES + LEAST_LINES
    if len(steps) < least:
        raise UserError(
            f"{source}: {METRICS_FILE} has {len(steps)} lines with step_seconds, of which the "
            f"first {FIRST_LINES} are left out; at least {least} are needed: train longer, or with "
            "a smaller Train.log_every"
        )
    return statistics.median(steps[FIRST_LINES:])


def _machine(config: Config, target: Target, source: str) -> Target:
    """Return the target of a run: as many of its chips as its mesh has; all if it has -1."""
    sizes = [getattr(config.mesh, axis) for axis in MESH_AXES]
    count = math.prod(sizes)
    slices = slices_of(config, target)
    if -1 in sizes or count == target.devices * slices:
        return target
    chips, left = divmod(count, target.chip.devices * slices)
    if not left and target.chip.kind == "gpu":
        per_host = min(target.shape[-1], chips)
        if chips % per_host == 0:
            return dataclasses.replace(target, shape=(chips // per_host, per_host))
    elif not left and target.chip.slices is not None:
        grids = [tuple(map(int, grid.split("x"))) for grid in target.chip.slices.grids]
        alike = [grid for grid in grids if math.prod(grid) == chips]
        if alike:
            return dataclasses.replace(target, shape=alike[0])
    raise UserError(
        f"{source}: the run's mesh has {count:,} devices, and there is no {target.chip.name} "
        "machine of that size; pass --measured with its seconds and its own configuration instead"
    )
