"""Search for the best mesh, ZeRO stage, remat policy, accumulation and schedule on a machine."""

import bisect
import contextlib
import dataclasses
import gc
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.analysis.planning.machines.targets import Target, most_memory
from jaxtrain.analysis.planning.search.candidates import (
    FAR,
    NEAR,
    SHOWN,
    Candidate,
    Found,
    Price,
    kinds_of,
    order_of,
    rank,
    with_reasons,
)
from jaxtrain.analysis.planning.search.space import (
    POLICIES,
    accumulate_locally,
    counts,
    meshes_and_schedules,
    stages_and_policies,
)
from jaxtrain.analysis.planning.search.variants import (
    apply_changes,
    bindings_of,
    essential,
    pipeline_of,
    rejection_reason,
    slices_of,
)
from jaxtrain.analysis.planning.textbook.facts import CHUNKS_WORTH, Facts, larger_chunks
from jaxtrain.analysis.planning.textbook.memory import (
    Memory,
    least_memory,
    memory,
    memory_without_stash,
    state_memory,
)
from jaxtrain.analysis.planning.textbook.steady import bubble_fraction
from jaxtrain.analysis.planning.textbook.traffic import expect_traffic
from jaxtrain.analysis.planning.timing.executed import between_layers, stack_costs
from jaxtrain.analysis.planning.timing.timing import (
    busy_seconds,
    exposed_seconds,
    least_factor,
    step_time,
)
from jaxtrain.config.errors import UserError
from jaxtrain.parallel.chips import MOST_OF_A_GPU
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.parallel.sharding import Layout
from jaxtrain.run.show.progress import human_seconds
from jaxtrain.run.show.report import format_mesh, human_bytes
from jaxtrain.training import layouts
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import parameter_shapes


def price(
    config: Config, target: Target, needed: Memory | None = None, layout: Layout | None = None
) -> Price:
    """Return the cost of a configuration without a `rejection_reason`; its memory and abstract
    layout are computed unless passed."""
    devices = target.devices * slices_of(config, target)
    layout = layouts.abstract_layout(config, devices) if layout is None else layout
    needed = memory(config, layout, target.chip.kind) if needed is None else needed
    moved = [*expect_traffic(config, layout), *between_layers(config, layout)]
    time = step_time(
        config, layout, target, moved,
        update_bytes=needed.update_bytes, to_host=needed.to_host, on_disk=needed.arguments.disk,
    )  # fmt: skip
    return Price(needed, time, target.chip.hbm_bytes, devices)


