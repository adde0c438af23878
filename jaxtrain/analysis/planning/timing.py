"""Predicts the time of a train step, piece by piece, by a formula of few terms.

    C    = P / (s_p peak) + A / (s_a peak) + (c X + U) / (h HBM)
    E    = k min(W, C) + max(W - C, 0) + t N + R + D + H + F
    H    = max(O - C / 3, 0) + max(O - 2 C / 3, 0) + S
    step = (C + E) / (1 - bubble) (1 + g log2 slices)

P the products' FLOPs as they are executed; A those of attention scores: a forward pass and its
recomputations, and 2.5 for the backward pass, which makes the scores again (arXiv 2307.08691,
section 3.1); X the bytes of activations that products read and write; U those of the update, read
and written once. W seconds of what moves weights and gradients, and of permutes; N of what moves
activations over `tensor`; R of the other collectives; D between slices. O of activations that go to
the host's memory, beside the forward pass, a third of C, and come back beside the backward pass; S
of a state that comes from there for the update, and goes back at the same time. F of a state in
files, all of which the update reads and writes again.

The capitals but C, E and H are counted. The shares s, h and k, t, c, g are fitted on published runs
(`python -m benchmarks.predictions`, which prints what is left over): none is a measurement of ours.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr

from jaxtrain.analysis.planning.compiled.audit import over_dcn, over_hosts
from jaxtrain.analysis.planning.fitted import (
    FITTED,
    PORTABLE,
    Fitted,
    error_bar,
    fitted,
    scores_share,
)
from jaxtrain.analysis.planning.machines import links
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.scheduled import scheduled
from jaxtrain.analysis.planning.textbook.facts import weights_of
from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.analysis.planning.textbook.steady import bubble_fraction
from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import has_stacks
from jaxtrain.nn.attention.kernels import KERNELS
from jaxtrain.nn.attention.sparse import SCOPE
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.offload.offload import Offload
from jaxtrain.training.pipeline.stages import deal
from jaxtrain.training.program.layouts import abstract_layout, shapes_of
from jaxtrain.training.program.program import flops_per_step, make_program, resolved
from jaxtrain.training.program.uneven import filled
from jaxtrain.training.settings import Config
from jaxtrain.training.step import with_shardings

# Forward passes that attention's backward pass takes.
_SCORES_BACKWARD = 2.5
# What an axis moves of weights and gradients: computation hides some of it.
_OF_WEIGHTS = frozenset({"data", "fsdp", "pipe"})


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

    @property
    def every(self) -> float:
        """In one of how many steps it runs."""
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
      mfu: the model's FLOPs over what the device could do in `seconds`, in products of 8 bits where
        the step has some; None without a peak.
      by_axis: mesh axis -> seconds of its collectives, if nothing hid them.
      error_bar: relative half width within which two of three published runs lie; None without a
        time.
      assumptions: sentences.
      estimate: where a compiled program's schedule made these pieces, those of closed forms.
      kernels: of `compute`, what hand-written kernels take, by the closed form of attention; None
        where nothing was compiled.
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

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of one device in the model's FLOPs; None without a time."""
        return None if self.seconds is None else self.model_flops_per_device / self.seconds / 1e12

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
    return _row_flops(of_one_row(config))


def of_one_row(config: Config) -> Config:
    """The configuration on one device, with one row: what a step's products are traced from."""
    train = dataclasses.replace(config.train, global_batch_size=1, accumulation=1)
    return dataclasses.replace(
        config,
        train=train,
        mesh=Mesh(fsdp=1),
        sharding=type(config.sharding)(),
        exchange=type(config.exchange)(),
        offload=Offload(),
        pipeline=type(config.pipeline)(),
        attention=dataclasses.replace(
            config.attention, kernel="sparse" if _by_pattern(config) else "reference"
        ),
    )


def _by_pattern(config: Config) -> bool:
    return KERNELS[config.attention.kernel].by_pattern


@functools.lru_cache(maxsize=256)
def _row_flops(config: Config) -> RowFlops:
    counted = count_flops(traced(config), lambda scope: "BKGTS" in scope or SCOPE in scope)
    return RowFlops(counted.matmul, counted.chosen, counted.narrow)


