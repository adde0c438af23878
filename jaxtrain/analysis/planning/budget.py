"""What a budget of FLOPs buys: the model, its tokens, the loss to expect, and how long it takes."""

import dataclasses
import math

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.textbook import scaling
from jaxtrain.config.errors import UserError

# FLOPs of the runs that the fits were made on (arXiv 2203.15556, figure 3).
_FITTED = (6e18, 3e21)


@dataclasses.dataclass(frozen=True)
class Budget:
    """A compute-optimal run.

    Attributes:
      compute: training FLOPs.
      params: by 20 tokens a parameter.
      tokens: likewise.
      loss: that Chinchilla's parametric fit predicts for these two, nats a token.
      mfu: the part of the peak that was assumed.
      devices: how many were assumed; None where it was not said.
      days: on these devices; None where they or their peak are not known.
      device_hours: of one device; None where its peak is not known.
    """

    compute: float
    params: float
    tokens: float
    loss: float
    mfu: float
    devices: int | None
    days: float | None
    device_hours: float | None


def plan_budget(
    compute: float, *, peak_flops: float | None, devices: int | None, mfu: float = 0.4
) -> Budget:
    """The model and the tokens that C FLOPs train best.

    Args:
      compute: C, training FLOPs of the whole run.
      peak_flops: FLOP/s of one device; None where it is not known.
      devices: how many there are; None where it is not known.
      mfu: the part of the peak that becomes training FLOPs; large runs reach 0.3 to 0.6.

    Raises:
      UserError: a number is out of its range.
    """
    if not (math.isfinite(compute) and compute > 0):
        raise UserError(
            f"--budget={compute:g}; use a finite number of training FLOPs above 0, such as 1e21"
        )
    if not 0 < mfu <= 1:
        raise UserError(f"mfu={mfu:g}; use a part of the peak above 0 and at most 1, such as 0.4")
    if devices is not None and devices < 1:
        raise UserError(f"devices={devices}; use at least 1")
    if peak_flops is not None and not (math.isfinite(peak_flops) and peak_flops > 0):
        raise UserError(
            f"peak_flops={peak_flops:g}; use the finite FLOP/s of one device, above 0, such as "
            "989e12"
        )
    best = scaling.optimum_by_ratio(compute)
    days = hours = None
    if peak_flops is not None:
        hours = scaling.device_hours(compute, peak_flops=peak_flops, mfu=mfu)
        if devices is not None:
            days = scaling.days(compute, devices=devices, peak_flops=peak_flops, mfu=mfu)
    return Budget(
        compute=compute,
        params=best.params,
        tokens=best.tokens,
        loss=scaling.predicted_loss(best.params, best.tokens),
        mfu=mfu,
        devices=devices,
        days=days,
        device_hours=hours,
    )


def show(console: Console, budget: Budget) -> None:
    """Prints the optimum by three rules and the time, and under them formulas and sources."""
    table = Table(
        title=f"{budget.compute:.3g} training FLOPs, compute-optimal", title_justify="left"
    )
    for column in ("rule", "parameters", "tokens", "tokens / parameter", "loss"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    chosen = scaling.Optimum(budget.params, budget.tokens)
    rows = [("20 tokens a parameter", chosen, scaling.CHINCHILLA)]
    for fit in (scaling.CHINCHILLA, scaling.REPLICATION):
        rows.append((fit.name, scaling.optimum_of_fit(budget.compute, fit), fit))
    for rule, best, fit in rows:
        table.add_row(
            rule,
            amount(best.params),
            amount(best.tokens),
            f"{best.tokens_per_parameter:.1f}",
            f"{scaling.predicted_loss(best.params, best.tokens, fit):.3f}",
        )
    console.print(table)
    for line in _lines(budget):
        console.print(line, highlight=False)


def _lines(budget: Budget) -> list[str]:
    lines = []
    if budget.device_hours is not None:
        time = f"{budget.device_hours:,.1f} device-hours at an MFU of {budget.mfu:.0%}"
        if budget.days is not None:
            time += f": {budget.days:,.2f} days on {budget.devices:,} devices"
        lines.append(time)
    else:
        lines.append("No time without a device whose peak FLOP/s is known: name a target.")
    if not _FITTED[0] <= budget.compute <= _FITTED[1]:
        lines.append(
            f"Extrapolated: the fits were made on runs of {_FITTED[0]:.0e} to {_FITTED[1]:.0e} "
            "FLOPs."
        )
    return [
        *lines,
        "C = 6 N D: FLOPs of N parameters and D tokens (arXiv 2001.08361, section 2.1).",
        "20 tokens a parameter: N = sqrt(C / 120), D = 20 N, as approaches 1 and 2 of arXiv "
        "2203.15556 find; its loss is approach 3's.",
        *(
            f"{fit.name}: {_formula(fit)} ({fit.source}), least where 6 N D = C."
            for fit in (scaling.CHINCHILLA, scaling.REPLICATION)
        ),
        "Seconds = C / (devices x peak FLOP/s x MFU). Losses are nats a token of those papers' "
        "text and tokenizers.",
    ]


def _formula(fit: scaling.Fit) -> str:
    return f"L = {fit.E:g} + {fit.A:g} / N^{fit.alpha:g} + {fit.B:g} / D^{fit.beta:g}"


def amount(number: float) -> str:
    """Three digits and a word: 2.89 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:.3g}"