def search(
    config: Config,
    target: Target,
    report: Callable[[str], None] = lambda words: None,
    *,
    enough: float = 0.0,
) -> Found:
    """Price every layout of a configuration on a target by closed forms.

    The model, data, global batch and kernels stay unchanged. For each mesh, ZeRO stage, remat
    policy and schedule the search takes the fewest microbatches that fit, since more of them repeat
    the weight traffic. Pipelines take more while the smaller bubble is worth it. If there are
    several microbatches, local accumulation is tried too, if it fits. The result includes the best
    `SHOWN`, and the best of each kind of layout (`candidates.kinds_of`). The search is
    deterministic.

    KeyboardInterrupt ends the search early and returns the result so far (`Found.interrupted`). It
    is raised again if there is none yet.

    Args:
      config: the configuration.
      target: the machine.
      report: called from time to time with a sentence on the progress.
      enough: seconds of a step; a layout that takes no more ends the search early. What a whole
        search finds is at least as fast.

    Raises:
      UserError: nothing fits, or every layout is rejected.
      KeyboardInterrupt: Ctrl-C before any layout was found.
    """
    slices = slices_of(config, target)
    _validate_hopeless(config, target, target.devices * slices)
    fitting: list[Candidate] = []
    best: dict[str, float] = {}  # kind -> seconds of its fastest layout
    rejected: dict[str, int] = {}
    heavy: dict[tuple[Any, ...], bool] = {}  # layout -> whether the state is too large
    priced = too_large = slower = done = 0
    large: list[tuple[_Layout, _Sized | None]] = []  # None if it was not needed
    unpriced: list[_Layout] = []
    for layout in _list_layouts(config, target, slices, rejected):
        unpriced.append(layout)
        if not len(unpriced) % _REPORT_EVERY:
            report(f"listing layouts: {len(unpriced):,}")
    kinds = {kind for layout in unpriced for kind in layout.kinds}
    heapq.heapify(unpriced)
    interrupted = False
    thresholds = gc.get_threshold()
    # Traces are kept, and to look through all of them for garbage took a sixth of the time.
    gc.set_threshold(_ALLOCATED, *thresholds[1:])
    try:
        while unpriced:
            if fitting and fitting[0].price.seconds <= enough:
                interrupted = True
                break
            layout = heapq.heappop(unpriced)
            done += 1
            if not done % _REPORT_EVERY:
                report(_progress(done, len(unpriced), fitting))
            if not _may_be_shown(layout, fitting, best):
                slower += 1
                continue
            laid = _lay_out(config, layout, target)
            if _is_hopeless(config, layout, laid, target, heavy):
                priced, too_large = priced + 1, too_large + 1
                large.append((layout, None))
                continue
            found, tried, over = _fewest(config, layout, laid, target)
            if over < tried:
                one, more = _fastest(config, layout, target, found)
                tried += more
                bisect.insort(fitting, one, key=order_of)
                for kind in layout.kinds:
                    best[kind] = min(best.get(kind, math.inf), one.price.seconds)
                passes = Facts(one.config, found.layout).passes
                local = _locally(config, layout, target, one, passes)
                if local is not None:
                    message = _rejection(
                        config, {**local.changes, **local.counts[0]}, target, slices
                    )
                    if message is None:
                        heapq.heappush(unpriced, local)
                    else:
                        rejected[message] = rejected.get(message, 0) + 1
            else:
                large.append((layout, found))
            priced, too_large = priced + tried, too_large + over
    except KeyboardInterrupt:
        if not fitting:
            raise
        interrupted = True
    finally:
        gc.set_threshold(*thresholds)
    if not large and not fitting:
        most = max(rejected, key=lambda reason: rejected[reason])
        raise UserError(
            f"target {target.name!r}: no layout of this configuration can run there: {most}"
        )
    if not fitting:
        raise UserError(_nothing(config, target, priced, _smallest(config, target, large)))
    unfit = None
    if fitting[0].price.seconds > enough:
        with contextlib.suppress(KeyboardInterrupt):
            unfit = _fastest_unfit(config, target, large, fitting[0].price.seconds)
    candidates = with_reasons(rank(fitting), target)
    return Found(
        candidates, priced, too_large, slower, rejected,
        unfit=unfit,
        absent=() if interrupted else tuple(sorted(kinds - best.keys())),
        left=len(unpriced), interrupted=interrupted,
    )  # fmt: skip


# Objects allocated between two collections of garbage.
_ALLOCATED = 1_000_000
# Number of layouts between two progress reports.
_REPORT_EVERY = 50


def _progress(done: int, remaining: int, fitting: Sequence[Candidate]) -> str:
    text = f"pricing layouts by closed forms: {done:,} of {done + remaining:,}"
    if not fitting:
        return f"{text}, none that fits so far"
    first = fitting[0]
    time = first.price.time.seconds
    step = "" if time is None else f" in {human_seconds(time)} a step"
    return f"{text}, best so far {format_mesh(first.mesh)}{step} (Ctrl-C: show it)"


def _may_be_shown(
    layout: "_Layout", fitting: Sequence[Candidate], best: Mapping[str, float]
) -> bool:
    """Return whether a layout may be among the best `SHOWN`, or the best of one of its kinds."""
    if len(fitting) < SHOWN or layout.least_seconds <= fitting[SHOWN - 1].price.seconds:
        return True
    if layout.least_seconds > FAR * fitting[0].price.seconds:
        return False
    return any(layout.least_seconds < best.get(kind, math.inf) for kind in layout.kinds)


def _validate_hopeless(config: Config, target: Target, devices: int) -> None:
    """Raise UserError, before any layout is traced, if no layout can fit: not even with the weights
    alone, sharded over all devices in two bytes per element."""
    room = target.chip.hbm_bytes
    if room is None or config.offload.parameters != "none":
        return
    shapes = jax.tree.leaves(parameter_shapes(config.train.model.build))
    least = 2 * sum(math.prod(leaf.shape) for leaf in shapes)
    if least > room * devices:
        raise UserError(
            f"target {target.name!r}: no layout fits: the weights alone are {human_bytes(least)} "
            f"in bfloat16, and {devices} x {human_bytes(room)} are available; the weights need "
            f"{math.ceil(least / room):,} devices, before gradients and the optimizer"
        )