@functools.lru_cache(maxsize=4)
def traced(config: Config) -> ClosedJaxpr:
    """The gradients of a configuration `of_one_row`."""
    layout = abstract_layout(config, 1)
    program: Any = make_program(config, layout).plain
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        batch = config.train.data.abstract_batch(1)
        batch = with_shardings(batch, program.batch_shardings(batch))
        return jax.make_jaxpr(program.gradients)(program.abstract_state(), batch)


def stack_costs(config: Config) -> tuple[float, ...]:
    """What a stage costs of each stack of layers, in any unit, where a pipeline runs one after the
    other."""
    model = config.train.model
    if not has_stacks(model):
        return (1.0,)
    return model.flops_of_stacks(example_shape(config.train.data.abstract_batch(1)))


def computed(config: Config, devices: int) -> Config:
    """The configuration with as many layers as a pipeline's stages have places for.

    All ranks go in lockstep, and the places of shorter stages are computed and masked.
    """
    model, ranks = config.train.model, config.mesh.sizes(devices)["pipe"]
    if ranks == 1 or model.layers is None:
        return config
    stages = deal(shapes_of(model), ranks, config.pipeline.virtual_stages)
    if stages.valid.all():
        return config
    setting = model.settings["layers"]
    leading = vars(model)[setting] - model.layers  # which stand on the first stage
    padded = dataclasses.replace(model, **{setting: leading + len(stages.valid)})
    return dataclasses.replace(config, train=dataclasses.replace(config.train, model=padded))


def executed_flops(config: Config, layout: Layout) -> float:
    """FLOPs of products that one device executes in a step, with a kernel that is named."""
    row = row_flops(computed(config, layout.mesh.size))
    flops = float(row.executed)
    if KERNELS[config.attention.kernel].skips_hidden:
        flops -= row.scores / 2
    if layout.mesh.shape["pipe"] > 1:
        flops += _again(config) * flops
    return flops * config.train.global_batch_size / layout.mesh.size


def _work(config: Config, *, pipelined: bool, devices: int) -> tuple[float, float]:
    """FLOPs that one device executes in products beside attention's scores, and in the scores: of
    those that a causal mask hides none where the kernel skips them, and in the backward pass what
    it does to make them again, which is traced where it goes by a pattern."""
    row, rows = row_flops(config), config.train.global_batch_size / devices
    passes, backward = (4, 3) if _by_pattern(config) else (3, _SCORES_BACKWARD)
    forward = row_flops(dataclasses.replace(config, remat=type(config.remat)())).scores / passes
    again = row.scores / forward - passes if forward else 0.0
    kernel = KERNELS[config.attention.kernel]
    if "attention" in config.remat.kept.names and not (kernel.plain or kernel.by_pattern):
        again = 0.0  # a kernel's results are all that its backward pass asks for
    products = float(row.executed - row.scores)
    if pipelined:
        products += _again(config) * products
        again += config.pipeline.backward == "recompute"
    kept = 0.5 if kernel.skips_hidden else 1.0
    return products * rows, kept * forward * (1 + again + backward) * rows


def _again(config: Config) -> float:
    """What a pipeline's stages do once more in their backward pass, as a part of all FLOPs."""
    if config.pipeline.backward != "recompute":
        return 0.0
    return 1 / 4 if config.remat.kept.repeats_products else 1 / 3


