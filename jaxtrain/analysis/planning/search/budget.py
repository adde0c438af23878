"""Compute-optimal model for a FLOP budget: its size, tokens and expected loss."""

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.result import Plan
from jaxtrain.analysis.planning.textbook import scaling
from jaxtrain.analysis.planning.whole_run import sentence
from jaxtrain.config.errors import UserError, count_of, nearest_multiple
from jaxtrain.run.show.progress import amount
from jaxtrain.training.settings import load_config

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


# -- the plan of its model on a target machine -----------------------------------------------------

# Llama's shape: heads of 128, embed_dim of 128 per layer (7B to 70B have 102 to 128), a gated mlp
# 8/3 as wide, so 12 D^2 parameters per layer.
_HEAD, _WIDTH_PER_LAYER, _PER_LAYER = 128, 128, 12
_LENGTH = 4096


def bindings_for(budget: Budget, devices: int) -> list[str]:
    """Return the bindings, on top of `llama_8b`, of a Llama with the budget's non-embedding
    parameters, and of a batch size that divides over the devices.

    The batch size is from arXiv 2401.02954 (equation 1), B = 0.2920 C^0.3271 tokens.
    """
    width = (budget.params * _WIDTH_PER_LAYER / _PER_LAYER) ** (1 / 3)
    # In large models the number of heads is a multiple of 8, so that `tensor` can shard them.
    unit = 8 if width > 16 * _HEAD else 1
    heads = nearest_multiple(round(width / _HEAD), unit)
    width = heads * _HEAD
    wide = nearest_multiple(round(8 / 3 * width), unit * _HEAD)
    layers = max(round(budget.params / (4 * width**2 + 3 * width * wide)), 1)
    rows = 0.2920 * budget.compute**0.3271 / _LENGTH
    return [
        f"Llama.num_layers={layers}", f"Llama.embed_dim={width}", f"Llama.num_heads={heads}",
        f"Llama.num_kv_heads={heads}", f"Llama.mlp_dim={wide}",
        f"TextData.sequence_length={_LENGTH}", "TextData.separate_documents=False",
        f"Train.global_batch_size={nearest_multiple(round(rows), devices)}",
    ]  # fmt: skip


def plan_on_target(budget: Budget, target: Target, *, price: float | None = None) -> Plan:
    """Return the plan of the model's fastest layout, for all of the budget's tokens.

    Args:
      budget: from `plan_budget`.
      target: the machine, whose speed must be known.
      price: dollars per device-hour.

    Raises:
      UserError: no layout fits there.
    """
    config = load_config("llama_8b", bindings_for(budget, target.devices))
    dcn = target.chip.dcn_bandwidth
    return plan(
        config,
        target.name,
        compile=False,
        search=True,
        price=price,
        tokens=budget.tokens,
        network=None if dcn is None else dcn * 8 / 1e9,
    )


def sentences(budget: Budget, found: Plan) -> list[str]:
    """Return lines that summarize a plan: the model, its layout and the training time."""
    run, time, layout = found.whole_run, found.time, found.found
    assert run is not None, "the machine's speed is known"
    assert time.error_bar is not None
    assert time.mfu is not None
    assert layout is not None
    model: Any = found.config.train.model
    watts = found.target.chip.watts
    shape = bindings_for(budget, found.target.devices)
    return [
        f"On {found.target.name}, a Llama of {count_of(model.num_layers, 'layer')}, "
        f"{model.embed_dim} wide, {found.per_step:,} tokens a batch: {time.seconds:.3g} s a step, "
        f"MFU {time.mfu:.1%}.",
        sentence(run, unit="tokens", error_bar=time.error_bar, watts=watts),
        f"Its layout by 'plan --search': jaxtrain plan llama_8b --target {found.target.name} "
        + " ".join(f'-b "{one}"' for one in [*shape, *layout.candidates[0].bindings]),
    ]
