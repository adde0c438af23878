"""Predicted time of a train step: compute, communication, overlap.

    C    = P / (s_p peak) + A / (s_a peak) + (c X + U) / (h HBM) + G
    G    = n max(12 V D / (h HBM) - 6 R V D / (s_p peak), 0)
    E    = k min(W, C) + max(W - C, 0) + t N + R + D + H + F
    H    = max(O - C / 3, 0) + max(O - 2 C / 3, 0) + S
    step = (C + E) / (1 - bubble) (1 + g log2 slices)

P: executed matmul FLOPs, on a GPU in whole waves of tiles (`wave_quantization`). A: FLOPs of
attention scores: a forward pass and its recomputations, and 2.5 for the backward pass, which
recomputes the scores (arXiv 2307.08691, section 3.1). X: bytes of activations that matmuls read
and write. U: bytes of the optimizer update, read and written once. G: memory-bound time of the
loss in n chunks of R positions each: every chunk reads the output matrix [V, D] twice, and reads
and writes its gradient in float32, overlapped with the chunk's matmuls. W: seconds of collectives
of weights and gradients, and of permutes along axes other than `tensor`. N: seconds of collectives
of activations along `tensor`. R: seconds of other collectives. D: seconds of traffic between
slices. O: seconds of activations offloaded to host memory, overlapped with the forward pass (a
third of C) on the way out and with the backward pass on the way back. S: seconds of optimizer state
that is streamed from host memory for the update and written back at the same time. F: seconds of
state on disk, all of which the update reads and writes.

C, G, E and H are derived; the other capitals are counted. s_p is the rate of bare matmuls on the
chip, as measured by others, times a factor. That factor, s_a, h, k, t, c and g are fitted to
published runs (`python -m benchmarks.predictions`, which prints the residuals). s_a of Hopper is
measured by head_dim and length (`efficiency_factors.attention_speed`): the only one we measured.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from jaxtrain.analysis.planning.compiled.audit import over_dcn, over_hosts
from jaxtrain.analysis.planning.compiled.schedule import simulate_schedule
from jaxtrain.analysis.planning.machines import links
from jaxtrain.analysis.planning.machines.calibration import Calibration, StepProfile
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.facts import chunk_work
from jaxtrain.analysis.planning.textbook.steady import bubble_fraction
from jaxtrain.analysis.planning.timing import efficiency_factors
from jaxtrain.analysis.planning.timing.efficiency_factors import (
    PORTABLE,
    EfficiencyFactors,
    attention_speed,
    bar_in_words,
    efficiency_of,
    error_bar,
    family_of,
    is_known,
    scores_share,
)
from jaxtrain.analysis.planning.timing.executed import (
    activation_bytes,
    executed_flops,
    pad_layers,
    row_flops,
    score_fraction,
    stack_costs,
    work,
)
from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import Model
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.parallel.sharding import Layout
from jaxtrain.run.show.progress import human_seconds
from jaxtrain.training.flops import flops_per_step
from jaxtrain.training.layouts import fill_batch, resolve_config
from jaxtrain.training.offload import Offload
from jaxtrain.training.settings import Config

# Axes with collectives of weights and gradients, which partly overlap with compute.
_OF_WEIGHTS = frozenset({"data", "fsdp", "pipe"})
# Axes that distinguish the kinds of layouts.
_PROFILE_AXES = ("tensor", "context", "pipe", "expert")
# The exponent of a calibration above which a step counts as the measured one in the assumptions.
_ALIKE = 0.995


class CollectiveLike(Protocol):
    """A collective: expected in closed form or found in a compiled program."""

    @property
    def kind(self) -> str:
        """One of `collectives.KINDS`."""
        ...

    @property
    def axis(self) -> str:
        """The mesh axis, or several joined with "+"."""
        ...

    @property
    def count(self) -> int:
        """Executions per step."""
        ...

    @property
    def bytes(self) -> int:
        """Payload bytes per execution."""
        ...

    @property
    def every(self) -> float:
        """Number of steps per execution: it runs in one of every N steps."""
        ...


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The components of a step time, in seconds, whose sum is `seconds`.

    Attributes:
      compute: matmuls and operations fused into them, including recomputation, and the update.
      exposed: exposed communication.
      bubble: idle time of the pipeline.
      hidden: communication overlapped with compute; not part of `seconds`.
      flops_per_device: matmul FLOPs that one device executes.
      model_flops_per_device: FLOPs that the model needs (6 N and causal attention), for the MFU.
      mfu: the model's FLOPs over the device's peak in `seconds`, the 8-bit peak if the step has
        8-bit matmuls; None without a peak.
      by_axis: mesh axis -> seconds of its collectives without overlap.
      error_bar: relative half width that contains two of three published runs; None without a
        time.
      assumptions: sentences.
      estimate: the closed-form prediction, if these components are from a compiled schedule.
      kernels: part of `compute` in hand-written kernels, by the closed form of attention; None if
        nothing was compiled.
      chunks: part of the closed-form `compute`: memory-bound time of the loss.
      pieces: the counts of the closed forms, before efficiency factors; None without a time.
      profile: the properties that a calibration compares; None without a time.
      factor: the calibration factor by which the closed forms were multiplied; 1 without one.
    """

    compute: float | None
    exposed: float | None
    bubble: float | None
    hidden: float | None
    flops_per_device: float
    model_flops_per_device: float
    mfu: float | None
    by_axis: dict[str, float]
    error_bar: float | None
    assumptions: tuple[str, ...]
    estimate: "StepTime | None" = None
    kernels: float | None = None
    chunks: float = 0.0
    pieces: "StepCosts | None" = None
    profile: StepProfile | None = None
    factor: float = 1.0

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s of one device; None without a time."""
        return None if self.seconds is None else self.model_flops_per_device / self.seconds / 1e12

    @property
    def seconds(self) -> float | None:
        """Total step time; None if the chip's figures are unknown."""
        if self.compute is None or self.exposed is None or self.bubble is None:
            return None
        return self.compute + self.exposed + self.bubble


