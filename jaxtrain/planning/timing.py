"""Predicts the time of a train step from its FLOPs, bytes and collectives, piece by piece."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import jax

from jaxtrain.mesh import Mesh
from jaxtrain.pipeline.schedules import make_schedule
from jaxtrain.pipeline.timeline import simulate
from jaxtrain.planning.audit import over_dcn, over_hosts
from jaxtrain.planning.flops import count_flops
from jaxtrain.planning.formulas import wire_bytes
from jaxtrain.planning.targets import Target
from jaxtrain.preflight import abstract_layout
from jaxtrain.program import make_program, resolved
from jaxtrain.run_log import flops_per_step
from jaxtrain.settings import Config
from jaxtrain.sharding import Layout
from jaxtrain.step import with_shardings

# What large bfloat16 products of a transformer, with the elementwise work between them, reach of
# the peak: MaxText's published 65-70 % MFU on v5p and 51 % causal (68 % with recomputation) of a
# Llama 8B on one H200 both leave out communication and bubbles.
EFFICIENCY = 0.7
# Of these axes a layer's traffic is of weights, which do not wait for activations.
_HIDDEN_AXES = frozenset({"data", "fsdp"})
# Kernels that skip what a causal mask hides.
_SKIPPING = ("tpu", "cudnn", "triton", "blocked")


class Moved(Protocol):
    """A collective: expected by the textbook or found in a compiled program."""

    @property
    def kind(self) -> str:
        """One of `collectives.KINDS`."""
        ...

    @property
    def axis(self) -> str:
        """The mesh axis, or several joined by "+"."""
        ...

    @property
    def count(self) -> int:
        """Runs a step."""
        ...

    @property
    def bytes(self) -> int:
        """Payload of a run."""
        ...


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The pieces of a step, in seconds; they add up to `seconds`.

    Attributes:
      compute: products and what is fused into them, recomputation included, and the update.
      exposed: communication that nothing hides.
      bubble: waiting in the pipeline.
      hidden: communication that computation hides; not part of `seconds`.
      flops_per_device: FLOPs of products that one device executes.
      model_flops_per_device: those the model needs (6 N and causal attention), for the MFU.
      mfu: the model's FLOPs over what the device could do in `seconds`; None without a peak.
      by_axis: mesh axis -> seconds of its collectives, if nothing hid them.
      assumptions: sentences.
    """

    compute: float | None
    exposed: float | None
    bubble: float | None
    hidden: float | None
    flops_per_device: float
    model_flops_per_device: float
    mfu: float | None
    by_axis: dict[str, float]
    assumptions: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """The whole step; None where the chip's figures are not known."""
        if self.compute is None or self.exposed is None or self.bubble is None:
            return None
        return self.compute + self.exposed + self.bubble


@dataclasses.dataclass(frozen=True)
class RowFlops:
    """FLOPs of the products for one row of the batch, forward and backward.

    Attributes:
      executed: with recomputation; attention scores in full.
      scores: the attention scores among them, in full.
      narrow: those with operands of 8 bits, none of them scores.
    """

    executed: int
    scores: int
    narrow: int


def row_flops(config: Config) -> RowFlops:
    """Counted on the traced step, once for each model and remat policy."""
    train = dataclasses.replace(config.train, global_batch_size=1, accumulation=1)
    plain = dataclasses.replace(
        config,
        train=train,
        mesh=Mesh(fsdp=1),
        sharding=type(config.sharding)(),
        exchange=type(config.exchange)(),
        pipeline=type(config.pipeline)(),
        attention=dataclasses.replace(config.attention, kernel="reference"),
    )
    return _row_flops(plain)


@functools.lru_cache(maxsize=256)
def _row_flops(config: Config) -> RowFlops:
    layout = abstract_layout(config, 1)
    program: Any = make_program(config, layout).plain
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        batch = config.train.data.abstract_batch(1)
        batch = with_shardings(batch, program.batch_shardings(batch))
        traced = jax.make_jaxpr(program.gradients)(program.abstract_state(), batch)
    counted = count_flops(traced, lambda scope: "BKGTS" in scope)
    return RowFlops(counted.matmul, counted.chosen, counted.narrow)


