"""Duration and cost of a whole run: days, device-hours, dollars, energy."""

import dataclasses
import math

from jaxtrain.config.errors import UserError, count_of
from jaxtrain.run.show.progress import amount, human_seconds

_DAY, _HOUR = 86_400.0, 3_600.0
LEAST_HOURS = 0.01  # device-hours below which cost and energy are not shown


@dataclasses.dataclass(frozen=True)
class WholeRun:
    """All steps of a run at the predicted step time, without launches, checkpoints and failures.

    Attributes:
      examples: number of tokens (images, vectors) trained on.
      steps: number of optimizer steps.
      days: duration in days.
      device_hours: device-hours of all devices.
      dollars: cost; None without a price.
      kilowatt_hours: energy of all devices at their power limit, an upper bound, without hosts,
        network and cooling. None if no limit is published.
    """

    examples: int
    steps: int
    days: float
    device_hours: float
    dollars: float | None
    kilowatt_hours: float | None


def project_run(
    *,
    step_seconds: float,
    devices: int,
    per_step: int,
    steps: int,
    examples: float | None = None,
    price: float | None = None,
    watts: float | None = None,
) -> WholeRun:
    """Multiply the step time by the number of steps.

    Args:
      step_seconds: seconds of one optimizer step.
      devices: number of devices.
      per_step: tokens, images or vectors of the global batch.
      steps: number of steps of the run.
      examples: trained on instead of those of `steps`, rounded up to whole steps.
      price: dollars per device-hour.
      watts: power limit of one device.
    """
    if examples is not None:
        steps = math.ceil(examples / per_step)
    hours = steps * step_seconds / _HOUR * devices
    return WholeRun(
        examples=steps * per_step,
        steps=steps,
        days=steps * step_seconds / _DAY,
        device_hours=hours,
        dollars=None if price is None else price * hours,
        kilowatt_hours=None if watts is None else watts / 1e3 * hours,
    )


def validate_amounts(price: float | None, tokens: float | None) -> None:
    """Raise UserError if one of them is not a finite number above 0."""
    for name, value, example in (("--price", price, "2.5"), ("--tokens", tokens, "15e12")):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{name}={value:g}; use a finite number above 0, such as {example}")


def sentence(run: WholeRun, *, unit: str, error_bar: float, watts: float | None) -> str:
    """Return one line on the run's duration and cost."""
    seconds = run.days * _DAY
    least, most = (human_seconds(seconds * (1 + sign * error_bar)) for sign in (-1, 1))
    text = (
        f"The run: {count_of(run.steps, 'step')}, {amount(run.examples)} {unit}, "
        f"{human_seconds(seconds)} ({least} to {most})"
    )
    if run.device_hours < LEAST_HOURS:
        return text
    text += f", {run.device_hours:,.4g} device-hours"
    if run.dollars is not None:
        text += f", ${run.dollars:,.0f}"
    if run.kilowatt_hours is not None:
        text += f", at most {run.kilowatt_hours:,.4g} kWh ({watts:g} W a device)"
    return text