def peak_flops(config: Config, target: Target) -> float | None:
    """Return the peak FLOP/s of one device in the compute dtype."""
    fast = config.precision.compute in ("bfloat16", "float16")
    return target.chip.bf16_flops if fast else target.chip.float32_flops


def _narrow_peak(config: Config, target: Target) -> float | None:
    """Return the peak FLOP/s of one device in 8-bit matmuls; None if there are none."""
    return target.chip.narrow_flops(config.precision.matmul)


def _product_seconds(config: Config, target: Target, flops: float, peak: float) -> float:
    """Return the seconds of matmuls other than attention scores at the peak, some of them 8-bit."""
    row = row_flops(config)
    # Whole stages are recomputed, with the same fraction of 8-bit matmuls as the step.
    narrow = flops * row.narrow / (row.executed - row.scores)
    fast = _narrow_peak(config, target) or peak  # rejected where a device has no such peak
    return (flops - narrow) / peak + narrow / fast


def busy_seconds(config: Config, devices: int, target: Target, *, pipelined: bool) -> float:
    """Return a lower bound on the step time without bubble: matmuls and their memory traffic; 0
    without a peak. No calibration is applied.

    Of the layout it depends only on the number of devices and on whether they form a pipeline.
    """
    peak = peak_flops(config, target)
    if peak is None:
        return 0.0
    config = resolve_config(config, target.chip.kind)
    products, scores = work(config, pipelined=pipelined, devices=devices)
    shares = efficiency_of(target)
    seconds = _product_seconds(config, target, products, peak) / shares.products
    # The fewest bytes: those with a sequence that is sharded wherever the matmuls are.
    split = dataclasses.replace(config.sharding, sequence_parallel=True)
    config = dataclasses.replace(config, sharding=split)
    read = activation_bytes(config, pipelined=pipelined, devices=devices) / devices
    seconds += shares.passes * read / (shares.memory * (target.chip.hbm_bandwidth or math.inf))
    return seconds + scores / peak / _attention_share(config, target)


