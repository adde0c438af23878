"""The commands `plan`, `verify`, `timeline` and `doctor`, one function each."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from jaxtrain.analysis import doctor
from jaxtrain.analysis.planning import side_by_side
from jaxtrain.analysis.planning.machines.targets import Target, parse_target
from jaxtrain.analysis.planning.plan import plan as make_plan
from jaxtrain.analysis.planning.result import Plan
from jaxtrain.analysis.planning.search.budget import Budget, plan_budget, plan_on_target, sentences
from jaxtrain.analysis.planning.search.budget import show as show_budget
from jaxtrain.analysis.planning.show import show as show_plan
from jaxtrain.analysis.planning.timing.executed import stack_costs
from jaxtrain.analysis.planning.timing.timeline import draw, simulate, table
from jaxtrain.analysis.reports import plan_page, plans_page, verify_page
from jaxtrain.analysis.verify import verify as verification
from jaxtrain.analysis.verify.verify import show_end, showing
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import writable, write_atomically
from jaxtrain.config.swept import Combination, combinations
from jaxtrain.models.model import has_stages, passes_of
from jaxtrain.parallel.devices import offer_cpu_devices
from jaxtrain.run.attempts import DONE, FAILED, USER_ERROR
from jaxtrain.run.commands.options import parse_hosts
from jaxtrain.run.show.progress import print_lines, terminal
from jaxtrain.training.pipeline.schedules import deal
from jaxtrain.training.preflight.elastic import elastic_layouts
from jaxtrain.training.settings import load_config
from jaxtrain.training.setup import parameter_shapes


def verify(arguments: argparse.Namespace) -> int:
    """Verify a shrunk configuration on simulated devices."""
    name, file = arguments.config, writable("--json", arguments.json)
    page = writable("--html", arguments.html)
    config = load_config(name, arguments.gin_bindings, allow_imports=arguments.allow_imports)
    verification.simulate()
    console = terminal()
    print_lines(console, *config.notes)
    with showing(console) as show:
        found = verification.verify(config, on_small=show.small, on_proof=show.proof)
    show_end(console, found)
    if file is not None:
        write_atomically(file, json.dumps({"config": name, **found.to_json()}, indent=2).encode())
    if page is not None:
        _write_page(console, page, verify_page(found, config, name, arguments.words))
    return DONE if found.passed else FAILED


def plan(arguments: argparse.Namespace) -> int:
    """Plan a run for a target machine, which need not be available, or for a budget of FLOPs."""
    console = terminal()
    picture, file = writable("--png", arguments.png), writable("--json", arguments.json)
    page = writable("--html", arguments.html)
    given = {"network": arguments.network, "disk": arguments.disk}
    targets = [parse_target(name, **given) for name in arguments.target]
    if arguments.budget is not None:
        budget = plan_budget(arguments.budget)
        others = {"CONFIG": arguments.config, "-b": arguments.gin_bindings, "--json": file}
        others |= {
            "--png": picture,
            "--html": page,
            "--search": arguments.search,
            "--tokens": arguments.tokens,
        }
        others |= {"a second --target": len(targets) > 1, "--disk": arguments.disk}
        others |= {"--goodput": arguments.goodput, "--mtbf": arguments.mtbf}
        others |= {"--storage": arguments.storage, "--hosts": arguments.hosts}
        others |= {"--measured": arguments.measured, "--calibrate": arguments.calibrate}
        if not targets:
            others |= {"--price": arguments.price, "--network": arguments.network}
        if ignored := [name for name, value in others.items() if value]:
            raise UserError(
                f"plan --budget accepts only --target; leave out {' and '.join(ignored)}"
            )
        show_budget(console, budget)
        _on_target(console, budget, targets, arguments.price)
        return DONE
    if arguments.config is None or not targets:
        missing = "CONFIG" if arguments.config is None else "--target"
        raise UserError(
            f"plan: {missing} is missing; write for example 'jaxtrain plan llama_8b --target "
            "v5p:4x4x4', or 'jaxtrain plan --budget 1e21'"
        )
    # The target's compiler needs no accelerator of this machine.
    jax.config.update("jax_platforms", "cpu")
    if simulated := [target.devices for target in targets if target.chip.kind == "cpu"]:
        offer_cpu_devices(max(simulated))
        jax.devices()  # smaller targets use a subset of these devices
    layouts = combinations(arguments.gin_bindings)
    if arguments.measured is not None and len(targets) * len(layouts) > 1:
        raise UserError(
            "--measured is a step of one layout on one target; with several, use --calibrate RUN"
        )
    if arguments.hosts is not None or len(targets) * len(layouts) > 1:
        pairs = list(itertools.product(targets, layouts))
        if arguments.hosts is not None:
            pairs = _elastic_pairs(arguments, pairs)
        entries = _side_by_side(arguments, console, pairs)
        side_by_side.show(console, entries)
        if all(entry.plan is None for entry in entries):
            return USER_ERROR
        report: dict[str, Any] = {"plans": [one.to_json() for one in entries]}
        draw_all = functools.partial(side_by_side.figure, entries)
        pages = functools.partial(plans_page, entries)
    else:
        found = _plan(arguments, console, targets[0], layouts[0])
        show_plan(console, found)
        entries = [side_by_side.Entry(targets[0].name, layouts[0].values, found)]
        report, draw_all, pages = found.to_json(), found.plot, functools.partial(plan_page, found)
    if picture is not None:
        write_atomically(picture, draw_all().png())
        console.print(f"Drawn: {picture}", soft_wrap=True, markup=False)
    if file is not None:
        write_atomically(file, json.dumps(report, indent=2).encode())
    if page is not None:
        _write_page(console, page, pages(arguments.config, arguments.words))
    return _status(entries)


def _status(entries: Sequence[side_by_side.Entry]) -> int:
    """Return FAILED if a search was interrupted, with a message."""
    if not any(_is_interrupted(entry.plan) for entry in entries):
        return DONE
    print("jaxtrain: interrupted by Ctrl-C; the best so far is shown", file=sys.stderr)  # noqa: T201
    return FAILED


def _is_interrupted(made: Plan | None) -> bool:
    return made is not None and made.found is not None and made.found.interrupted


def _write_page(console: Console, file: Path, content: bytes) -> None:
    write_atomically(file, content)
    print_lines(console, f"Written: {file}")


def _on_target(
    console: Console, budget: Budget, targets: Sequence[Target], price: float | None
) -> None:
    """Print how long a budget takes on each target whose speed is known."""
    if not targets or targets[0].chip.bf16_flops is None:
        text = "No time without a device whose peak FLOP/s is known: name a target."
        console.print(text, highlight=False)
        return
    jax.config.update("jax_platforms", "cpu")
    found = plan_on_target(budget, targets[0], price=price)
    print_lines(console, *sentences(budget, found))


def _plan(
    arguments: argparse.Namespace, console: Console, target: Target, chosen: Combination
) -> Plan:
    config = load_config(arguments.config, chosen.bindings, allow_imports=arguments.allow_imports)
    print_lines(console, *config.notes)

    @contextlib.contextmanager
    def progress(words: str) -> Iterator[Callable[[str], None]]:
        if not console.is_terminal:
            yield lambda words: None
            return
        with console.status(words) as status:
            yield lambda words: status.update(escape(words))

    return make_plan(
        config,
        target.name,
        compile=arguments.compile,
        thorough=arguments.thorough,
        search=arguments.search,
        price=arguments.price,
        tokens=arguments.tokens,
        network=arguments.network,
        disk=arguments.disk,
        goodput=arguments.goodput,
        mtbf=arguments.mtbf,
        storage=arguments.storage,
        measured=arguments.measured,
        calibrate=arguments.calibrate,
        allow_imports=arguments.allow_imports,
        progress=progress,
    )


def _elastic_pairs(
    arguments: argparse.Namespace, pairs: Sequence[tuple[Target, Combination]]
) -> list[tuple[Target, Combination]]:
    """Return the target and the layout of each number of hosts in `--hosts`.

    Raises:
      UserError: `--hosts` is wrong, or comes with several targets, layouts or a search.
    """
    least, most = parse_hosts(arguments.hosts)
    if len(pairs) > 1 or arguments.search:
        raise UserError(
            f"--hosts {arguments.hosts}: one layout of one target is divided; leave out --search, "
            "other targets and lists after -b"
        )
    ((target, chosen),) = pairs
    kind, shape = target.chip.kind, target.shape
    if kind == "gpu" and shape[0] != most:
        raise UserError(
            f"--hosts {arguments.hosts}: target {target.name} has {shape[0]} hosts; use "
            f"--hosts {min(least, shape[0])}:{shape[0]}"
        )
    config = load_config(arguments.config, chosen.bindings, allow_imports=arguments.allow_imports)
    found = elastic_layouts(config, least, most, devices=target.devices, platform=kind)
    each = []
    for one in found:
        count = one.changes.get("Train.accumulation", config.train.accumulation)
        values = {"hosts": one.hosts, "accumulation": count, "rows": one.rows or "-"}
        changes = {k: v for k, v in one.changes.items() if k != "Mesh.simulated_devices"}
        bindings = [*chosen.bindings, *(f"{name} = {value!r}" for name, value in changes.items())]
        smaller = (one.hosts, *shape[1:]) if kind == "gpu" else (one.devices,)
        combination = Combination({name: str(value) for name, value in values.items()}, bindings)
        each.append((dataclasses.replace(target, shape=smaller), combination))
    return each


def _side_by_side(
    arguments: argparse.Namespace,
    console: Console,
    pairs: Sequence[tuple[Target, Combination]],
) -> list[side_by_side.Entry]:
    """Plan each layout on its target; a combination that cannot run does not stop the others."""
    entries = []
    for target, chosen in pairs:
        made, message = None, None
        try:
            made = _plan(arguments, console, target, chosen)
        except UserError as error:
            message = str(error)
        entries.append(side_by_side.Entry(target.name, chosen.values, made, message))
        if _is_interrupted(made):
            break
    return entries


def timeline(arguments: argparse.Namespace) -> int:
    """Simulate the pipeline schedule and draw it."""
    picture = writable("--png", arguments.png)
    config = load_config(
        arguments.config, arguments.gin_bindings, allow_imports=arguments.allow_imports
    )
    pipeline, model, ranks = config.pipeline, config.train.model, config.mesh.pipe
    if ranks == -1:
        raise UserError("Mesh.pipe=-1: a timeline needs a number of ranks; use Mesh.pipe=4")
    if not has_stages(model):
        raise UserError(
            f"Train.model=@{type(model).__name__}() has no stack of layers to cut into stages; "
            "use a transformer such as @GPT()"
        )
    cut = deal(parameter_shapes(model.build), ranks, pipeline.virtual_stages).cut
    schedule = pipeline.table(ranks, passes=passes_of(model))
    # Unit: the forward pass of a layer. Recomputing a stage adds one forward pass to its backward.
    again = 1.0 if pipeline.backward == "recompute" else 0.0
    costs = stack_costs(config)
    each = [layers * cost / min(costs) for cost in costs for layers in cut]
    simulated = simulate(schedule, backward=2 + again, backward_input=1 + again, stage_costs=each)
    console = terminal()
    console.print(table(simulated))
    of_each = " of the encoder, and again of the decoder" * (len(costs) > 1)
    console.print(f"Layers on each stage{of_each}: {', '.join(map(str, cut))}")
    if picture is not None:
        draw(simulated, picture)
        console.print(f"Drawn: {picture}", soft_wrap=True, markup=False)
    return DONE


def show_doctor(_: argparse.Namespace) -> int:
    """Print versions, devices and missing extras."""
    return doctor.show(terminal())
