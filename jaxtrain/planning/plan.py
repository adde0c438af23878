"""`plan`: what a configuration's train step needs on machines that are not there."""

import contextlib
import dataclasses
import functools
import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxtrain import preflight
from jaxtrain.errors import UserError
from jaxtrain.kernels import Choice
from jaxtrain.planning import picture, tables
from jaxtrain.planning.advice import Fix, fixes_for, remarks
from jaxtrain.planning.audit import Row, audit
from jaxtrain.planning.collectives import collectives, summarize
from jaxtrain.planning.compiled import Compiled, compile_step, planned_layout
from jaxtrain.planning.liveness import Buffer, fullest
from jaxtrain.planning.memory import Memory, memory
from jaxtrain.planning.placement import paddings
from jaxtrain.planning.search import COMPILED, Candidate, Found, with_reasons
from jaxtrain.planning.search import search as search_layouts
from jaxtrain.planning.targets import Target, parse_target
from jaxtrain.planning.timing import StepTime, names_of, slow_axes, step_time
from jaxtrain.planning.traffic import Expected, branch_counts, expected
from jaxtrain.planning.variants import slices_of
from jaxtrain.program import resolve_kernel
from jaxtrain.settings import Config
from jaxtrain.sharding import Layout

Progress = Callable[[str], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer of `jaxtrain plan`; bytes are of one device, traffic and time of one step.

    Attributes:
      config: the configuration.
      target: the machine.
      layout: on its devices, or abstract where nothing was compiled.
      estimate: memory by closed forms.
      compiled: what the compiler made of the step; None for an estimate.
      expected: the textbook's collectives.
      rows: the compiled program's, each with its reason; of an estimate the textbook's.
      time: the prediction.
      fixes: where it does not fit, what makes it fit, the cheapest first.
      found: what a search found; its best is `config`.
    """

    config: Config
    target: Target
    layout: Layout
    estimate: Memory
    compiled: Compiled | None
    expected: list[Expected]
    rows: list[Row]
    time: StepTime
    fixes: list[Fix]
    found: Found | None = None

    @property
    def attention(self) -> Choice | None:
        """The attention kernel on the target, and why; None for a model without attention."""
        return resolve_kernel(self.config, self.target.chip.kind)

    # -- memory ----------------------------------------------------------------------------------

    @property
    def arguments(self) -> int:
        """State and batch."""
        if self.compiled is not None:
            return self.compiled.argument_bytes
        return self.estimate.arguments.total

    @property
    def temporaries(self) -> int:
        """What the step takes beside them, as the compiler reports it, else as estimated."""
        if self.compiled is None or self.compiled.temp_bytes is None:
            return self.estimate.temporaries
        return self.compiled.temp_bytes

    @property
    def total(self) -> int:
        """All memory of the step."""
        return (
            self.arguments
            + self.temporaries
            + (self.compiled.unaliased_bytes if self.compiled else 0)
        )

    @property
    def fits(self) -> bool:
        """Whether the step runs in the memory of a device."""
        if self.compiled is not None and self.compiled.refusal is not None:
            return False
        return self.target.chip.hbm_bytes is None or self.total <= self.target.chip.hbm_bytes

    @functools.cached_property
    def buffers(self) -> list[Buffer]:
        """The arrays alive at the program's fullest moment, largest first; [] for an estimate."""
        return fullest(self.compiled.text) if self.compiled and self.compiled.text else []

    @property
    def devices(self) -> int:
        """Devices of all slices."""
        return self.layout.mesh.size

    @functools.cached_property
    def advice(self) -> list[str]:
        """Sentences: how to make it fit, what was flagged, what is left unused."""
        warnings = self.compiled.warnings if self.compiled else ()
        return [fix.sentence for fix in self.fixes] + remarks(
            self.config, self.target, self.layout, self.rows, warnings
        )

    # -- what people look at ---------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The object that `plan --json` writes."""
        gradients = min(self.estimate.gradients, self.temporaries)
        compiled, time = self.compiled, self.time
        found: dict[str, Any] = {
            "target": self.target.name,
            "devices": self.devices,
            "attention": None if self.attention is None else dataclasses.asdict(self.attention),
            "mesh": {axis: size for axis, size in self.layout.mesh.shape.items()},
            "fits": self.fits,
            "hbm_bytes": self.target.chip.hbm_bytes,
            "estimate": compiled is None,
            "memory": {
                "params": self.estimate.arguments.params,
                "optimizer": self.estimate.arguments.optimizer,
                "gradients": gradients,
                "activations": self.temporaries - gradients,
                "total": self.total,
                "arguments": self.arguments,
                "temporaries": self.temporaries,
                "live": compiled.live_bytes if compiled else None,
                "host": compiled.host_bytes if compiled else None,
                "closed_form": {
                    "arguments": self.estimate.arguments.total,
                    "gradients": self.estimate.gradients,
                    **self.estimate.parts,
                },
            },
            "collectives": self._summary(),
            "traffic": [dataclasses.asdict(row) for row in self.rows],
            "flops_per_device": time.flops_per_device,
            "step_seconds": time.seconds,
            "mfu": time.mfu,
            "time": {
                "compute": time.compute,
                "exposed_communication": time.exposed,
                "bubble": time.bubble,
                "hidden_communication": time.hidden,
                "assumptions": list(time.assumptions),
            },
            "compile_seconds": compiled.seconds if compiled else None,
            "cached": compiled.cached if compiled else None,
            "advice": self.advice,
        }
        if self.found is not None:
            found |= self.found.to_json()
        return found

    def _summary(self) -> list[dict[str, Any]]:
        if self.compiled and self.compiled.text:
            return summarize(_collectives(self.config, self.layout, self.compiled))
        together: dict[tuple[str, str], list[int]] = {}
        for one in self.expected:
            counted = together.setdefault((one.kind, one.axis), [0, 0])
            counted[0] += one.count
            counted[1] += one.count * one.bytes
        return [
            {"kind": kind, "axis": axis, "count": count, "bytes": size}
            for (kind, axis), (count, size) in sorted(together.items())
        ]

    def table(self) -> str:
        """The tables of the terminal, as text."""
        console = Console(width=110, no_color=True, force_terminal=False)
        with console.capture() as captured:
            tables.show(console, self)
        return captured.get()

    def plot(self, path: str | Path | None = None) -> Any:
        """Memory against capacity, time and traffic as a matplotlib figure; saved if told where."""
        figure = picture.plan_figure(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table(), quote=False)}</pre>"

    def __repr__(self) -> str:
        # Not the fields: a notebook keeps this text, and the compiled program has megabytes.
        fits = "fits" if self.fits else "does not fit"
        return f"Plan({self.target.name}, {self.total:,} bytes a device, {fits})"


