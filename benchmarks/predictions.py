"""Holds `plan`'s step time against published runs: `python -m benchmarks.predictions`.

Three files list training runs that others published, each with its source, its step time and the
arguments of `jaxtrain plan` that express it; `plan` predicts each of them by closed forms.
`published_runs.csv` and `held_out_runs.csv` were collected first; `blind_runs.csv` was committed
before any of its rows was predicted. Columns say of each row its stack, its family (dense, mixture,
image), whether `timing.efficiency_factors` was fitted on it (`use_for_fit`), and when it was
first predicted, with what result (`first_ratio`, predicted over published).

The figure that a prediction for another stack deserves is that of leave-one-stack-out: the factors
are fitted again without a stack's rows on a family of chips, and predict them. `--rows` prints each
run, `--png` draws predicted against published seconds. `benchmarks.fitting` fits.
"""

import argparse
import csv
import dataclasses
import functools
import itertools
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from scipy import stats

from benchmarks.calibrated import calibrated_bars, fit_exponents, pairs_of
from benchmarks.fitting import Point, Prediction, fit, left_out, two_of_three
from benchmarks.published_memory import (
    AT_ONCE,
    as_its_stack,
    parse_bindings,
    read_all,
    unfit,
)
from jaxtrain import load_config, plan
from jaxtrain.analysis.planning.machines.links import devices_inside
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.result import Plan
from jaxtrain.analysis.planning.textbook.facts import weights_of
from jaxtrain.analysis.planning.timing.efficiency_factors import (
    EfficiencyFactors,
    efficiency_of,
    family_of,
)
from jaxtrain.analysis.planning.timing.timing import StepCosts, profile_of
from jaxtrain.config.errors import UserError
from jaxtrain.parallel import chips
from jaxtrain.run.show.figures import Picture
from jaxtrain.training.layouts import resolve_config
from jaxtrain.training.settings import Config

FILE = Path(__file__).with_name("published_runs.csv")
# Most are of the same tables, at other sizes.
HELD_OUT = Path(__file__).with_name("held_out_runs.csv")
BLIND = Path(__file__).with_name("blind_runs.csv")

# Sections of bindings that say what is computed, not how it is laid out.
_OF_THE_WORK = (
    "GPT.", "Llama.", "Mixtral.", "GPTOSS.", "DeepSeek.", "TextData.", "Precision.",
    "Attention.kernel",
)  # fmt: skip


def read(row: dict[str, str]) -> Point:
    """A row of a file, as `jaxtrain plan` predicts it.

    Raises:
      UserError: this program cannot run what was published.
    """
    name, *words = shlex.split(row["bindings"])
    bindings = parse_bindings(row["bindings"])
    options = dict(itertools.pairwise(words))
    network = float(options["--network"]) if "--network" in options else None
    config = load_config(name, [*AT_ONCE, *bindings, *as_its_stack(row)])

    @functools.cache
    def planned(policy: str) -> Plan:
        remat = dataclasses.replace(config.remat, policy=policy)
        made = dataclasses.replace(config, remat=remat)
        return plan(made, options["--target"], compile=False, network=network, advise=False)

    def counted_with(policy: str) -> StepCosts:
        pieces = planned(policy).time.pieces
        assert pieces is not None, "every chip of the files has a peak"
        return pieces

    made = planned(config.remat.policy)
    assert made.time.seconds is not None
    assert made.time.error_bar is not None
    counted = counted_with(config.remat.policy)
    if row["recomputed_products"]:
        kind = resolve_config(config, made.target.chip.kind)
        counted = counted_as_repeated(row["recomputed_products"], kind, counted_with)
    if row.get("dispatch"):
        counted = counted_as_dispatched(row["dispatch"], made, counted)
    assert row["family"] == family_of(config.train.model), row["id"]
    return Point(
        row["id"],
        row["stack"],
        row["family"],
        row["chip"],
        float(row["published_step_seconds"]),
        made.time.model_flops_per_device,
        counted,
        row["use_for_fit"] == "True",
        made.time.error_bar,
        (row["chip"], str(made.layout.mesh.size),
         *sorted(b for b in bindings if b.startswith(_OF_THE_WORK))),
        profile_of(config, made.layout, counted, efficiency_of(made.target)),
    )  # fmt: skip


# What a run does again: weights of a layer whose products it repeats, and "attn" for attention's
# scores. Of `Remat.policy` 'full' that is all of a layer but its last product; 'full2' is the same
# of an MLP of two matrices, which a Llama's three of two thirds their width stand for. Nothing:
# what the bindings say.
_SHORT = {"gateup": ("gate", "up"), "none": ()}