def executed_flops(config: Config, layout: Layout) -> float:
    """FLOPs of products that one device executes in a step, with a kernel that is named."""
    row = row_flops(config)
    return _executed(config, row, pipelined=layout.mesh.shape["pipe"] > 1) / layout.mesh.size


def _executed(config: Config, row: RowFlops, *, pipelined: bool) -> float:
    flops = float(row.executed)
    if config.attention.kernel in _SKIPPING:
        flops -= row.scores / 2
    if pipelined and config.pipeline.backward == "recompute":
        keeps_products = config.remat.policy in ("none", "elementwise", "dots")
        flops += flops / 3 if keeps_products else flops / 4
    return flops * config.train.global_batch_size


def peak_flops(config: Config, target: Target) -> float | None:
    """FLOP/s of one device in the compute dtype."""
    fast = config.precision.compute in ("bfloat16", "float16")
    return target.chip.bf16_flops if fast else target.chip.float32_flops


def _narrow_peak(config: Config, target: Target) -> float | None:
    """FLOP/s of one device in products with operands of 8 bits; None where there are none."""
    chip = target.chip
    return {"float8": chip.float8_flops, "int8": chip.int8_flops}.get(config.precision.matmul)


def _product_seconds(config: Config, target: Target, flops: float, peak: float) -> float:
    """Of products, some of which may be of 8 bits, at EFFICIENCY of what the device can do."""
    row = row_flops(config)
    # Work done again is that of whole stages, of which as much is of 8 bits as of a step.
    scores = row.scores / 2 if config.attention.kernel in _SKIPPING else 0
    narrow = flops * row.narrow / (row.executed - scores)
    fast = _narrow_peak(config, target) or peak  # refused where a device has no such peak
    return ((flops - narrow) / peak + narrow / fast) / EFFICIENCY


def least_seconds(config: Config, devices: int, target: Target) -> float:
    """What a step cannot be predicted below: its products and its bubble; 0 without a peak."""
    peak, ranks = peak_flops(config, target), config.mesh.pipe
    if peak is None:
        return 0.0
    config = resolved(config, target.chip.kind)
    flops = _executed(config, row_flops(config), pipelined=ranks > 1) / devices
    seconds = _product_seconds(config, target, flops, peak)
    return seconds / (1 - bubble_fraction(config, ranks))


def bubble_fraction(config: Config, ranks: int) -> float:
    """The idle share of the pipeline's schedule on this many ranks; 0 without one."""
    pipeline = config.pipeline
    if ranks == 1:
        return 0.0
    return _bubble(
        pipeline.schedule,
        ranks,
        pipeline.microbatches,
        pipeline.virtual_stages,
        1.0 if pipeline.backward == "recompute" else 0.0,
    )


@functools.lru_cache(maxsize=1024)
def _bubble(name: str, ranks: int, microbatches: int, chunks: int, again: float) -> float:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, virtual_stages=chunks)
    return simulate(schedule, backward=2 + again, backward_input=1 + again).bubble_fraction


def slow_axes(config: Config, layout: Layout, target: Target) -> set[str]:
    """The mesh axes whose collectives leave a slice (or a GPU host) for the data-centre network."""
    if target.chip.kind == "tpu":
        return over_dcn(config.mesh.dcn)
    if target.chip.kind == "gpu":
        return over_hosts(layout.mesh.shape, target.shape[-1])
    return set()


def names_of(axis: str) -> list[str]:
    """The mesh axes of a collective's axis, which joins several by "+"."""
    return axis.removeprefix("part of ").split("+")