def activation_bytes(config: Config, *, pipelined: bool) -> float:
    """Bytes of activations that the products of a step read and write, over all devices; 0 for
    images and vectors: convolutions read each pixel an unknown number of times.

    Each weight has an input and an output, of two bytes an element: a forward pass, two for the
    gradients, and what is recomputed; logits in float32. With tensor parallelism what is as wide as
    the stream is read by every device of the axis, unless the sequence is split too. A kernel that
    keeps the scores reads or writes them in each of attention's products: two bytes for the 2 H
    FLOPs of one.
    """
    if config.train.model.inputs != "tokens":
        return 0.0
    shape = config.train.data.abstract_batch(1).inputs.shape
    stream = split = vocabulary = 0
    layers = config.train.model.layers or 1
    for weight in weights_of(config.train.model):
        sizes = dict(zip(weight.axes, weight.shape, strict=True))
        if "vocab" in sizes:
            vocabulary = sizes["vocab"]
        elif weight.is_matrix and weight.is_layer:
            experts, facts = sizes.pop("experts", None), config.train.model.experts
            times = 1 if experts is None or facts is None else facts.per_token
            stream += times * sizes.pop("embed", 0)
            split += times * math.prod(sizes.values())
    copies = 1 if config.sharding.sequence_parallel else config.mesh.tensor
    row = row_flops(config)
    plain = row_flops(dataclasses.replace(config, remat=type(config.remat)()))
    passes = 3 * (row.executed - row.scores) / max(plain.executed - plain.scores, 1)
    passes += pipelined and config.pipeline.backward == "recompute"
    rows = config.train.global_batch_size
    wide = 2 * passes * layers * (copies * stream + split)
    attention, kept = config.train.model.attention, 0.0
    kernel = KERNELS[config.attention.kernel]
    if attention is not None and (kernel.plain or kernel.by_pattern):
        again = plain.scores / 3 if pipelined and config.pipeline.backward == "recompute" else 0
        kept = 2 * (row.scores + again) / (attention.key_dim + attention.value_dim)
    return rows * (shape[1] * (wide + 12 * vocabulary) + kept)


def peak_flops(config: Config, target: Target) -> float | None:
    """FLOP/s of one device in the compute dtype."""
    fast = config.precision.compute in ("bfloat16", "float16")
    return target.chip.bf16_flops if fast else target.chip.float32_flops


def _narrow_peak(config: Config, target: Target) -> float | None:
    """FLOP/s of one device in products with operands of 8 bits; None where there are none."""
    return target.chip.narrow_flops(config.precision.matmul)


def _product_seconds(config: Config, target: Target, flops: float, peak: float) -> float:
    """Of products beside attention's scores at the peak; some of them may be of 8 bits."""
    row = row_flops(config)
    # Work done again is that of whole stages, of which as much is of 8 bits as of a step.
    narrow = flops * row.narrow / (row.executed - row.scores)
    fast = _narrow_peak(config, target) or peak  # refused where a device has no such peak
    return (flops - narrow) / peak + narrow / fast


def busy_seconds(config: Config, devices: int, target: Target, *, pipelined: bool) -> float:
    """What a step cannot be predicted below but for its bubble: its products and what they read and
    write; 0 without a peak.

    Of the layout it depends on how many devices there are, and whether they are a pipeline.
    """
    peak = peak_flops(config, target)
    if peak is None:
        return 0.0
    config = resolved(config, target.chip.kind)
    products, scores = _work(config, pipelined=pipelined, devices=devices)
    shares = fitted(target)
    seconds = _product_seconds(config, target, products, peak) / shares.products
    # As few bytes as they are with a sequence that is split wherever the products are.
    split = dataclasses.replace(config.sharding, sequence_parallel=True)
    config = dataclasses.replace(config, sharding=split)
    read = activation_bytes(config, pipelined=pipelined) / devices
    seconds += shares.passes * read / (shares.memory * (target.chip.hbm_bandwidth or math.inf))
    portable = config.attention.kernel == PORTABLE
    return seconds + scores / peak / scores_share(shares, portable=portable)


def waited_seconds(config: Config, layout: Layout, target: Target, moved: Iterable[Moved]) -> float:
    """What a step waits for whatever hides its weights' and gradients' traffic; 0 without a
    peak. Arguments as of `step_time`."""
    peak = peak_flops(config, target)
    if peak is None:
        return 0.0
    config = resolved(config, target.chip.kind)
    counted = pieces(config, layout, target, moved, peak=peak, update_bytes=0)
    return fitted(target).activations * counted.tensor + counted.others