def exposed_seconds(
    config: Config, layout: Layout, target: Target, moved: Iterable[CollectiveLike]
) -> float:
    """Return the communication that is exposed however well weight and gradient traffic overlaps;
    0 without a peak. Arguments are those of `step_time`; no calibration is applied."""
    peak = peak_flops(config, target)
    if peak is None:
        return 0.0
    config = resolve_config(config, target.chip.kind)
    counted = pieces(config, layout, target, moved, peak=peak, update_bytes=0)
    return efficiency_of(target).activations * counted.tensor + counted.others


def least_factor(model: Model, sizes: Mapping[str, int], target: Target) -> float:
    """Return a lower bound of the calibration factor for all steps of a model on a mesh (axis to
    size); 1 without a calibration."""
    if target.calibration is None:
        return 1.0
    return target.calibration.least_factor(_kind_of(model), _profile_axes(sizes))


def slow_axes(config: Config, layout: Layout, target: Target) -> set[str]:
    """Return the mesh axes whose collectives leave a slice (or a GPU host) for the DCN."""
    if target.chip.kind == "tpu":
        return over_dcn(config.mesh.dcn)
    if target.chip.kind == "gpu":
        return over_hosts(layout.mesh.shape, target.shape[-1])
    return set()


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Counted costs of a step on one device, in seconds at data-sheet rates.

    Attributes:
      products: P over the peak.
      scores: A over the peak.
      activations: X over the memory bandwidth.
      update: U over the memory bandwidth.
      chunks_read: of G, n 12 V D over the memory bandwidth.
      chunks_products: of G, n 6 R V D over the peak.
      weights: W.
      tensor: N.
      others: R.
      between: D.
      offloaded: O.
      streamed: S.
      filed: F.
      bubble: idle fraction of the pipeline schedule.
      slices: number of slices in the mesh.
      portable: whether the attention kernel is the portable one.
      attention_speed: relative speed of that kernel, see `efficiency_factors.attention_speed`.
      by_axis: mesh axis -> seconds of its collectives.
    """

    products: float
    scores: float
    activations: float
    update: float
    chunks_read: float
    chunks_products: float
    weights: float
    tensor: float
    others: float
    between: float
    offloaded: float
    streamed: float
    filed: float
    bubble: float
    slices: int
    portable: bool
    attention_speed: float
    by_axis: dict[str, float]

    def attention(self, shares: EfficiencyFactors) -> float:
        """Return the part of C in attention scores."""
        share = scores_share(shares, portable=self.portable)
        return self.scores / (share * self.attention_speed)

    def compute(self, shares: EfficiencyFactors) -> float:
        """Return C of the module's formula."""
        read = (shares.passes * self.activations + self.update) / shares.memory
        busy = self.products / shares.products + self.attention(shares) + read
        return busy + self.chunks(shares)

    def chunks(self, shares: EfficiencyFactors) -> float:
        """Return G of the module's formula."""
        return max(self.chunks_read / shares.memory - self.chunks_products / shares.products, 0.0)

    def overlap_seconds(self, shares: EfficiencyFactors) -> float:
        """Return the part of W that is overlapped with compute."""
        return (1 - shares.shown) * min(self.weights, self.compute(shares))

    def exposed_seconds(self, shares: EfficiencyFactors) -> float:
        """Return E of the module's formula."""
        of_weights = self.weights - self.overlap_seconds(shares)
        moved = of_weights + shares.activations * self.tensor + self.others
        return moved + self.beyond(self.compute(shares))

    def beyond(self, compute: float) -> float:
        """Return the part of E between slices and between device and host."""
        forward, backward = compute / 3, 2 * compute / 3
        hosts = max(self.offloaded - forward, 0) + max(self.offloaded - backward, 0)
        return self.between + hosts + self.streamed + self.filed

    def stretch(self, shares: EfficiencyFactors, busy: float) -> float:
        """Return the step time for `busy` seconds of work, including bubble and slowest slice."""
        return busy / (1 - self.bubble) * (1 + shares.slices * math.log2(self.slices))

    def seconds(self, shares: EfficiencyFactors) -> float:
        """Return the total step time."""
        return self.stretch(shares, self.compute(shares) + self.exposed_seconds(shares))

    def composition(self, shares: EfficiencyFactors) -> dict[str, float]:
        """Return part of the step -> its fraction of the time; the sum is 1."""
        compute = self.compute(shares)
        busy = compute + self.exposed_seconds(shares)
        parts = {
            "matmuls": self.products / shares.products,
            "attention": self.attention(shares),
            "activations": shares.passes * self.activations / shares.memory,
            "update": self.update / shares.memory,
            "loss chunks": self.chunks(shares),
            "weights": self.weights - self.overlap_seconds(shares),
            "tensor": shares.activations * self.tensor,
            "other collectives": self.others,
            "slices and hosts": self.beyond(compute),
        }
        found = {name: (1 - self.bubble) * part / busy for name, part in parts.items()}
        return {**found, "bubble": self.bubble}


