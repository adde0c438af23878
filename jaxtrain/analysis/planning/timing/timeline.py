"""Simulation of a pipeline schedule: timeline, bubble, figure."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from jaxtrain.config.errors import count_of
from jaxtrain.config.files import write_atomically
from jaxtrain.training.pipeline.timetables import Action, Timetable, Work, needs, result

if TYPE_CHECKING:
    from matplotlib.patches import Patch

    from jaxtrain.run.show.figures import Picture


class Span(NamedTuple):
    """An action with its start and end, in the unit of the costs passed to `simulate`."""

    rank: int
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A pipeline schedule with times.

    Attributes:
      schedule: the table.
      spans: all actions, in the order of ticks.
      lockstep: whether every tick lasts as long as its longest action on any rank.
    """

    schedule: Timetable
    spans: tuple[Span, ...]
    lockstep: bool

    @property
    def ticks(self) -> int:
        """Number of rows of the table."""
        return len(self.schedule.ticks)

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(span.end for span in self.spans)

    @property
    def lockstep_makespan(self) -> float:
        """The makespan if every tick lasted as long as its longest action on any rank."""
        longest = [0.0] * self.ticks
        for (tick, _, _), span in zip(self.schedule.actions(), self.spans, strict=True):
            longest[tick] = max(longest[tick], span.end - span.start)
        return sum(longest)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over total time, both summed over all ranks."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.schedule.ranks * self.makespan)

    @property
    def bubble_to_ideal(self) -> float:
        """Idle time over busy time: how much longer than without a bubble (arXiv 2104.04473)."""
        return self.bubble_fraction / (1 - self.bubble_fraction)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the most microbatches whose activations are live at once.

        They are live from FORWARD to the last backward action of that microbatch and stage. One on
        two of a rank's virtual stages counts twice, each for its share of the rank's layers.
        """
        releases = (Work.BACKWARD, Work.BACKWARD_WEIGHT)
        if not self.schedule.has_backward:
            return (1,) * self.schedule.ranks
        live, peak = [0] * self.schedule.ranks, [0] * self.schedule.ranks
        for _, rank, action in self.schedule.actions():
            live[rank] += (action.kind == Work.FORWARD) - (action.kind in releases)
            peak[rank] = max(peak[rank], live[rank])
        return tuple(peak)


def simulate(
    schedule: Timetable,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    stage_costs: Sequence[float] | None = None,
    lockstep: bool = False,
) -> Timeline:
    """Schedule every action as early as its rank and its dependencies allow, in the table's order.

    Messages take no time.

    Args:
      schedule: a valid table.
      forward: cost of a FORWARD, in any unit; the other costs have the same unit.
      backward: cost of a BACKWARD.
      backward_input: cost of a BACKWARD_INPUT.
      backward_weight: cost of a BACKWARD_WEIGHT.
      stage_costs: relative cost of every stage, which multiplies the others; None if all are equal.
      lockstep: every tick lasts as long as its longest action on any rank, and all ranks start the
        next one together: one program with an exchange between neighbors in each tick.
    """
    costs = {
        Work.FORWARD: forward,
        Work.BACKWARD: backward,
        Work.BACKWARD_INPUT: backward_input,
        Work.BACKWARD_WEIGHT: backward_weight,
    }
    scale = (1.0,) * schedule.num_stages if stage_costs is None else tuple(stage_costs)
    assert len(scale) == schedule.num_stages, "a cost for each stage"
    free = [0.0] * schedule.ranks
    ends: dict[Action, float] = {}
    spans = []
    for row in schedule.ticks:
        for rank, action in enumerate(row):
            if action is None:
                continue
            arrived = (ends[need] for need in needs(action, schedule.num_stages))
            start = max(free[rank], *arrived, 0.0)
            end = start + costs[action.kind] * scale[action.stage]
            spans.append(Span(rank, action, start, end))
            ends[result(action)] = free[rank] = end
        if lockstep:
            free = [max(free)] * schedule.ranks
    return Timeline(schedule, tuple(spans), lockstep)


# -- closed forms: p ranks, m microbatches, v virtual stages ---------------------------------------


def closed_form_ticks(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> int:
    """Return the ticks of a schedule in which every action takes one: a rank's work and idle ticks.

    GPipe and 1F1B 2(m + p - 1); interleaved 2(vm + p - 1) (arXiv 2104.04473, section 2.2); zero
    bubble 3m + p - 1 (ZB-H1, arXiv 2401.10241, table 1 with T_F = T_B = T_W) if m >= 2p - 1; with
    fewer, weight gradients fill 2p - 1 - m fewer idle ticks, and none if m <= p. 'forward'
    vm + p - 1, if v > 1 for multiples of p. 'dualpipe_v', whose actions are of half a stage:
    6m + 2p - 2 + max(floor(p / 2) - 1, 0) if 2m >= 3p: DualPipe's (p - 1)(F&B + B - 3W), in ticks
    (arXiv 2412.19437, table 2, for 2p stages), and a few for weight gradients that would otherwise
    be delayed for longer than memory allows.
    """
    p, m = ranks, microbatches
    if name == "dualpipe_v":
        more = max(min(m - p, p // 2) - 1, 0)
        weights = 1 + (2 * m > p) if m <= p else 2 * (m - p + 1) + more
        return 4 * (m + p - 1) + weights
    if name == "zero_bubble":
        return 3 * m + p - 1 + min(max(2 * p - 1 - m, 0), p - 1)
    rounds = 1 if name == "forward" else 2
    return rounds * (virtual_stages * m + p - 1)


def closed_form_bubble(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> float:
    """Return the bubble as a fraction of total time, every action one tick.

    GPipe and 1F1B (p - 1) / (m + p - 1); interleaved (p - 1) / (vm + p - 1), relative to the ideal
    time (p - 1) / (vm); zero bubble (p - 1) / (3m + p - 1) for m >= 2p - 1, and 'dualpipe_v' about
    the same: the ticks beyond 6m over all ticks. The first three do not depend on the costs of
    forward and backward if all stages are equal.
    """
    ticks = closed_form_ticks(name, ranks, microbatches, virtual_stages)
    per_stage = {"zero_bubble": 3, "dualpipe_v": 3, "forward": 1}.get(name, 2)
    return 1 - per_stage * virtual_stages * microbatches / ticks


def closed_form_peak(
    name: str, ranks: int, microbatches: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """Return, per rank, the most live microbatches, as counted by `Timeline.peak_live`.

    GPipe vm; interleaved 2(p - rank - 1) + (v - 1)p + 1 (arXiv 2104.04473). 1F1B is the same with
    one virtual stage, or with one for each round trip of the microbatches: in lockstep, the path to
    the last rank and back takes a forward and a backward per stage (without lockstep half of it,
    p - rank). Zero bubble 2p - 1 on every rank (ZB-H2's, arXiv 2401.10241, table 1); 'dualpipe_v'
    2p, and one more on the last (PP + 1 of 2p stages: arXiv 2412.19437, table 2), each of half a
    stage, after m + 1 + rank of m microbatches. It never exceeds the number of microbatches.
    """
    p, m, v = ranks, microbatches, virtual_stages
    peaks = {
        "forward": lambda rank: 1,
        "gpipe": lambda rank: m * v,
        "1f1b": lambda rank: 2 * (p - rank - 1) + (v - 1) * p + 1,
        "zero_bubble": lambda rank: 2 * p - 1,
        "dualpipe_v": lambda rank: min(2 * p + (rank == p - 1), m + 1 + rank),
    }
    peaks["interleaved"] = peaks["1f1b"]
    return tuple(min(peaks[name](rank), m * v) for rank in range(p))


def table(timeline: Timeline) -> Table:
    """Return the figures of a timeline next to the closed forms."""
    schedule = timeline.schedule
    sizes = (schedule.name, schedule.ranks, schedule.microbatches, schedule.virtual_stages)
    # Closed forms count ticks: the same table, every action one tick long.
    unit = simulate(schedule, backward=1.0, lockstep=True)
    bubble = closed_form_bubble(*sizes)
    found = Table(title=_title(timeline), title_justify="left")
    for column in ("figure", "simulated", "closed form"):
        found.add_column(column, justify="left" if column == "figure" else "right")
    rows = [
        ("ticks", f"{timeline.ticks}", f"{closed_form_ticks(*sizes)}"),
        ("bubble, in ticks", f"{unit.bubble_fraction:.1%}", f"{bubble:.1%}"),
        (
            "bubble to ideal, in ticks",
            f"{unit.bubble_to_ideal:.1%}",
            f"{bubble / (1 - bubble):.1%}",
        ),
        ("peak live microbatches", _ranks(timeline.peak_live), _ranks(closed_form_peak(*sizes))),
        ("makespan", f"{timeline.makespan:.4g}", ""),
        ("bubble, in time", f"{timeline.bubble_fraction:.1%}", ""),
        ("makespan in lockstep", f"{timeline.lockstep_makespan:.4g}", ""),
    ]
    for row in rows:
        found.add_row(*row)
    return found


def _ranks(values: Sequence[int]) -> str:
    """Format one value if all ranks have the same, else all values."""
    return f"{values[0]}" if len(set(values)) == 1 else ", ".join(map(str, values))


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    virtual = f" x {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    return (
        f"{schedule.name}: {count_of(schedule.ranks, 'rank')}{virtual}, "
        f"{count_of(schedule.microbatches, 'microbatch')}"
        f"{', in lockstep' if timeline.lockstep else ''}"
    )


# -- the picture ----------------------------------------------------------------------------------


class _Look(NamedTuple):
    word: str
    first: str
    last: str
    ink: str
    hatch: str


# Colors of a rank's first and last chunk: one hue for each kind of work, one lightness for each
# chunk. In grayscale, forward is light, backward is dark, and weight gradients are striped.
_LOOKS = {
    Work.FORWARD: _Look("forward", "#d6e8fa", "#7db3e8", "black", ""),
    Work.BACKWARD: _Look("backward", "#3f8f6b", "#123d2a", "white", ""),
    Work.BACKWARD_INPUT: _Look("input gradient", "#3f8f6b", "#123d2a", "white", ""),
    Work.BACKWARD_WEIGHT: _Look("weight gradient", "#f9ecc4", "#e0b94a", "black", "///"),
}
_MAX_WIDTH_INCHES = 40.0
_MARGIN_INCHES = 0.8
_POINTS_PER_INCH = 72
# Smaller digits are illegible at 120 dots per inch.
_SMALLEST_FONT = 3.0


def timeline_figure(timeline: Timeline) -> "Picture":
    """Plot the usual schedule diagram: a row per rank, a box per action with its microbatch number.

    A rank's virtual stages differ by shade. If boxes are too narrow for digits, none are drawn and
    the title says so.
    """
    from jaxtrain.run.show.figures import Picture

    schedule = timeline.schedule
    boxes = timeline.makespan / min(span.end - span.start for span in timeline.spans)
    width = min(max(6.0, _MARGIN_INCHES + 0.15 * boxes), _MAX_WIDTH_INCHES)
    figure = Picture(width, 1.3 + 0.4 * schedule.ranks)
    axes = figure.add_subplot()
    # A digit is about 0.6 times the font size wide.
    room = (width - _MARGIN_INCHES) / boxes * _POINTS_PER_INCH
    size = min(8.0, room / (0.6 * len(str(schedule.microbatches - 1)) + 0.4))
    numbered = size >= _SMALLEST_FONT
    rows = collections.defaultdict(list)
    for span in timeline.spans:
        look = _LOOKS[span.action.kind]
        chunk = span.action.stage // schedule.ranks
        shade = _shade(look, chunk, schedule.virtual_stages)
        rows[span.rank, span.action.kind, chunk].append((span.start, span.end - span.start))
        if numbered:
            axes.text(
                (span.start + span.end) / 2, span.rank, str(span.action.microbatch),
                ha="center", va="center_baseline", fontsize=size, color=look.ink,
                bbox={"facecolor": shade, "linewidth": 0, "pad": 0.6} if look.hatch else None,
            )  # fmt: skip
    for (rank, kind, chunk), ranges in rows.items():
        color = _shade(_LOOKS[kind], chunk, schedule.virtual_stages)
        axes.broken_barh(
            ranges, (rank - 0.45, 0.9),
            facecolor=color, edgecolor="0.45", linewidth=0.4, hatch=_LOOKS[kind].hatch,
        )  # fmt: skip
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.ranks - 0.45, -0.55)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("time (arbitrary unit)")
    axes.set_title(
        f"{_title(timeline)}{'' if numbered else ' (too many to number)'}\n"
        f"bubble {timeline.bubble_fraction:.1%}, peak live microbatches "
        f"{_ranks(timeline.peak_live)}",
        fontsize=9, loc="left",
    )  # fmt: skip
    figure.legend(
        handles=list(_legend(schedule)),
        loc="outside lower left",
        ncols=4,
        frameon=False,
        fontsize=7,
    )
    return figure


def draw(timeline: Timeline, path: str | Path) -> None:
    """Write `timeline_figure` to a PNG file in an existing folder."""
    write_atomically(Path(path), timeline_figure(timeline).png())


def _shade(look: _Look, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the color of a rank's chunk, interpolated between those of the first and the last."""
    from matplotlib.colors import to_rgb

    share = chunk / max(chunks - 1, 1)
    ends = zip(to_rgb(look.first), to_rgb(look.last), strict=True)
    red, green, blue = ((1 - share) * first + share * last for first, last in ends)
    return red, green, blue


def _legend(schedule: Timetable) -> Iterator["Patch"]:
    from matplotlib.patches import Patch

    used = {(action.kind, action.stage // schedule.ranks) for _, _, action in schedule.actions()}
    for kind, chunk in sorted(used):
        look = _LOOKS[kind]
        yield Patch(
            facecolor=_shade(look, chunk, schedule.virtual_stages), edgecolor="0.45",
            hatch=look.hatch,
            label=f"{look.word}, chunk {chunk}" if schedule.virtual_stages > 1 else look.word,
        )  # fmt: skip
