"""Holds `plan`'s step time against published runs: `python -m benchmarks.predictions`.

`published_runs.csv` has 136 training runs that others published, each with its source, the step
time or the figure it follows from, and the arguments of `jaxtrain plan` that express it;
`held_out_runs.csv` has others, which no share was fitted on and which have a table of their own.
Everything is predicted by closed forms. `--fit` fits the shares of `planning.fitted.FITTED` anew,
and once more for each source without its rows: what it then predicts of them is the error of a
prediction for a stack that the fit has not seen. `--png` draws predicted against published seconds.
"""

import argparse
import csv
import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from scipy import optimize, stats

from jaxtrain import load_config
from jaxtrain.analysis.planning.fitted import FITTED, Fitted, error_bar, fitted
from jaxtrain.analysis.planning.machines.targets import Target, parse_target
from jaxtrain.analysis.planning.textbook.facts import weights_of
from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.analysis.planning.textbook.traffic import expected
from jaxtrain.analysis.planning.timing import Pieces, peak_flops, pieces
from jaxtrain.analysis.planning.variants import refusal, slices_of
from jaxtrain.config.errors import UserError
from jaxtrain.parallel import chips
from jaxtrain.run.show.picture import Picture
from jaxtrain.training.program.layouts import abstract_layout
from jaxtrain.training.program.program import flops_per_step, resolved
from jaxtrain.training.settings import Config