def pieces(
    config: Config,
    layout: Layout,
    target: Target,
    moved: Iterable[CollectiveLike],
    *,
    peak: float,
    update_bytes: int,
    to_host: tuple[int, int] = (0, 0),
    on_disk: int = 0,
) -> StepCosts:
    """Count the costs of a step. Arguments are those of `step_time`; peak: of the compute dtype."""
    sizes, bandwidth = dict(layout.mesh.shape), target.chip.hbm_bandwidth
    assert bandwidth is not None, "a chip with a peak has memory"
    pipelined = sizes["pipe"] > 1
    devices = layout.mesh.size
    done = pad_layers(config, devices)
    products, scores = work(done, pipelined=pipelined, devices=devices)
    read = activation_bytes(done, pipelined=pipelined, devices=devices) / devices
    chunks_read, chunks_products = chunk_work(config, layout)
    by_axis: dict[str, float] = {}
    weights = tensor = others = between = 0.0
    for one in moved:
        inside, outside = links.seconds(
            one.kind, one.axis, one.bytes, sizes, target, config.mesh.dcn
        )
        runs = one.count / one.every
        by_axis[one.axis] = by_axis.get(one.axis, 0.0) + runs * (inside + outside)
        between += runs * outside
        names = set(links.names_of(one.axis))
        # Attention moves activations over `context`, experts over `expert`: neither reduces them.
        gradients = one.kind == "all-reduce" and names <= {"context", "expert"}
        of_weights = "tensor" not in names and (names & _OF_WEIGHTS or gradients)
        # A ring costs the same as the gather: no published run shows how much better it overlaps.
        sent = one.kind == "collective-permute" and "tensor" not in names
        if sent or of_weights:
            weights += runs * inside
        elif "tensor" in names:
            tensor += runs * inside
        else:
            others += runs * inside
    return StepCosts(
        products=_product_seconds(done, target, products, peak)
        * efficiency_factors.quantization(config, layout, target),
        scores=scores / peak,
        activations=read / bandwidth,
        update=2 * update_bytes / bandwidth,
        chunks_read=chunks_read / bandwidth,
        chunks_products=chunks_products / peak,
        weights=weights,
        tensor=tensor,
        others=others,
        between=between,
        offloaded=to_host[0] / (target.chip.host_bandwidth or math.inf),
        streamed=to_host[1] / (target.chip.host_bandwidth or math.inf),
        filed=2 * on_disk / target.chip.disk_bandwidth,
        bubble=bubble_fraction(config.pipeline, sizes["pipe"], stack_costs(config)),
        slices=math.prod(config.mesh.dcn.values()),
        portable=config.attention.kernel == PORTABLE,
        attention_speed=_attention_speed(config, target),
        by_axis=by_axis,
    )