def plan(
    config: Config,
    target: str,
    *,
    compile: bool = True,  # noqa: A002 - what the option is called
    search: bool = False,
    progress: Progress = lambda words: contextlib.nullcontext(),
) -> Plan:
    """What the train step of a configuration needs on a machine that need not be there.

    Args:
      config: from `load_config`.
      target: "v5p:4x4x4", "h100:2x8", "cpu:8"; with `Mesh.dcn`, one of the slices.
      compile: whether to run the target's compiler; otherwise everything is a closed-form estimate.
      search: whether to look for the best mesh, ZeRO stage, remat policy, accumulation and schedule
        for this target and global batch; the plan is then the winner's.
      progress: called with what is going to be done, for the time that takes.

    Raises:
      UserError: the target is unknown, its compiler is missing, or the configuration cannot run.
    """
    machine = parse_target(target)
    found = None
    if search:
        with progress("pricing layouts by closed forms"):
            found = search_layouts(config, machine)
        return _best_compiled(found, machine, compile=compile, progress=progress)
    return _plan(config, machine, compile=compile, progress=progress)


def _best_compiled(found: Found, machine: Target, *, compile: bool, progress: Progress) -> Plan:  # noqa: A002
    """The plan of the best candidate, which with `compile` is the best of those that compile.

    As many are compiled as it takes until `COMPILED` of them fit; their own traffic then ranks
    them.
    """
    if not compile:
        best = _plan(found.candidates[0].config, machine, compile=False, progress=progress)
        return dataclasses.replace(best, found=found)
    plans: list[tuple[Candidate, Plan]] = []
    rest = list(found.candidates)
    while rest and sum(made.fits for _, made in plans) < COMPILED and len(plans) < 2 * COMPILED:
        one = rest.pop(0)
        made = _plan(one.config, machine, compile=True, progress=progress, advise=False)
        done = dataclasses.replace(one, compiled_bytes=made.total, fits=made.fits)
        plans.append(
            (dataclasses.replace(done, price=dataclasses.replace(one.price, time=made.time)), made)
        )
    plans.sort(key=lambda pair: (not pair[1].fits, pair[1].time.seconds or 0.0))
    fitting = [one for one, made in plans if made.fits]
    large = [one for one, made in plans if not made.fits]
    ranked = with_reasons([*fitting, *rest, *large], machine)
    return dataclasses.replace(plans[0][1], found=dataclasses.replace(found, candidates=ranked))