def _nothing(config: Config, target: Target, priced: int, smallest: "_Sized") -> str:
    """Explain why nothing fits, and what would: other settings, or a number of devices."""
    size, room = smallest.memory.total, target.chip.hbm_bytes or 0
    bindings = bindings_of(essential(config, smallest.changes))
    ways = []
    if size <= (most_memory(target) or 0):
        ways.append((size - room, f"Train.gpu_memory_fraction={MOST_OF_A_GPU}"))
    for changes in LIGHTER:
        if any(essential(smallest.config, changes)):
            variant = apply_changes(smallest.config, changes)
            if rejection_reason(variant, target) is None:
                saved = size - price(variant, target).memory.total
                ways.append((saved, " and ".join(bindings_of(changes))))
    enough = [enough_text for saved, enough_text in sorted(ways) if size - saved <= room]
    devices = target.devices * slices_of(config, target)
    settings = f"with {enough[0]} it fits" if enough else "no setting alone is enough"
    return (
        f"target {target.name!r}: none of {priced} layouts fits into {devices} x "
        f"{human_bytes(room)}; the smallest takes {human_bytes(size)} a device, "
        f"{human_bytes(size - room)} too much ({' '.join(bindings) or 'as it is'}): "
        f"{settings}, and so it does on about "
        f"{math.ceil(size * devices / room / devices) * devices} devices"
    )


# Changes other than layouts that reduce the memory of any layout.
LIGHTER: tuple[dict[str, Any], ...] = (
    {"Optimizer.moments": "bfloat16"},
    {"Precision.params": "bfloat16"},
    {"Optimizer.moments": "bfloat16", "Precision.params": "bfloat16"},
    {"Remat.policy": "offload"},
    {"Offload.optimizer_state": "host"},
)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A valid layout, without its number of microbatches.

    Attributes:
      changes: its bindings.
      counts: bindings of every possible number of microbatches, fewest first.
      least_seconds: lower bound of its time: its matmuls and their memory traffic, the exposed
        communication of every layout of its mesh, and its smallest bubble.
    """

    changes: dict[str, Any]
    counts: list[dict[str, Any]]
    least_seconds: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its kinds of parallelism (`kinds_of`)."""
        return kinds_of({axis: self.changes[f"Mesh.{axis}"] for axis in MESH_AXES})

    def __lt__(self, other: "_Layout") -> bool:
        """Compare layouts in the order in which they are priced."""
        if self.least_seconds != other.least_seconds:
            return self.least_seconds < other.least_seconds
        return str(self.changes) < str(other.changes)


def _list_layouts(
    config: Config, target: Target, slices: int, rejected: dict[str, int]
) -> Iterator[_Layout]:
    """Yield all valid layouts; count the rejected ones by reason."""
    devices, busy = target.devices * slices, dict[tuple[Any, ...], float]()
    waits: dict[tuple[Any, ...], float] = {}
    bubbles, costs = dict[tuple[Pipeline, int], float](), stack_costs(config)
    for mesh in meshes_and_schedules(config, target, devices):
        counted = list(counts(config, mesh))
        message = _rejection(config, {**mesh, **counted[0]}, target, slices)
        if message is not None:
            rejected[message] = rejected.get(message, 0) + 1
            continue
        sizes = tuple(value for name, value in mesh.items() if name.startswith("Mesh."))
        split = mesh["Mesh.data"] * mesh["Mesh.fsdp"] * mesh["Mesh.expert"]
        rows = config.train.global_batch_size
        held = math.ceil(rows / split) * split / rows  # of each row, with those that fill a batch
        factor = _least_factor(config, mesh, target)
        if sizes not in waits:
            waits[sizes] = _waits(config, {**mesh, **counted[0]}, target, devices)
        for rest in stages_and_policies(config, target, mesh):
            changes = {**mesh, **rest}
            pipeline = pipeline_of(config, {**changes, **counted[-1]})
            ranks = mesh["Mesh.pipe"]
            remat = tuple(item for item in rest.items() if item[0].startswith("Remat."))
            key = remat, pipeline.backward, ranks > 1
            if key not in busy:
                variant = apply_changes(config, changes)
                busy[key] = busy_seconds(variant, devices, target, pipelined=ranks > 1)
            if (pipeline, ranks) not in bubbles:
                bubbles[pipeline, ranks] = bubble_fraction(pipeline, ranks, costs)
            least = (held * busy[key] + waits[sizes]) / (1 - bubbles[pipeline, ranks])
            yield _Layout(changes, counted, factor * least)


def _least_factor(config: Config, changes: Mapping[str, Any], target: Target) -> float:
    sizes = {axis: changes[f"Mesh.{axis}"] for axis in MESH_AXES}
    return least_factor(config.train.model, sizes, target)


