"""Advice of a plan: the cheapest changes that make it fit, and other remarks."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax

from jaxtrain.analysis.planning.compiled.audit import Row
from jaxtrain.analysis.planning.compiled.placement import find_replicated
from jaxtrain.analysis.planning.machines.targets import Target, most_memory, with_memory
from jaxtrain.analysis.planning.search.candidates import Price
from jaxtrain.analysis.planning.search.search import price
from jaxtrain.analysis.planning.search.variants import (
    apply_changes,
    bindings_of,
    fixes,
    lighter_kernel,
    rejection_reason,
    slices_of,
)
from jaxtrain.analysis.planning.textbook.facts import (
    CHUNKS_WORTH,
    Facts,
    larger_chunks,
    positions_per_chunk,
)
from jaxtrain.analysis.planning.textbook.traffic import expect_traffic
from jaxtrain.parallel.chips import CHIPS, MOST_OF_A_GPU, chip_of
from jaxtrain.parallel.sharding import Layout
from jaxtrain.run.show.report import human_bytes
from jaxtrain.training.layouts import notes
from jaxtrain.training.settings import Config

# Maximum number of fixes shown, and of fixes combined if none suffices alone.
MOST = 6
TOGETHER = 4
FRACTION = "Train.gpu_memory_fraction"


@dataclasses.dataclass(frozen=True)
class Fix:
    """Bindings that reduce the memory of a device.

    Attributes:
      changes: binding -> value.
      saved: estimated bytes saved on one device.
      slower: relative change of the predicted step time; negative is faster.
      fits: whether it suffices.
    """

    changes: Mapping[str, Any]
    saved: int
    slower: float
    fits: bool

    @property
    def bindings(self) -> list[str]:
        """Arguments to paste after -b."""
        return bindings_of(self.changes)

    @property
    def sentence(self) -> str:
        """A sentence for the terminal."""
        pasted = " ".join(f'-b "{binding}"' for binding in self.bindings)
        enough = "fits" if self.fits else "not enough alone"
        if FRACTION in self.changes:
            return f"{pasted}: {human_bytes(self.saved)} more of each GPU for programs ({enough})"
        return (
            f"{pasted}: saves about {human_bytes(self.saved)}, step time {self.slower:+.0%} "
            f"({enough})"
        )


def fixes_for(config: Config, target: Target, *, over: int) -> list[Fix]:
    """Return changes that make a configuration fit, ordered by the increase in step time.

    Single changes come first. If none suffices alone, the best are combined one after the other
    until the estimate fits.

    Args:
      config: a configuration that does not fit.
      target: the machine.
      over: bytes by which it exceeds a device's memory.
    """
    sizes = config.mesh.sizes(target.devices * slices_of(config, target))
    before = price(config, target)
    tried: list[Fix] = []
    first: list[Fix] = []
    most = most_memory(target)
    if most is not None and (more := most - (target.chip.hbm_bytes or 0)) >= over:
        # Memory that is available at no cost.
        first = [Fix({FRACTION: MOST_OF_A_GPU}, more, 0.0, True)]
    for changes in fixes(config, target, sizes):
        found = _try(config, changes, target, before, over)
        if found is not None:
            tried.append(found)
    # The mildest sufficient value of each binding.
    enough: dict[tuple[str, ...], Fix] = {}
    for fix in sorted((fix for fix in tried if fix.fits), key=lambda fix: (fix.slower, fix.saved)):
        enough.setdefault(tuple(sorted(fix.changes)), fix)
    if enough:
        return [*first, *enough.values()][:MOST]
    combined = _combine(config, tried, target, before, over)
    rest = sorted(tried, key=lambda fix: -fix.saved)
    return [*first, *combined, *rest][:MOST]


def _try(
    config: Config,
    changes: Mapping[str, Any],
    target: Target,
    before: Price,
    over: int,
) -> Fix | None:
    """Return the change with its saving; None if it is rejected or saves nothing."""
    variant = _apply_changes(config, changes)
    if variant is None or rejection_reason(variant, target) is not None:
        return None
    after = price(variant, target)
    saved = before.memory.total - after.memory.total
    if saved <= 0:
        return None
    slower = after.seconds / before.seconds - 1 if before.seconds else 0.0
    return Fix(dict(changes), saved, slower, saved >= over)


def _apply_changes(config: Config, changes: Mapping[str, Any]) -> Config | None:
    try:
        return apply_changes(config, changes)
    except ValueError:  # includes UserError: the sections themselves reject some values
        return None


def _combine(
    config: Config,
    tried: list[Fix],
    target: Target,
    before: Price,
    over: int,
) -> list[Fix]:
    """Return one sufficient combination of changes to different bindings, or an empty list."""
    together: dict[str, Any] = {}
    by_worth = sorted(tried, key=lambda fix: -fix.saved / (1 + max(fix.slower, 0.0) * 4))
    for fix in by_worth:
        if len(together) >= TOGETHER or set(fix.changes) & set(together):
            continue
        found = _try(config, {**together, **fix.changes}, target, before, over)
        if found is None:
            continue
        together.update(fix.changes)
        if found.fits:
            return [found]
    return []


def remarks(
    config: Config,
    target: Target,
    layout: Layout,
    rows: Iterable[Row],
    warnings: Iterable[str],
) -> list[str]:
    """Return sentences on audit findings, replicated parameters and unused options."""
    found = notes(config, layout)
    found += [
        f"{one.name} ({human_bytes(one.bytes)} a device) is replicated along {one.axis}; -b "
        f"{one.way_out!r} would save {human_bytes(one.saving)}"
        for one in find_replicated(config, layout)
        if one.way_out
    ]
    kernel = lighter_kernel(config, target)
    if kernel is not None:
        found.append(
            f"Attention.kernel={config.attention.kernel!r} stores the scores of every pair of "
            f'tokens; -b "Attention.kernel={kernel!r}" does not'
        )
    if (both := compare_accumulations(config, target, layout)) is not None:
        found.append(both)
    if (small := _small_chunks(config, target, layout)) is not None:
        found.append(small)
    # The CPU compiler rewrites collectives: its traffic proves nothing.
    flagged = [row for row in rows if not row.explained and target.chip.kind != "cpu"]
    has_form = config.train.model.layers is not None
    of_layers = [row for row in flagged if "tensor" in row.axis and not has_form]
    if of_layers:
        count, moved = sum(row.count for row in of_layers), sum(row.bytes for row in of_layers)
        found.append(
            f"{count} collectives over tensor, {human_bytes(moved)} a step, belong to layers of "
            "different shapes, for which there is no closed form: they are counted as compiled"
        )
    for row in flagged:
        if row in of_layers:
            continue
        found.append(
            f"flagged: {row.kind} over {row.axis}, {human_bytes(row.bytes)} a step, is in no "
            f"closed form ({row.cause})"
        )
    found += [f"the compiler warns: {warning}" for warning in dict.fromkeys(warnings)]
    return found


def _small_chunks(config: Config, target: Target, layout: Layout) -> str | None:
    """Report the cost of small loss chunks, and the smallest that cost little and fit."""
    now = price(config, target)
    if now.time.chunks <= CHUNKS_WORTH * now.seconds:
        return None
    text = (
        f"Loss.chunk_size={config.loss.chunk_size} is "
        f"{positions_per_chunk(config, layout)} positions on a device: adding "
        f"each to the output matrix's gradient takes {now.time.chunks:.2g} of {now.seconds:.3g} s"
    )
    best = None
    for changes in larger_chunks(config):
        after = price(apply_changes(config, changes), target)
        if not after.fits:
            break
        best = changes
        if after.time.chunks <= CHUNKS_WORTH * after.seconds:
            break
    return text if best is None else f'{text}; -b "{bindings_of(best)[0]}" is faster'


# Number of memory parts to name.
_LARGEST = 4
# libtpu's message if tiles do not fit, regardless of the model's size.
_OF_ONE_OPERATION = "memory space vmem"


class OutOfMemory(Exception):  # noqa: N818 - what happened, as the user calls it
    """Out-of-memory error of a run; the message has the cause and possible fixes."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether XLA ran out of memory, while compiling or running."""
    return "RESOURCE_EXHAUSTED" in str(error)