def step_time(
    config: Config,
    layout: Layout,
    target: Target,
    moved: Iterable[CollectiveLike],
    *,
    update_bytes: int,
    to_host: tuple[int, int] = (0, 0),
    on_disk: int = 0,
    text: str = "",
    thorough: bool = False,
) -> StepTime:
    """Predict the step time.

    For a calibrated target it is the closed-form time multiplied by the calibration factor of this
    step (`Calibration.factor`), even if the step was compiled.

    Args:
      config: the configuration.
      layout: its layout.
      target: the machine.
      moved: the step's collectives.
      update_bytes: bytes of parameters, gradients and optimizer state on one device, which the
        update reads and writes once.
      to_host: bytes of activations offloaded to host memory and back, and of state that is
        streamed from there (`Memory.to_host`).
      on_disk: bytes of state on disk, which the update reads and writes.
      text: HLO text of the compiled program, whose schedule is then used; "" without one.
      thorough: whether it was compiled with the full effort of a run.
    """
    moved, chip = list(moved), target.chip
    config = resolve_config(config, chip.kind)
    model = flops_per_step(config) / layout.mesh.size
    config = fill_batch(config, layout)  # the model's FLOPs exclude padding rows
    flops = executed_flops(config, layout)
    peak = peak_flops(config, target)
    if peak is None or chip.hbm_bandwidth is None:
        assumptions = (f"the peak FLOP/s of {chip.name} are not known: no time is predicted",)
        return StepTime(None, None, None, None, flops, model, None, {}, None, assumptions)
    counted = pieces(
        config, layout, target, moved, peak=peak,
        update_bytes=update_bytes, to_host=to_host, on_disk=on_disk,
    )  # fmt: skip
    shares = efficiency_of(target)
    profile, by = profile_of(config, layout, counted, shares), 1.0
    if target.calibration is not None:
        text = ""  # the calibration factor applies to the closed forms
        by = target.calibration.factor(profile)
    assumed = _assumptions(config, target, peak, profile, compiled=bool(text))
    bar = error_bar(target, family_of(config.train.model))
    best = _narrow_peak(config, target) or peak

    def time(compute: float, waited: float, hidden: float) -> StepTime:
        total = counted.stretch(shares, compute + waited)
        idle = counted.bubble * total
        exposed, hidden = max(total - idle - compute, 0.0), max(hidden, 0.0)  # rounding
        return StepTime(
            by * compute, by * exposed, by * idle, by * hidden, flops, model,
            model / best / (by * total), counted.by_axis, bar, assumed,
            chunks=by * counted.chunks(shares), pieces=counted, profile=profile, factor=by,
        )  # fmt: skip

    closed = time(
        counted.compute(shares), counted.exposed_seconds(shares), counted.overlap_seconds(shares)
    )
    if not text:
        return closed
    attention = counted.attention(shares)
    found = simulate_schedule(config, layout, target, text, attention=attention, thorough=thorough)
    waited = found.waited + counted.beyond(found.compute)
    made = time(found.compute, waited, found.sent - found.waited)
    return dataclasses.replace(made, estimate=closed, kernels=found.of_kernels)


def profile_of(
    config: Config, layout: Layout, counted: StepCosts, shares: EfficiencyFactors
) -> StepProfile:
    """Return the properties of a step that a calibration compares."""
    axes = _profile_axes(dict(layout.mesh.shape))
    return StepProfile(_kind_of(config.train.model), axes, counted.composition(shares))


def _kind_of(model: Model) -> str:
    """Return `StepProfile.model`."""
    return family_of(model) if model.experts is None else type(model).__name__


def _profile_axes(sizes: Mapping[str, int]) -> frozenset[str]:
    return frozenset(axis for axis in _PROFILE_AXES if sizes[axis] > 1)


def _attention_share(config: Config, target: Target) -> float:
    """Return the fraction of the peak that attention matmuls reach in this model's kernel."""
    share = scores_share(efficiency_of(target), portable=config.attention.kernel == PORTABLE)
    return share * _attention_speed(config, target)