def _waits(config: Config, mesh: dict[str, Any], target: Target, devices: int) -> float:
    """Return a lower bound of the exposed communication of all layouts of a mesh, in seconds: that
    of activations, in stages that keep their residuals and layers without remat."""
    changes = {**mesh, "Remat.policy": POLICIES[0]}
    if mesh["Mesh.pipe"] > 1:
        # Stages of other schedules are as long, or are padded to more.
        plain = {"Pipeline.schedule": "1f1b", "Pipeline.virtual_stages": 1}
        changes |= {**plain, "Pipeline.backward": "residuals"}
    variant = apply_changes(config, changes)
    layout = layouts.abstract_layout(variant, devices)
    moved = [*expect_traffic(variant, layout), *between_layers(variant, layout)]
    return exposed_seconds(variant, layout, target, moved)


def _rejection(
    config: Config, changes: Mapping[str, Any], target: Target, slices: int
) -> str | None:
    try:
        variant = apply_changes(config, changes)
    except UserError as error:
        return str(error)
    message = rejection_reason(variant, target)
    if message is not None:
        return message.splitlines()[0]
    sharded = dataclasses.replace(variant, sharding=dataclasses.replace(variant.sharding, zero=3))
    if layouts.shared_mesh(sharded, target.devices * slices) != variant.mesh:
        return f"Mesh.fsdp={variant.mesh.fsdp}: the same as with fewer, and more Mesh.data"
    return None


@dataclasses.dataclass(frozen=True)
class _Sized:
    """A layout with its number of microbatches, before its time is predicted.

    Attributes:
      changes: its bindings.
      config: the configuration with these changes.
      layout: the abstract layout.
      memory: memory of one device.
    """

    changes: dict[str, Any]
    config: Config
    layout: Layout
    memory: Memory


def _lay_out(config: Config, layout: _Layout, target: Target) -> Layout:
    """Return the abstract layout, which does not depend on microbatches."""
    devices = target.devices * slices_of(config, target)
    return layouts.abstract_layout(
        apply_changes(config, {**layout.changes, **layout.counts[0]}), devices
    )


# Settings that do not affect the state or the gradient accumulators.
_OF_ACTIVATIONS = ("Remat.", "Pipeline.backward")


def _is_hopeless(
    config: Config,
    layout: _Layout,
    laid: Layout,
    target: Target,
    heavy: dict[tuple[Any, ...], bool],
) -> bool:
    """Return whether the lower bound of the memory exceeds the device, with the most microbatches.

    `heavy` caches, for layouts without their remat, whether the state alone is too large.
    """
    room, kind = target.chip.hbm_bytes, target.chip.kind
    if room is None:
        return False
    changes = {**layout.changes, **layout.counts[-1]}
    key = tuple(item for item in changes.items() if not item[0].startswith(_OF_ACTIVATIONS))
    if key not in heavy:
        heavy[key] = state_memory(apply_changes(config, changes), laid, kind) > room
    return heavy[key] or _needs_more(apply_changes(config, changes), laid, kind, room)


def _needs_more(variant: Config, laid: Layout, kind: str, room: float) -> bool:
    """Return whether a lower bound of the memory exceeds `room`, cheapest bound first."""
    if least_memory(variant, laid, kind) > room:
        return True
    return (memory_without_stash(variant, laid, kind) or 0) > room


def _smallest(
    config: Config, target: Target, large: Sequence[tuple[_Layout, "_Sized | None"]]
) -> "_Sized":
    """Return the layout with the least memory, if none fits; the first one of several."""
    best: tuple[int, int] | None = None
    found: dict[int, _Sized] = {}
    for bound, number in sorted((_bound(config, target, *one), n) for n, one in enumerate(large)):
        if best is not None and bound > best[0]:
            break
        layout, sized = large[number]
        one = sized or _fewest(config, layout, _lay_out(config, layout, target), target)[0]
        found[number] = one
        best = min(best or (one.memory.total, number), (one.memory.total, number))
    assert best is not None
    return found[best[1]]


def _bound(config: Config, target: Target, layout: _Layout, sized: "_Sized | None") -> int:
    """Return the memory of a layout with the most microbatches, or a lower bound of it."""
    if sized is not None:
        return sized.memory.total
    variant = apply_changes(config, {**layout.changes, **layout.counts[-1]})
    return least_memory(variant, _lay_out(config, layout, target), target.chip.kind)