def slow_axes(config: Config, layout: Layout, target: Target) -> set[str]:
    """The mesh axes whose collectives leave a slice (or a GPU host) for the data-centre network."""
    if target.chip.kind == "tpu":
        return over_dcn(config.mesh.dcn)
    if target.chip.kind == "gpu":
        return over_hosts(layout.mesh.shape, target.shape[-1])
    return set()


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What is counted of a step on one device; in seconds, were every rate its data sheet's.

    Attributes:
      products: P over the peak.
      scores: A over the peak.
      activations: X over the memory's bandwidth.
      update: U over the memory's bandwidth.
      weights: W.
      tensor: N.
      others: R.
      between: D.
      offloaded: O.
      streamed: S.
      filed: F.
      bubble: the idle share of the pipeline's schedule.
      slices: over which the mesh goes.
      portable: whether attention's kernel is written for no generation of chips.
      by_axis: mesh axis -> seconds of its collectives.
    """

    products: float
    scores: float
    activations: float
    update: float
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
    by_axis: dict[str, float]

    def attention(self, shares: Fitted) -> float:
        """Of C, attention's scores."""
        return self.scores / scores_share(shares, portable=self.portable)

    def compute(self, shares: Fitted) -> float:
        """C of the module's formula."""
        read = (shares.passes * self.activations + self.update) / shares.memory
        return self.products / shares.products + self.attention(shares) + read

    def hidden(self, shares: Fitted) -> float:
        """What computation hides of W."""
        return (1 - shares.shown) * min(self.weights, self.compute(shares))

    def waited(self, shares: Fitted) -> float:
        """E of the module's formula."""
        of_weights = self.weights - self.hidden(shares)
        moved = of_weights + shares.activations * self.tensor + self.others
        return moved + self.beyond(self.compute(shares))

    def beyond(self, compute: float) -> float:
        """Of E, what leaves the slice, and what leaves the device for its host."""
        forward, backward = compute / 3, 2 * compute / 3
        hosts = max(self.offloaded - forward, 0) + max(self.offloaded - backward, 0)
        return self.between + hosts + self.streamed + self.filed

    def stretched(self, shares: Fitted, busy: float) -> float:
        """A step that is busy for so long: with the bubble, and the wait for the slowest slice."""
        return busy / (1 - self.bubble) * (1 + shares.slices * math.log2(self.slices))

    def seconds(self, shares: Fitted) -> float:
        """The whole step."""
        return self.stretched(shares, self.compute(shares) + self.waited(shares))


def pieces(
    config: Config,
    layout: Layout,
    target: Target,
    moved: Iterable[Moved],
    *,
    peak: float,
    update_bytes: int,
    to_host: tuple[int, int] = (0, 0),
    on_disk: int = 0,
) -> Pieces:
    """Counts a step; arguments as of `step_time`, and the peak FLOP/s of the compute dtype."""
    sizes, bandwidth = dict(layout.mesh.shape), target.chip.hbm_bandwidth
    assert bandwidth is not None, "a chip with a peak has memory"
    pipelined = sizes["pipe"] > 1
    done = computed(config, layout.mesh.size)
    products, scores = _work(done, pipelined=pipelined, devices=layout.mesh.size)
    read = activation_bytes(done, pipelined=pipelined) / layout.mesh.size
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
        if one.kind == "collective-permute" or of_weights:
            weights += runs * inside
        elif "tensor" in names:
            tensor += runs * inside
        else:
            others += runs * inside
    return Pieces(
        products=_product_seconds(done, target, products, peak),
        scores=scores / peak,
        activations=read / bandwidth,
        update=2 * update_bytes / bandwidth,
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
        by_axis=by_axis,
    )