def counted_as_repeated(
    words: str, config: Config, counted_with: Callable[[str], StepCosts]
) -> StepCosts:
    """The pieces of a run that does `words` again: between those of a run that does no product
    again and of one that repeats its layers, since products, scores and bytes add up."""
    model = config.train.model
    # Of its experts a token meets a few, and so many of their products are done for it.
    met = getattr(model, "experts_per_token", 1) / getattr(model, "num_experts", 1)
    sizes = {
        weight.name.split("/")[-1]: math.prod(weight.shape)
        * (met if "/experts/" in weight.name else 1)
        for weight in weights_of(model)
        if weight.is_layer and weight.is_matrix
    }
    some, all_but_last = sum(sizes.values()), sum(sizes.values()) - sizes["down"]
    mlp = sum(size for name, size in sizes.items() if name in ("gate", "up", "down"))
    repeated = {
        "full": all_but_last, "full-attn": all_but_last, "full2": some - mlp / 2,
        "halfdots": some / 2,
    }  # fmt: skip
    parts = words.split("+")
    if words not in repeated:
        names = [name for part in parts for name in _SHORT.get(part, (part,)) if name != "attn"]
        repeated[words] = sum(sizes[name] for name in names)
    share = repeated[words] / all_but_last
    least, most = counted_with("elementwise"), counted_with("full")
    scores = most.scores if {"full", "full2", "attn"} & set(parts) else least.scores

    def between(name: str) -> float:
        low, high = getattr(least, name), getattr(most, name)
        return low + share * (high - low)

    mixed = {name: between(name) for name in ("products", "activations")}
    return dataclasses.replace(counted_with(config.remat.policy), scores=scores, **mixed)


