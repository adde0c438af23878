"""Compute-optimal model for a FLOP budget: its size, tokens and expected loss."""

import dataclasses
import math

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.textbook import scaling
from jaxtrain.config.errors import UserError

# Range of FLOPs of the runs used in the fits (arXiv 2203.15556, figure 3).
_FITTED = (6e18, 3e21)

MOST_FLOPS = 1e28  # a hundred times the largest published runs


@dataclasses.dataclass(frozen=True)
class Budget:
    """A compute-optimal run.

    Attributes:
      compute: training FLOPs.
      params: parameters, by 20 tokens per parameter.
      tokens: tokens, by the same rule.
      loss: prediction of Chinchilla's parametric fit for these two, in nats per token.
    """

    compute: float
    params: float
    tokens: float
    loss: float


def plan_budget(compute: float) -> Budget:
    """Return the compute-optimal model size and tokens for C FLOPs.

    Args:
      compute: C, training FLOPs of the whole run.

    Raises:
      UserError: the number is out of range.
    """
    if not (math.isfinite(compute) and compute > 0):
        raise UserError(
            f"--budget={compute:g}; use a finite number of training FLOPs above 0, such as 1e21"
        )
    if compute > MOST_FLOPS:
        raise UserError(f"--budget={compute:g}; use at most {MOST_FLOPS:g} training FLOPs")
    best = scaling.optimum_by_ratio(compute)
    loss = scaling.predicted_loss(best.params, best.tokens)
    return Budget(compute, best.params, best.tokens, loss)


def show(console: Console, budget: Budget) -> None:
    """Print the optimum by three rules, with formulas and sources."""
    table = Table(
        title=f"{budget.compute:.3g} training FLOPs, compute-optimal", title_justify="left"
    )
    for column in ("rule", "parameters", "tokens", "tokens / parameter", "loss"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    chosen = scaling.Optimum(budget.params, budget.tokens)
    rows = [("20 tokens per parameter", chosen, scaling.CHINCHILLA)]
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
    if not _FITTED[0] <= budget.compute <= _FITTED[1]:
        lines.append(
            f"Extrapolated: the laws were fitted to runs of {_FITTED[0]:.0e} to "
            f"{_FITTED[1]:.0e} FLOPs."
        )
    return [
        *lines,
        "C = 6 N D: FLOPs of N parameters and D tokens (arXiv 2001.08361, section 2.1).",
        "20 tokens per parameter: N = sqrt(C / 120), D = 20 N, as approaches 1 and 2 of arXiv "
        "2203.15556 find; its loss is approach 3's.",
        *(
            f"{fit.name}: {_formula(fit)} ({fit.source}), least where 6 N D = C."
            for fit in (scaling.CHINCHILLA, scaling.REPLICATION)
        ),
        "Losses are nats per token on those papers' text and tokenizers.",
    ]


def _formula(fit: scaling.Fit) -> str:
    return f"L = {fit.E:g} + {fit.A:g} / N^{fit.alpha:g} + {fit.B:g} / D^{fit.beta:g}"


def amount(number: float) -> str:
    """Format a number with three digits and a word: 2.89 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:.3g}"