def bandwidth(
    axis: str, sizes: Mapping[str, int], target: Target, slow: Collection[str]
) -> float | None:
    """Bytes/s that one device sends along an axis.

    A TPU's torus directions are shared out evenly among the axes that use them, both ways round
    each ring; a GPU's links reach every GPU of its host at the full rate.

    Args:
      axis: one mesh axis, or several joined by "+".
      sizes: all mesh axes.
      target: the machine.
      slow: of `slow_axes`.
    """
    chip, names = target.chip, names_of(axis)
    if set(slow) & set(names):
        return chip.dcn_bandwidth
    if chip.link_bandwidth is None or chip.kind != "tpu":
        return chip.link_bandwidth
    inside = sum(size > 1 and name not in slow for name, size in sizes.items())
    share = chip.links / max(inside, 1) * len(names)
    return 2 * chip.link_bandwidth * min(share, chip.links)


def step_time(
    config: Config,
    layout: Layout,
    target: Target,
    moved: Iterable[Moved],
    *,
    update_bytes: int,
) -> StepTime:
    """The prediction.

    Args:
      config: the configuration.
      layout: its layout.
      target: the machine.
      moved: the step's collectives.
      update_bytes: bytes of parameters, gradients and optimizer state on one device, which the
        update reads and writes once.
    """
    chip = target.chip
    config = resolved(config, chip.kind)
    flops = executed_flops(config, layout)
    model = flops_per_step(config) / layout.mesh.size
    peak = peak_flops(config, target)
    if peak is None or chip.hbm_bandwidth is None:
        words = (f"no peak FLOP/s are known of {chip.name}: no time is predicted",)
        return StepTime(None, None, None, None, flops, model, None, {}, words)
    products = _product_seconds(config, target, flops, peak)
    compute = products + 2 * update_bytes / chip.hbm_bandwidth
    by_axis: dict[str, float] = {}
    hideable = exposed = 0.0
    sizes, slow = dict(layout.mesh.shape), slow_axes(config, layout, target)
    for one in moved:
        rate = bandwidth(one.axis, sizes, target, slow)
        assert rate is not None, "a chip with a peak has links"
        names = names_of(one.axis)
        devices = math.prod(sizes[name] for name in names)
        seconds = (
            one.count / getattr(one, "every", 1) * wire_bytes(one.kind, one.bytes, devices) / rate
        )
        by_axis[one.axis] = by_axis.get(one.axis, 0.0) + seconds
        if set(names) <= _HIDDEN_AXES or one.kind == "collective-permute":
            hideable += seconds
        else:
            exposed += seconds
    hidden = min(hideable, compute)
    exposed += hideable - hidden
    bubble = bubble_fraction(config, layout.mesh.shape["pipe"])
    waiting = (compute + exposed) * bubble / (1 - bubble)
    total = compute + exposed + waiting
    return StepTime(
        compute, exposed, waiting, hidden, flops, model, model / peak / total, by_axis,
        _assumptions(config, target, peak),
    )  # fmt: skip


def _assumptions(config: Config, target: Target, peak: float) -> tuple[str, ...]:
    chip = target.chip
    rate = f"{(chip.link_bandwidth or 0) / 1e9:.0f} GB/s a link and direction"
    network = f"{(chip.dcn_bandwidth or 0) / 1e9:.1f} GB/s a device between hosts or slices"
    causal = "halved (the kernel skips what is masked)"
    scores = causal if config.attention.kernel in _SKIPPING else "in full (the kernel masks them)"
    peaks = f"{peak / 1e12:.0f} TFLOP/s ({config.precision.compute})"
    narrow = _narrow_peak(config, target)
    if narrow is not None:
        which = {"float8": "weights", "int8": "weights, not their gradients,"}
        matmul = config.precision.matmul
        peaks += f" and {narrow / 1e12:.0f} TFLOP/s ({matmul}, {which[matmul]} inside layers)"
    return (
        f"{EFFICIENCY:.0%} of {peaks} in products "
        f"and what is fused into them; attention scores {scores}",
        f"{rate}, {chip.links} torus direction(s) shared evenly by the mesh axes; {network}",
        "weights and gradients over data and fsdp, and permutes, hide behind computation as far as "
        "it lasts; all other collectives wait",
    )