def hosts_met(copies: int, hosts: int, most: int) -> float:
    """Other hosts that a token's copies go to, on average: experts are chosen alike on all hosts,
    of which a token meets at most `most` (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    met = min(hosts, most)
    return (hosts - 1) / hosts * met * (1 - (1 - 1 / met) ** copies)


def counted_as_dispatched(words: str, made: Plan, pieces: StepCosts) -> StepCosts:
    """The pieces of a run whose exchange of tokens with their experts moves less than ours, in
    which a copy for each expert crosses to its host and each tensor rank has the whole sequence.

    'by-host': a token crosses to a host once and is copied there (DeepEP). 'split': tensor ranks
    have a part of the sequence each (Megatron's, under sequence parallelism).
    """
    model, sizes = made.config.train.model, dict(made.layout.mesh.shape)
    assert model.experts is not None
    share, copies = 1.0, model.experts.per_token
    hosts = sizes["expert"] // devices_inside(["expert"], sizes, made.target.shape[-1])
    if "by-host" in words and hosts > 1:
        most = getattr(model, "groups_per_token", hosts)
        if getattr(model, "expert_groups", 1) == 1:
            most = hosts
        share *= hosts_met(copies, hosts, most) / (copies * (hosts - 1) / hosts)
    if "split" in words:
        share /= sizes["tensor"]
    return dataclasses.replace(pieces, others=share * pieces.others)


def factors_of(chip: str) -> EfficiencyFactors:
    """The factors that predictions have for a chip."""
    return efficiency_of(Target(chips.CHIPS[chip], (1, 1)))


def counted(file: Path, say: Callable[[str], None]) -> list[Point]:
    """The runs of a file; says which this program cannot run."""
    found = []
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            try:
                found.append(read(row))
            except (UserError, ValueError) as error:
                say(f"{row['id']}: not counted: {str(error).splitlines()[0][:120]}")
    return found


# -- the tables ------------------------------------------------------------------------------------


def by_family(predictions: Sequence[Prediction]) -> str:
    """Errors of stacks that were left out, by family and kind of chip, as Markdown."""
    lines = [
        "| family | chips | runs | stacks | median error | two of three within | median ratio "
        "| inside the printed bar |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, kind in itertools.product(("dense", "mixture", "image", None), ("tpu", "gpu")):
        some = [
            one for one in predictions
            if one.point.kind == kind and family in (None, one.point.family)
        ]  # fmt: skip
        if not some:
            continue
        errors = np.array([one.error for one in some])
        lines.append(
            f"| {family or 'all'} | {kind.upper()} | {len(some)} | "
            f"{len({one.point.stack for one in some})} | {np.median(errors):.1%} | "
            f"{np.quantile(errors, 2 / 3):.0%} | {np.median([one.ratio for one in some]):.2f} | "
            f"{within_bars(some):.0%} |"
        )
    return "\n".join(lines)


def by_stack(predictions: Sequence[Prediction]) -> str:
    """The same, stack by stack."""
    lines = [
        "| stack left out | chips | runs | median error | median ratio | range |",
        "|---|---|---|---|---|---|",
    ]
    for stack, kind in dict.fromkeys((one.point.stack, one.point.kind) for one in predictions):
        ratios = np.array([
            one.ratio for one in predictions
            if (one.point.stack, one.point.kind) == (stack, kind)
        ])  # fmt: skip
        lines.append(
            f"| {stack} | {kind.upper()} | {len(ratios)} | {np.median(np.abs(ratios - 1)):.1%} | "
            f"{np.median(ratios):.2f} | {ratios.min():.2f}-{ratios.max():.2f} |"
        )
    return "\n".join(lines)


def by_chip(points: Sequence[Point], shares: Callable[[str], EfficiencyFactors]) -> str:
    """Errors of these runs by chip with the factors that `plan` has, as Markdown."""
    lines = [
        "| chip | runs | median predicted / published | median error | range | rank correlation |",
        "|---|---|---|---|---|---|",
    ]
    chips = list(dict.fromkeys(point.chip for point in points))
    for chip in [*chips, None]:
        some = [p for p in points if chip in (None, p.chip)]
        ratios = np.array([p.ratio(shares(p.chip)) for p in some])
        rank = "" if len(some) < 4 or chip is None else f"{_rank(some, ratios):.2f}"
        errors = np.abs(ratios - 1)
        lines.append(
            f"| {chip or 'all'} | {len(some)} | {np.median(ratios):.2f} | "
            f"{np.median(errors):.1%} | {ratios.min():.2f}-{ratios.max():.2f} | {rank} |"
        )
    return "\n".join(lines)


def within_bars(predictions: Sequence[Prediction]) -> float:
    """The part of these predictions whose error is within the bar that `plan` prints."""
    return float(np.mean([one.error <= one.point.error_bar for one in predictions]))


def in_order(
    points: Sequence[Point], shares: Callable[[str], EfficiencyFactors]
) -> tuple[int, int]:
    """Pairs of layouts of one model on the same chips, and how many of them are predicted in the
    published order of their efficiency."""
    pairs = [(a, b) for a, b in itertools.combinations(points, 2) if a.alike == b.alike]

    def faster(a: Point, b: Point, seconds: Callable[[Point], float]) -> bool:
        return a.model_flops / seconds(a) > b.model_flops / seconds(b)

    right = sum(
        faster(a, b, lambda p: p.published)
        == faster(a, b, lambda p: p.counted.seconds(shares(p.chip)))
        for a, b in pairs
    )
    return len(pairs), right


def _rank(points: Sequence[Point], ratios: np.ndarray) -> float:
    """Spearman's correlation of predicted and published efficiencies."""
    published = np.array([p.model_flops / p.published for p in points])
    found = stats.spearmanr(published / ratios, published)
    return float(found.statistic)


def figure(points: Sequence[Point], shares: Callable[[str], EfficiencyFactors]) -> Picture:
    """Predicted against published seconds, a mark for each chip."""
    picture = Picture(6.5, 6)
    axes = picture.subplots()
    marks = dict(
        zip(dict.fromkeys(p.chip for p in points), itertools.cycle("o^sDvP*X<>"), strict=False)
    )
    shades = dict(zip(marks, np.linspace(0.0, 0.75, len(marks)), strict=True))
    for chip, mark in marks.items():
        some = [p for p in points if p.chip == chip]
        predicted = [p.counted.seconds(shares(chip)) for p in some]
        axes.scatter(
            [p.published for p in some], predicted, marker=mark, s=26, label=chip,
            color=(shades[chip] * 0.7, 0.25 + shades[chip] * 0.6, 0.9 - shades[chip] * 0.8),
            edgecolor="black", linewidth=0.4,
        )  # fmt: skip
    ends = np.array([0.1, 250])
    axes.plot(ends, ends, color="black", linewidth=1)
    for factor in (0.8, 1.2):
        axes.plot(ends, factor * ends, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", title="Published runs and their predictions")
    axes.set(xlabel="published, seconds a step", ylabel="predicted, seconds a step")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def main(words: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the points")
    parser.add_argument("--rows", action="store_true", help="print every run")
    options = parser.parse_args(words)
    say = Console(width=120, highlight=False).out
    jax.config.update("jax_platforms", "cpu")
    points = [point for file in (FILE, HELD_OUT, BLIND) for point in counted(file, say)]
    left = left_out(points)
    if options.rows:
        for one in left:
            now = one.point.ratio(factors_of(one.point.chip))
            say(f"{one.point.name:32} {one.point.published:9.3f} s  {now:.2f}  {one.ratio:.2f}")
    say(f"Leave-one-stack-out:\n\n{by_family(left)}\n\n{by_stack(left)}\n")
    say(f"Calibrated by one measured run of the stack:\n\n{calibrated_bars(left)}\n")
    say("Exponents, fitted on all: {:.1f} per distance, {:.1f} per difference\n".format(
        *fit_exponents(pairs_of(left))
    ))  # fmt: skip
    pairs, right = in_order(points, factors_of)
    say(f"{right} of {pairs} pairs of layouts of one model on the same chips in published order\n")
    say(f"Runs that ran, whose estimate does not fit:\n\n{unfit(read_all(say))}\n")
    say("With the factors that plan has, most of them fitted on these runs:\n")
    say(by_chip(points, factors_of))
    _, values = fit([point for point in points if point.fits])
    for kind in ("tpu", "gpu"):
        for family in ("dense", "mixture", "image"):
            some = [p for p in left if (p.point.family, p.point.kind) == (family, kind)]
            if some:
                say(f"two of three, each stack alike: {family} {kind} {two_of_three(some):.3f}")
    chips_left = left_out(points, lambda point: point.chip)
    say(f"a chip left out: two of three within {two_of_three(chips_left):.3f}")
    say("\nFitted anew: " + ", ".join(f"{name} {value:g}" for name, value in values.items()))
    if options.png is not None:
        options.png.write_bytes(figure(points, factors_of).png())


if __name__ == "__main__":
    sys.exit(main())