def _fastest_unfit(
    config: Config,
    target: Target,
    large: Sequence[tuple[_Layout, "_Sized | None"]],
    seconds: float,
) -> Candidate | None:
    """Return the fastest layout that does not fit and needs at most `NEAR` times the memory, if it
    takes less than `seconds`."""
    best: Candidate | None = None
    most = NEAR * (target.chip.hbm_bytes or 0)
    for layout, sized in sorted(large, key=lambda one: one[0].least_seconds):
        if layout.least_seconds >= (seconds if best is None else best.price.seconds):
            break
        found = sized
        if found is None:
            laid = _lay_out(config, layout, target)
            variant = apply_changes(config, {**layout.changes, **layout.counts[-1]})
            if _needs_more(variant, laid, target.chip.kind, most):
                continue
            found = _fewest(config, layout, laid, target)[0]
        if found.memory.total > most:
            continue
        one = _candidate(config, found, target)
        if one.price.seconds < seconds:
            best = min(best or one, one, key=order_of)
    return best and dataclasses.replace(best, fits=False)


def _fewest(
    config: Config, layout: _Layout, laid: Layout, target: Target
) -> tuple[_Sized, int, int]:
    """Find the fewest microbatches that fit, by bisection.

    Memory never increases with their number. If none fits, it is the most possible. Also return how
    many were tried, and how many of those do not fit.
    """
    tried: dict[int, _Sized] = {}
    room = target.chip.hbm_bytes

    def fits(number: int) -> bool:
        changes = {**layout.changes, **layout.counts[number]}
        variant = apply_changes(config, changes)
        needed = memory(variant, laid, target.chip.kind)
        tried[number] = _Sized(changes, variant, laid, needed)
        return room is None or needed.total <= room

    last = number = len(layout.counts) - 1
    if fits(last):
        number = bisect.bisect_left(range(last), True, key=fits)
    large = sum(room is not None and one.memory.total > room for one in tried.values())
    return tried[number], len(tried), large


def _candidate(config: Config, sized: _Sized, target: Target) -> Candidate:
    cost = price(sized.config, target, sized.memory, sized.layout)
    return Candidate(essential(config, sized.changes), sized.config, cost)


def _fastest(
    config: Config, layout: _Layout, target: Target, fewest: _Sized
) -> tuple[Candidate, int]:
    """Return the fastest candidate, and how many others were tried.

    A pipeline gets more microbatches than `fewest` as long as the smaller bubble is worth the
    weight traffic. The loss gets larger chunks if the configured ones are memory-bound.
    """

    def grown(before: Candidate, changes: dict[str, Any]) -> Candidate | None:
        nonlocal tried
        variant = apply_changes(config, changes)
        needed = memory(variant, fewest.layout, target.chip.kind)
        tried += 1
        if target.chip.hbm_bytes is not None and needed.total > target.chip.hbm_bytes:
            return None
        after = _candidate(config, _Sized(changes, variant, fewest.layout, needed), target)
        return after if after.price.seconds < before.price.seconds else None

    best, tried, chosen = _candidate(config, fewest, target), 0, fewest.changes
    if layout.changes["Mesh.pipe"] > 1:
        for count in layout.counts[_count_index(layout, fewest.config) + 1 :]:
            after = grown(best, {**layout.changes, **count})
            if after is None:
                break
            best, chosen = after, {**layout.changes, **count}
    for chunk in larger_chunks(config):
        if best.price.time.chunks <= CHUNKS_WORTH * best.price.seconds:
            break
        after = grown(best, {**chosen, **chunk})
        if after is None:
            break
        best = after
    return best, tried


def _count_index(layout: _Layout, config: Config) -> int:
    """Return the index of a configuration in `layout.counts`."""
    return next(n for n, one in enumerate(layout.counts) if not essential(config, one))


def _locally(
    config: Config, layout: _Layout, target: Target, best: Candidate, passes: int
) -> _Layout | None:
    """Return a priced layout with local accumulation; None if it has one microbatch or is local.

    Local accumulation takes more memory, so no fewer microbatches fit. It has no weight traffic per
    microbatch, so in a pipeline the most microbatches, with the smallest bubble, are the best.
    """
    changes = accumulate_locally(config, layout.changes)
    if changes is None or passes == 1:
        return None
    pipelined = layout.changes["Mesh.pipe"] > 1
    left = layout.counts[-1 if pipelined else _count_index(layout, best.config) :]
    # Without the factor of `best`: that of the local layout may be smaller.
    time = best.price.time
    factor = _least_factor(config, layout.changes, target)
    busy = factor * (time.compute or 0.0) / time.factor
    return _Layout(changes, left, max(layout.least_seconds, busy))