def _attention_speed(config: Config, target: Target) -> float:
    """Return `efficiency_factors.attention_speed`; 1 for models whose inputs are not tokens."""
    model = config.train.model
    if model.attention is None or model.inputs not in ("tokens", "pairs"):
        return 1.0
    length = max(example_shape(config.train.data.abstract_batch(1)))
    return attention_speed(
        target,
        config.attention.kernel,
        head_dim=model.attention.key_dim,
        keys=model.attention.visible_share(length) * length,
    )


def _assumptions(
    config: Config, target: Target, peak: float, profile: StepProfile, *, compiled: bool
) -> tuple[str, ...]:
    chip, shares = target.chip, efficiency_of(target)
    family = family_of(config.train.model)
    rate = f"{(chip.link_bandwidth or 0) / 1e9:.0f} GB/s a link and direction"
    network = "one host, without a network"
    if chip.dcn_bandwidth is not None:
        network = f"{chip.dcn_bandwidth / 1e9:.1f} GB/s a device between hosts or slices"
    skipped = "in full (the kernel masks them)"
    if KERNELS[config.attention.kernel].skips_hidden:
        skipped = f"to {score_fraction(config):.0%} (the kernel skips what is masked)"
    peaks = f"{peak / 1e12:.0f} TFLOP/s ({config.precision.compute})"
    narrow = _narrow_peak(config, target)
    if narrow is not None:
        which = {"float8": "weights", "int8": "weights, not their gradients,"}
        matmul = config.precision.matmul
        peaks += f" and {narrow / 1e12:.0f} TFLOP/s ({matmul}, {which[matmul]} inside layers)"
    attention = _attention_share(config, target)
    scores = f", {attention:.0%} in attention scores, which count {skipped}"
    if config.train.model.attention is None:
        scores = ""
    hides, within = "", "prediction"
    if compiled:
        hides = "collectives overlap with what the schedule runs next to them; by closed forms "
        within = "closed forms, the only ones compared with those runs"
    untimed = ()
    if config.offload.optimizer_state == "disk":
        rate_of_disk = f"{chip.disk_bandwidth / 1e9:.3g} GB/s"
        untimed = (
            f"{rate_of_disk} a device from its host's disks (--disk), reads and writes together; "
            "the optimizer state is transferred after the gradients",
        )
    if config.offload != Offload() or config.remat.offloads:
        link = f"{(chip.host_bandwidth or 0) / 1e9:.0f} GB/s each way"
        untimed = (
            *untimed,
            f"host memory at {link}: transfers of activations overlap with the forward and the "
            "backward pass; those of optimizer state follow the gradients",
        )
    held = (
        "efficiency factors fitted on published runs"
        f"{'' if is_known(target) else ' of other chips'}; two of three runs of {family} models "
        f"on {chip.kind.upper()}s by a training stack outside the fit lie within "
        f"{error_bar(target, family):.0%} of the {within}"
    )
    measured = target.calibration
    if measured is not None:
        held = (
            f"{measured.source} measured {human_seconds(measured.measured)} where the closed forms "
            f"predict {human_seconds(measured.predicted)}, a factor of {measured.ratio:.3g}; "
            f"{_factor_in_words(measured, profile)}; {bar_in_words(target, family)}"
        )
    return (
        *untimed,
        f"{shares.products:.0%} of {peaks} in matmuls{scores}; {shares.memory:.0%} of the "
        "memory's bandwidth",
        f"{rate}, {chip.links} torus direction(s), assigned to the mesh axes as JAX does; "
        f"{network}",
        f"{hides}{1 - shares.shown:.0%} of the communication of weights and gradients overlaps "
        f"with computation, {1 - shares.activations:.0%} of tensor parallelism's; the rest is "
        "exposed",
        held,
    )


def _factor_in_words(measured: Calibration, profile: StepProfile) -> str:
    """Return a clause on how much of the measured factor a step's time is multiplied by."""
    exponent = measured.profile.exponent(profile)
    if exponent > _ALIKE:
        return "this step is the measured one, or one like it, and its times are multiplied by it"
    return (
        f"this step is similar to the measured one to the power of {exponent:.2f}, so that its "
        f"times are multiplied by {measured.factor(profile):.3g}"
    )
