"""`plan`: memory, traffic and time of a configuration's train step on a target machine."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from jaxtrain.analysis.planning.advice import fixes_for
from jaxtrain.analysis.planning.calibrate import by_measured, by_run
from jaxtrain.analysis.planning.compiled.audit import Row, audit
from jaxtrain.analysis.planning.compiled.compiled import compile_step, target_layout
from jaxtrain.analysis.planning.compiled.placement import paddings
from jaxtrain.analysis.planning.goodput.goodput import Reliability
from jaxtrain.analysis.planning.machines.links import names_of
from jaxtrain.analysis.planning.machines.targets import Target, parse_target, with_memory
from jaxtrain.analysis.planning.result import Plan, collectives_of
from jaxtrain.analysis.planning.search.candidates import (
    COMPILED,
    Candidate,
    Found,
    assign_ranks,
    with_reasons,
)
from jaxtrain.analysis.planning.search.search import search as search_layouts
from jaxtrain.analysis.planning.search.variants import rejection_reason, slices_of
from jaxtrain.analysis.planning.textbook.facts import Expected
from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.analysis.planning.textbook.traffic import expect_traffic
from jaxtrain.analysis.planning.timing.timing import slow_axes, step_time
from jaxtrain.analysis.planning.whole_run import validate_amounts
from jaxtrain.config.errors import NoCompilerError, UserError
from jaxtrain.training import layouts
from jaxtrain.training.settings import Config

# Effort of the target's compiler; "none" uses only closed forms.
Effort = Literal["none", "quick", "thorough"]
# Called with a description of the next task. The context manager covers its duration and yields a
# function that replaces the description.
Progress = Callable[[str], contextlib.AbstractContextManager[Callable[[str], None]]]


def silent(words: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
    """Show no progress."""
    del words
    return contextlib.nullcontext(lambda words: None)


def plan(
    config: Config,
    target: str,
    *,
    compile: bool = True,  # noqa: A002 - what the option is called
    thorough: bool = False,
    search: bool = False,
    price: float | None = None,
    tokens: float | None = None,
    network: float | None = None,
    disk: float | None = None,
    goodput: bool = False,
    mtbf: float | None = None,
    storage: float | None = None,
    measured: float | None = None,
    calibrate: str | Path | None = None,
    allow_imports: bool = False,
    advise: bool = True,
    progress: Progress = silent,
) -> Plan:
    """Predict memory, traffic and time of a configuration's train step on an absent machine.

    Args:
      config: from `load_config`.
      target: "v5p:4x4x4", "h100:2x8", "cpu:8"; with `Mesh.dcn`, one of the slices.
      compile: whether to run the target's compiler; otherwise, or if it is not installed,
        everything is a closed-form estimate.
      thorough: whether a TPU's compiler uses the full effort of a run, which takes about ten times
        as long as for a plan.
      search: whether to search for the best mesh, ZeRO stage, remat policy, accumulation and
        schedule for this target and global batch; the plan is then that of the best. Ctrl-C ends
        the search early: the plan is then the best so far, and its `found.interrupted` is True.
      price: dollars per device-hour, for the cost of the whole run.
      tokens: tokens of the whole run, instead of those of Train.steps (images or vectors for such
        models).
      network: Gb/s of each device between hosts or slices; None: as the chip's vendor builds it.
      disk: GB/s of its host's disks for each device, for state on disk; None: 5.
      goodput: whether to show the whole run under failures. The plan always has `goodput` with
        `mtbf` and from 64 devices on.
      mtbf: device-hours per interruption of the job; None: Checkpoint.mtbf, else
        the median of the published rates.
      storage: GB/s at which each host reads or writes checkpoints; None: 1.
      measured: measured seconds of a step of this configuration on the target: its times are
        multiplied by the ratio to the closed-form prediction, those of other layouts by less of it
        (`machines.calibration`).
      calibrate: the workdir of a run on the target's chips, whose median step is used instead; its
        layout, model and number of chips may differ.
      allow_imports: whether that run's configuration may import modules.
      advise: whether to look for changes that make a plan fit, if it does not.
      progress: called with a description of the next task, for its duration.

    Raises:
      UserError: the target is unknown, its compiler is missing although `thorough` is set, the
        configuration cannot run, or a number is not finite and above 0.
    """
    validate_amounts(price, tokens)
    is_requested = goodput or mtbf is not None
    given = config.checkpoint.mtbf if mtbf is None else mtbf
    reliability = Reliability(is_requested=is_requested, mtbf=given, storage=storage)
    machine = parse_target(target, network=network, disk=disk)
    machine = with_memory(machine, config.train.gpu_memory_fraction)
    if thorough and not compile:
        raise UserError("--thorough with --no-compile: closed forms compile nothing; leave one out")
    if measured is not None and calibrate is not None:
        raise UserError("--measured and --calibrate are both measurements; use one of them")
    if measured is not None:
        machine = by_measured(config, machine, measured)
    if calibrate is not None:
        machine = by_run(calibrate, machine, allow_imports=allow_imports)
    effort: Effort = "none" if not compile else "thorough" if thorough else "quick"
    if search:
        with progress("listing layouts") as report:
            found = search_layouts(config, machine, report)
        if found.interrupted:
            effort = "none"
        made = _best_compiled(found, machine, effort, progress=progress)
    else:
        made = _plan(config, machine, effort, progress=progress, advise=advise)
    return dataclasses.replace(made, price=price, tokens=tokens, reliability=reliability)


def _best_compiled(found: Found, machine: Target, effort: Effort, *, progress: Progress) -> Plan:
    """Return the plan of the best candidate, from the compiled ones if any.

    Candidates are compiled until `COMPILED` of them fit, or twice as many with at least one that
    does, or four times as many. They are then ranked by their own traffic. A program that fits only
    because its compiler rematerializes does not count: with slightly less memory the next one may
    be faster. If none fits, the first of the others is returned as an estimate. Ctrl-C ends the
    loop with those compiled so far.
    """
    plans: list[tuple[Candidate, Plan]] = []
    rest = list(found.candidates)
    while rest and sum(made.fits and not made.repeated for _, made in plans) < COMPILED:
        one_fits = any(made.fits for _, made in plans)
        if len(plans) >= (2 if one_fits else 4) * COMPILED:
            break
        one = rest[0]
        try:
            made = _plan(one.config, machine, effort, progress=progress, advise=False)
        except KeyboardInterrupt:
            found, effort = dataclasses.replace(found, interrupted=True), "none"
            if plans:
                break
            made = _plan(one.config, machine, effort, progress=progress, advise=False)
        del rest[0]
        if made.compiled is None:  # keep the order of the closed forms
            made = _plan(one.config, machine, effort, progress=progress)
            return dataclasses.replace(made, found=found)
        done = dataclasses.replace(one, compiled_bytes=made.total, fits=made.fits)
        plans.append(
            (dataclasses.replace(done, price=dataclasses.replace(one.price, time=made.time)), made)
        )
    plans.sort(key=lambda pair: (not pair[1].fits, pair[1].time.seconds or 0.0))
    fitting = [one for one, made in plans if made.fits]
    large = [one for one, made in plans if not made.fits]
    # Compiled candidates come first: the others have only an estimate.
    order = assign_ranks([*fitting, *rest, *large])
    candidates = with_reasons(order, machine)
    first = (
        plans[0][1]
        if fitting or not rest
        else _plan(rest[0].config, machine, "none", progress=progress)
    )
    return dataclasses.replace(first, found=dataclasses.replace(found, candidates=candidates))


def _plan(
    config: Config,
    machine: Target,
    effort: Effort,
    *,
    progress: Progress,
    advise: bool = True,
) -> Plan:
    slices = slices_of(config, machine)
    count = machine.devices * slices
    _check(config, count, machine)
    abstract = layouts.abstract_layout(config, count)
    with progress("closed forms"):
        estimate = memory(config, abstract, machine.chip.kind)
        textbook = expect_traffic(config, abstract)
    compiled, no_compiler, layout = None, None, abstract
    if effort != "none":
        try:
            with progress(f"compiling the train step for {machine.name}"):
                layout = target_layout(config, machine)
                compiled = compile_step(config, layout, machine, thorough=effort == "thorough")
        except NoCompilerError as error:
            if effort == "thorough":
                raise
            no_compiler = str(error)
    moved = collectives_of(config, layout, compiled) if compiled and compiled.text else None
    beyond = slow_axes(config, layout, machine)
    if moved is None:
        rows = [_textbook_row(one, beyond) for one in textbook]
    else:
        # Between slices a TPU's compiler sends through the hosts, without a collective.
        sent = [one for one in textbook if slices > 1 and beyond & set(names_of(one.axis))]
        seen = [one for one in textbook if one not in sent]
        widens = machine.chip.kind == "cpu" and config.precision.compute == "bfloat16"
        rows = audit(moved, seen, dict(layout.mesh.shape), dcn=beyond, widens=widens)
        rows += [_textbook_row(one, beyond, " (through the hosts)") for one in sent]
        moved += sent
    rows.sort(key=lambda row: -row.bytes)
    time = step_time(
        config,
        layout,
        machine,
        textbook if machine.calibration is not None else moved or textbook,
        update_bytes=estimate.update_bytes,
        to_host=estimate.to_host,
        on_disk=estimate.arguments.disk,
        text=compiled.text if compiled else "",
        thorough=effort == "thorough",
    )
    result = Plan(
        config, machine, layout, estimate, compiled, textbook, rows, time, [],
        no_compiler=no_compiler,
    )  # fmt: skip
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
    """Validate as for a run, except the data; propose padding for sizes that do not divide."""
    message = rejection_reason(config, machine)
    if message is None:
        return
    try:
        padded = paddings(config, layouts.abstract_layout(config, count))
    except UserError:
        padded = []  # the mesh does not exist
    pasted = " ".join(f'-b "{one.binding}"' for one in padded)
    more = f"\nWith this padding the sizes divide: {pasted}" if padded else ""
    raise UserError(f"{message}{more}")