FILE = Path(__file__).with_name("published_runs.csv")
# Runs that are kept apart to judge: most are of the same tables, at other sizes.
HELD_OUT = Path(__file__).with_name("held_out_runs.csv")
# Chips of one share each; the other shares are one for a family.
CHIPS = ("v4", "v5e", "v5p", "v6e", "7x", "a100", "h100", "h200", "b200")
FAMILY = {"a100": "ampere", "h100": "hopper", "h200": "hopper", "b200": "hopper"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A published run and what is counted of it.

    Attributes:
      name: its id.
      source: the repository that published it.
      chip: as in a target.
      published: seconds of a step.
      model_flops: that the model needs on one device, for its efficiency.
      counted: the pieces of the formula.
      fits: whether the run is expressed well enough to be fitted on.
      alike: what it has in common with other layouts of the same: chips, model, data, precision.
    """

    name: str
    source: str
    chip: str
    published: float
    model_flops: float
    counted: Pieces
    fits: bool
    alike: tuple[str, ...]

    def ratio(self, shares: Fitted) -> float:
        """Predicted over published seconds."""
        return self.counted.seconds(shares) / self.published


def read(row: dict[str, str]) -> Point:
    """A row of the file, counted.

    Raises:
      UserError: this program cannot run what was published.
    """
    name, *words = shlex.split(row["bindings"])
    bindings = [word for flag, word in zip(words, words[1:], strict=False) if flag == "-b"]
    target = parse_target(words[words.index("--target") + 1])
    config = load_config(name, [*_AT_ONCE, *bindings])
    # What `jaxtrain plan` rejects is not predicted here either.
    if (refused := refusal(config, target)) is not None:
        raise UserError(refused)
    devices = target.devices * slices_of(config, target)
    layout = abstract_layout(config, devices)
    config = resolved(config, target.chip.kind)
    peak = peak_flops(config, target)
    assert peak is not None
    needed = memory(config, layout, target.chip.kind)
    moved = expected(config, layout)

    def counted_with(policy: str) -> Pieces:
        remat = dataclasses.replace(config.remat, policy=policy)
        made = dataclasses.replace(config, remat=remat)
        return pieces(
            made, layout, target, moved, peak=peak,
            update_bytes=needed.update_bytes, to_host=needed.to_host,
        )  # fmt: skip

    counted = counted_as_repeated(row["recomputed_products"], config, counted_with)
    return Point(
        row["id"],
        row["source"].split("@")[0].split()[0],
        row["chip"],
        float(row["published_step_seconds"]),
        flops_per_step(config) / devices,
        counted,
        row["use_for_fit"] == "True",
        (row["chip"], str(devices), *sorted(b for b in bindings if b.startswith(_OF_THE_WORK))),
    )


# These stacks make the logits of a sequence at once.
_AT_ONCE = ("Loss.chunk_size = None",)
# Sections of bindings that say what is computed, not how it is laid out.
_OF_THE_WORK = (
    "GPT.", "Llama.", "Mixtral.", "TextData.", "Precision.", "Attention.kernel",
)  # fmt: skip


# What a run does again: weights of a layer whose products it repeats, and "attn" for attention's
# scores. Of `Remat.policy` 'full' that is all of a layer but its last product; 'full2' is the same
# of an MLP of two matrices, which a Llama's three of two thirds their width stand for.
_SHORT = {"gateup": ("gate", "up"), "none": ()}


def counted_as_repeated(
    words: str, config: Config, counted_with: Callable[[str], Pieces]
) -> Pieces:
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


def shares_of(chip: str) -> Fitted:
    """The shares that predictions have for a chip."""
    return fitted(Target(chips.CHIPS[chip], (1, 1)))


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


# -- the table -------------------------------------------------------------------------------------


def table(points: Sequence[Point], shares: Callable[[str], Fitted]) -> str:
    """Errors of these runs by chip, as Markdown."""
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


def within_bars(points: Sequence[Point]) -> float:
    """The share of these runs that lie within the error bars of their predictions."""
    bars = [error_bar(Target(chips.CHIPS[p.chip], (1, 1))) for p in points]
    errors = [abs(p.ratio(shares_of(p.chip)) - 1) for p in points]
    return float(np.mean([error <= bar for error, bar in zip(errors, bars, strict=True)]))


def in_order(points: Sequence[Point], shares: Callable[[str], Fitted]) -> tuple[int, int]:
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


def figure(points: Sequence[Point], shares: Callable[[str], Fitted]) -> Picture:
    """Predicted against published seconds, a mark for each chip, the error bar between lines."""
    picture = Picture(6.5, 6)
    axes = picture.subplots()
    marks = dict(zip(dict.fromkeys(p.chip for p in points), "o^sDvP*X<>", strict=False))
    shades = dict(zip(marks, np.linspace(0.0, 0.75, len(marks)), strict=True))
    for chip, mark in marks.items():
        some = [p for p in points if p.chip == chip]
        predicted = [p.counted.seconds(shares(chip)) for p in some]
        axes.scatter(
            [p.published for p in some], predicted, marker=mark, s=26, label=chip,
            color=(shades[chip] * 0.7, 0.25 + shades[chip] * 0.6, 0.9 - shades[chip] * 0.8),
            edgecolor="black", linewidth=0.4,
        )  # fmt: skip
    ends = np.array([0.3, 250])
    axes.plot(ends, ends, color="black", linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot(ends, factor * ends, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", title="Published runs and their predictions")
    axes.set(xlabel="published, seconds a step", ylabel="predicted, seconds a step")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


# -- the fit ---------------------------------------------------------------------------------------

# Where the search starts, how far a share may go from there at the price of a 15 % error, bounds.
_OF_CHIPS = {name: (FITTED[name].products, 0.1, 0.4, 1.0) for name in CHIPS}
_OF_FAMILIES = {
    "scores tpu": (0.43, 0.1, 0.1, 0.8), "scores ampere": (0.34, 0.1, 0.1, 0.8),
    # cuDNN's kernel, as arXiv 2407.08608 measured it; older ones find their own place.
    "scores hopper": (0.5, 0.02, 0.1, 0.8), "portable hopper": (0.3, 0.1, 0.1, 0.8),
    "shown tpu": (0.95, 0.3, 0.0, 1.0), "shown gpu": (0.71, 0.3, 0.0, 1.0),
    "activations tpu": (0.64, 0.3, 0.0, 1.0), "activations gpu": (0.59, 0.3, 0.0, 1.0),
    "passes": (3.0, 1.0, 0.0, 8.0), "memory": (0.85, 0.05, 0.6, 0.95),
    "slices": (0.02, 0.05, 0.0, 0.1),
}  # fmt: skip
_ALL = {**_OF_CHIPS, **_OF_FAMILIES}


def _shares(values: Sequence[float]) -> Callable[[str], Fitted]:
    found = dict(zip(_ALL, values, strict=True))

    def of(chip: str) -> Fitted:
        name = chip.removesuffix("-40")
        family = FAMILY.get(name, "tpu")
        kind = "tpu" if family == "tpu" else "gpu"
        return Fitted(
            products=found[name],
            scores=found[f"scores {family}"],
            shown=found[f"shown {kind}"],
            activations=found[f"activations {kind}"],
            passes=found["passes"],
            memory=found["memory"],
            slices=found["slices"],
            portable=found["portable hopper"] if family == "hopper" else None,
        )

    return of


def fit(points: Sequence[Point]) -> tuple[Callable[[str], Fitted], dict[str, float]]:
    """The shares by which these points are predicted best; outliers count little."""
    start, wide, low, high = np.array(list(_ALL.values())).T

    def residuals(values: np.ndarray) -> np.ndarray:
        shares = _shares(values)
        errors = [np.log(point.ratio(shares(point.chip))) for point in points]
        return np.concatenate([errors, 0.15 * (values - start) / wide])

    inside = np.clip(start, low + 1e-3, high - 1e-3)
    found = optimize.least_squares(
        residuals, inside, bounds=(low, high), loss="soft_l1", f_scale=0.05
    )
    return _shares(found.x), dict(zip(_ALL, found.x.round(3).tolist(), strict=True))


def left_out(points: Sequence[Point]) -> list[tuple[Point, float]]:
    """Every source's points with their errors, predicted by a fit on the others."""
    found = []
    for source in dict.fromkeys(point.source for point in points):
        shares, _ = fit([point for point in points if point.source != source])
        mine = [point for point in points if point.source == source]
        found += [(point, abs(point.ratio(shares(point.chip)) - 1)) for point in mine]
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table, and what is asked for besides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the shares anew")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the points")
    parser.add_argument("--rows", action="store_true", help="print every run")
    options = parser.parse_args(words)
    say = Console(width=120, highlight=False).out
    jax.config.update("jax_platforms", "cpu")
    points, apart = counted(FILE, say), counted(HELD_OUT, say)
    fitting = [point for point in points if point.fits]
    if options.rows:
        for point in [*points, *apart]:
            ratio = point.ratio(shares_of(point.chip))
            say(f"{point.name:28} {point.published:9.3f} s  {ratio:.2f}")
    say(table(fitting, shares_of))
    pairs, right = in_order(fitting, shares_of)
    say(f"\n{right} of {pairs} pairs of layouts of one model on the same chips in published order")
    say(f"\nKept apart, not fitted on; {within_bars(apart):.0%} lie within their error bars:\n")
    say(table(apart, shares_of))
    if options.png is not None:
        options.png.write_bytes(figure(points, shares_of).png())
    if options.fit:
        _fit_anew(fitting, say)


def _fit_anew(points: Sequence[Point], say: Callable[[str], None]) -> None:
    """Prints the shares of a fit, and the errors of fits that have not seen a source."""
    _, values = fit(points)
    for name, value in values.items():
        say(f"{name}: {value:g}")
    found = left_out(points)
    for kind in ("tpu", "gpu"):
        errors = [error for point, error in found if chips.CHIPS[point.chip].kind == kind]
        say(
            f"\nA source left out, {kind}: median {np.median(errors):.1%}, two of three within "
            f"{np.quantile(errors, 2 / 3):.1%}, nine of ten within {np.quantile(errors, 0.9):.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