def _plan(
    config: Config,
    machine: Target,
    *,
    compile: bool,  # noqa: A002
    progress: Progress,
    advise: bool = True,
) -> Plan:
    slices = slices_of(config, machine)
    count = machine.devices * slices
    _check(config, count, machine)
    abstract = preflight.abstract_layout(config, count)
    with progress("closed forms"):
        estimate = memory(config, abstract, machine.chip.kind)
        textbook = expected(config, abstract)
    compiled = None
    layout = abstract
    if compile:
        with progress(f"compiling the train step for {machine.name}"):
            layout = planned_layout(config, machine)
            compiled = compile_step(config, layout, machine)
    moved = _collectives(config, layout, compiled) if compiled and compiled.text else None
    beyond = slow_axes(config, layout, machine)
    if moved is None:
        rows = [_textbook_row(one, beyond) for one in textbook]
    else:
        # Between slices a TPU's compiler sends through the hosts, which is no collective.
        sent = [one for one in textbook if slices > 1 and beyond & set(names_of(one.axis))]
        seen = [one for one in textbook if one not in sent]
        rows = audit(moved, seen, dict(layout.mesh.shape), dcn=beyond)
        rows += [_textbook_row(one, beyond, " (through the hosts)") for one in sent]
        moved += sent
    rows.sort(key=lambda row: -row.bytes)
    update = estimate.arguments.params + estimate.arguments.optimizer + estimate.gradients
    time = step_time(config, layout, machine, moved or textbook, update_bytes=update)
    result = Plan(config, machine, layout, estimate, compiled, textbook, rows, time, [])
    if advise and not result.fits:
        with progress("fixes"):
            over = result.total - (machine.chip.hbm_bytes or 0)
            return dataclasses.replace(result, fixes=fixes_for(config, machine, over=max(over, 1)))
    return result


def _textbook_row(one: Expected, beyond: set[str], how: str = "") -> Row:
    link = "dcn" if beyond & set(names_of(one.axis)) else "ici"
    size = one.total_bytes
    return Row(one.kind, one.axis, one.count, size, one.cause + how, link, size, True)


def _check(config: Config, count: int, machine: Target) -> None:
    """As a run would be checked, but for the data; sizes that do not divide get their padding."""
    try:
        preflight.check(config, device_count=count, platform=machine.chip.kind, reads_data=False)
    except UserError as error:
        try:
            padded = paddings(config, preflight.abstract_layout(config, count))
        except UserError:
            padded = []  # there is no such mesh at all
        pasted = " ".join(f'-b "{one.binding}"' for one in padded)
        more = f"\nPadded so, the sizes divide: {pasted}" if padded else ""
        raise UserError(f"{error}{more}") from error


def _collectives(config: Config, layout: Layout, compiled: Compiled) -> list[Any]:
    return collectives(compiled.text, dict(layout.mesh.shape), branch_counts(config, layout))