def step_time(
    config: Config,
    layout: Layout,
    target: Target,
    moved: Iterable[Moved],
    *,
    update_bytes: int,
    to_host: tuple[int, int] = (0, 0),
    on_disk: int = 0,
    text: str = "",
    thorough: bool = False,
) -> StepTime:
    """The prediction.

    Args:
      config: the configuration.
      layout: its layout.
      target: the machine.
      moved: the step's collectives.
      update_bytes: bytes of parameters, gradients and optimizer state on one device, which the
        update reads and writes once.
      to_host: bytes of activations that go to the host's memory and come back, and of a state that
        is read from there (`Memory.to_host`).
      on_disk: bytes of a state in files, which the update reads and writes.
      text: of the compiled program, whose own schedule then counts; "" without one.
      thorough: whether it was compiled as for a run.
    """
    moved, chip = list(moved), target.chip
    config = resolved(config, chip.kind)
    model = flops_per_step(config) / layout.mesh.size
    config = filled(config, layout)  # the model's FLOPs are of rows that weigh something
    flops = executed_flops(config, layout)
    peak = peak_flops(config, target)
    if peak is None or chip.hbm_bandwidth is None:
        words = (f"no peak FLOP/s are known of {chip.name}: no time is predicted",)
        return StepTime(None, None, None, None, flops, model, None, {}, None, words)
    counted = pieces(
        config, layout, target, moved, peak=peak,
        update_bytes=update_bytes, to_host=to_host, on_disk=on_disk,
    )  # fmt: skip
    shares = fitted(target)
    assumed = _assumptions(config, target, peak, compiled=bool(text))
    bar = error_bar(target)
    best = _narrow_peak(config, target) or peak

    def time(compute: float, waited: float, hidden: float) -> StepTime:
        total = counted.stretched(shares, compute + waited)
        idle = counted.bubble * total
        return StepTime(
            compute, total - idle - compute, idle, hidden, flops, model, model / best / total,
            counted.by_axis, bar, assumed,
        )  # fmt: skip

    closed = time(counted.compute(shares), counted.waited(shares), counted.hidden(shares))
    if not text:
        return closed
    attention = counted.attention(shares)
    found = scheduled(config, layout, target, text, attention=attention, thorough=thorough)
    waited = found.waited + counted.beyond(found.compute)
    made = time(found.compute, waited, found.sent - found.waited)
    return dataclasses.replace(made, estimate=closed, kernels=found.of_kernels)


def _assumptions(config: Config, target: Target, peak: float, *, compiled: bool) -> tuple[str, ...]:
    chip, shares = target.chip, fitted(target)
    rate = f"{(chip.link_bandwidth or 0) / 1e9:.0f} GB/s a link and direction"
    network = "one host, without a network"
    if chip.dcn_bandwidth is not None:
        network = f"{chip.dcn_bandwidth / 1e9:.1f} GB/s a device between hosts or slices"
    causal = "halved (the kernel skips what is masked)"
    skips = KERNELS[config.attention.kernel].skips_hidden
    skipped = causal if skips else "in full (the kernel masks them)"
    peaks = f"{peak / 1e12:.0f} TFLOP/s ({config.precision.compute})"
    narrow = _narrow_peak(config, target)
    if narrow is not None:
        which = {"float8": "weights", "int8": "weights, not their gradients,"}
        matmul = config.precision.matmul
        peaks += f" and {narrow / 1e12:.0f} TFLOP/s ({matmul}, {which[matmul]} inside layers)"
    known = chip.name in FITTED
    attention = scores_share(shares, portable=config.attention.kernel == PORTABLE)
    hides, within = "", "prediction"
    if compiled:
        hides = "what the schedule puts beside a collective hides it; by closed forms "
        within = "closed forms, which alone were held against them"
    untimed = ()
    if config.offload.optimizer_state == "disk":
        rate_of_disk = f"{chip.disk_bandwidth / 1e9:.3g} GB/s"
        untimed = (
            f"{rate_of_disk} a device of its host's disks (--disk), reads and writes together: the "
            "state waits for the gradients",
        )
    if config.offload != Offload() or config.remat.offloads:
        link = f"{(chip.host_bandwidth or 0) / 1e9:.0f} GB/s each way"
        untimed = (
            *untimed,
            f"host memory at {link}: activations go there beside the forward pass and come back "
            "beside the backward pass; a state waits for the gradients",
        )
    return (
        *untimed,
        f"{shares.products:.0%} of {peaks} in products, {attention:.0%} in attention scores, "
        f"which count {skipped}; {shares.memory:.0%} of the memory's bandwidth",
        f"{rate}, {chip.links} torus direction(s) laid under the mesh axes as JAX does; {network}",
        f"{hides}{1 - shares.shown:.0%} of what moves weights and gradients hides behind "
        f"computation, {1 - shares.activations:.0%} of what tensor moves; the rest waits",
        f"shares fitted on published runs{'' if known else ' of other chips of its kind'}: two of "
        f"three lie within {error_bar(target):.0%} of the {within}",
    )