def explain_error(config: Config, error: Exception) -> Exception:
    """Return the error to raise for one of JAX's: an explained OutOfMemory, or the error itself.

    Args:
      config: configuration of the failed run, on this process's devices.
      error: the error that JAX raised.
    """
    return OutOfMemory(explain(config, str(error))) if is_out_of_memory(error) else error


def explain(config: Config, message: str) -> str:
    """Explain what fills a device, by closed forms, with the cheapest fixes as bindings to paste.

    Args:
      config: configuration of the failed run, on this process's devices.
      message: XLA's message.
    """
    if _OF_ONE_OPERATION in message:
        return _explain_vector_memory(message)
    target = _this_machine(config)
    needed = price(config, target).memory
    parts = {
        "parameters": needed.arguments.params,
        "optimizer state": needed.arguments.optimizer,
        "gradients": needed.gradients,
        **needed.parts,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_LARGEST]
    text = ", ".join(f"{name} {human_bytes(size)}" for name, size in largest)
    room = target.chip.hbm_bytes
    capacity = "" if room is None else f" of {human_bytes(room)}"
    # The estimate may be below capacity although XLA's own is not: then save at least a tenth.
    over = max(needed.total - (room or needed.total), needed.total // 10)
    lines = [
        f"out of memory: {message.splitlines()[0]}",
        f"By closed forms a device needs {human_bytes(needed.total)}{capacity}: {text}.",
    ]
    fixes = fixes_for(config, target, over=over)
    lines += ["The cheapest fixes first:"] if fixes else []
    lines += [f"- {fix.sentence}" for fix in fixes]
    lines.append("'jaxtrain plan CONFIG --target TARGET' checks a fix without the hardware.")
    return "\n".join(lines)


def _explain_vector_memory(message: str) -> str:
    """Explain that a TPU's vector memory holds tiles of operations, regardless of model size."""
    line = next(line for line in message.splitlines() if _OF_ONE_OPERATION in line)
    return (
        f"out of vector memory, which holds what a TPU works on at the moment, not the model: "
        f"{line[:300]}\n"
        "Less of it for products: LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=16384 before "
        "the command (docs/performance.md, XLA flags)."
    )


def _this_machine(config: Config) -> Target:
    """Return a target of this process's devices, GPUs with the memory that JAX has reserved."""
    device, count = jax.devices()[0], jax.device_count()
    chip = chip_of(device.device_kind) or CHIPS["cpu"]
    if chip.kind != "gpu":
        return Target(chip, (count // chip.devices,))
    target = Target(chip, (jax.process_count(), count // jax.process_count()))
    taken = (device.memory_stats() or {}).get("bytes_limit")
    if taken is None:
        return with_memory(target, config.train.gpu_memory_fraction)
    return dataclasses.replace(target, chip=dataclasses.replace(chip, hbm_bytes=taken))


# -- both values of `Sharding.accumulate`: fsdp traffic and memory ---------------------------------

_Name = Literal["shard", "local"]


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """Estimated costs of one value of `Sharding.accumulate`, in closed form.

    Attributes:
      name: the value of `Sharding.accumulate`.
      moved: payload bytes of one device per step in fsdp collectives of weights and gradients.
      memory: memory of one device in bytes.
      fits: whether it fits on the machine.
    """

    name: _Name
    moved: int
    memory: int
    fits: bool


def accumulations(config: Config, target: Target, layout: Layout) -> list[Accumulation]:
    """Return the costs of both values, the configured one first; empty if there is no choice.

    Args:
      config: the configuration.
      target: the machine.
      layout: the configuration's layout.
    """
    facts = Facts(config, layout)
    if layout.zero < 2 or facts.size("fsdp") == 1 or facts.passes == 1 or facts.replicas_alone:
        return []
    if config.offload.gradients == "host":
        return []  # accumulated there, in shards only
    found = []
    for name in sorted(get_args(_Name), key=lambda name: name != layout.accumulate):
        other = apply_changes(config, {"Sharding.accumulate": name})
        moved = sum(
            one.total_bytes
            for one in expect_traffic(other, dataclasses.replace(layout, accumulate=name))
            if "fsdp" in one.axis.split("+")
            and one.cause.startswith(("parameters:", "gradients:", "update:"))
        )
        cost = price(other, target)
        found.append(Accumulation(name, moved, cost.memory.total, cost.fits))
    return found


def compare_accumulations(config: Config, target: Target, layout: Layout) -> str | None:
    """Return a sentence that compares both values; None if the other one does not help: it must
    fit, and have a tenth less traffic, unless the configured one does not fit."""
    found = accumulations(config, target, layout)
    if not found or not found[1].fits:
        return None
    if found[0].fits and found[1].moved > 0.9 * found[0].moved:
        return None
    now, other = (
        f"{human_bytes(way.moved)} of weights and gradients cross fsdp a step and a device needs "
        f"about {human_bytes(way.memory)} ({'fits' if way.fits else 'does not fit'})"
        for way in found
    )
    (pasted,) = bindings_of({"Sharding.accumulate": found[1].name})
    return f'with Sharding.accumulate={found[0].name!r} {now}; with -b "{pasted}" {other}'
