"""Efficiency factors of the step time, fitted to published runs, and their error bars.

`python -m benchmarks.predictions` refits them and predicts each stack without its own runs.
"""

import dataclasses
import functools
import math
from typing import Literal

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.facts import Facts, Weight
from jaxtrain.models.model import Model
from jaxtrain.parallel.chips import Chip
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.optimizers.matrices import sides
from jaxtrain.training.settings import Config

# Kinds of models whose predictions share an error bar.
Family = Literal["dense", "mixture", "image"]

# The portable attention kernel, not tuned for any generation of GPUs.
PORTABLE = "triton"


@dataclasses.dataclass(frozen=True)
class EfficiencyFactors:
    """Efficiency factors of a chip, fitted to published runs; see the formula in `timing`.

    Attributes:
      products: s_p, the fraction of the peak that matmuls reach.
      scores: s_a, the fraction of the peak that attention matmuls reach: on Hopper and later, for
        long sequences with a head_dim of 128 (`attention_speed` covers the others).
      shown: k, the fraction of weight and gradient traffic that is not overlapped with compute.
      activations: t, the exposed fraction of the time of tensor-parallel collectives.
      passes: c, how many times the operands and results of matmuls cross the memory bus, including
        the elementwise operations between matmuls.
      memory: h, the fraction of the memory bandwidth that this traffic reaches.
      slices: g, the slowdown for each doubling of the slices, from waiting for the slowest.
      portable: s_a of a kernel that is not written for this generation ('triton' on Hopper, which
        does not use Hopper's instructions); None if there is no such difference.
    """

    products: float
    scores: float
    shown: float
    activations: float
    passes: float = 3.22
    memory: float = 0.85
    slices: float = 0.018
    portable: float | None = None


# Fraction of the peak that bare bfloat16 matmuls of the best sizes reach, as measured by others:
# GPUs from stas00/ml-engineering, "Maximum Achievable Matmul FLOPS", H200 as H100, GB300 as GB200;
# TPUs for 8192^3: v6e 827 of 918, 7x 956 of 1,153 TFLOP/s. No published figures for v4, v5e, v5p
# and RTX 3090: 0.95 and 0.80 are assumed.
BARE_MATMUL = {
    "v4": 0.95, "v5e": 0.95, "v5p": 0.95, "v6e": 0.90, "7x": 0.83,
    "a100": 0.869, "a100-40": 0.869, "h100": 0.803, "h200": 0.803,
    "b200": 0.776, "b300": 0.786, "gb200": 0.729, "gb300": 0.729, "rtx3090": 0.80,
    "mi300x": 0.514,
}  # fmt: skip
_BARE_UNKNOWN = 0.80
_WITHOUT_RUNS = {"mi300x"}  # chips without a run in benchmarks/*_runs.csv
# Fraction of the bare-matmul rate reached inside a train step: fitted, one for TPUs, one for GPUs.
IN_STEP = {"tpu": 0.93, "gpu": 0.84}

# Fitted to the suitable rows of benchmarks/*_runs.csv, except attention on Hopper and Blackwell:
# cuDNN's kernel and Pallas's ('triton'), forward and backward, as measured on an H100
# (benchmarks/history/gpu.md); arXiv 2407.08608 has the same for cuDNN (figures 5 and 6).
_KINDS = {
    "tpu": functools.partial(EfficiencyFactors, scores=0.42, shown=0.62, activations=0.66),
    "ampere": functools.partial(EfficiencyFactors, scores=0.38, shown=0.35, activations=0.82),
    "hopper": functools.partial(
        EfficiencyFactors, scores=0.60, shown=0.35, activations=0.82, portable=0.155
    ),
}  # fmt: skip

# Half width of the interval that contains two of three runs of a held-out stack, with every stack
# weighted equally (leave-one-stack-out), by family and kind of chip. No image runs on TPUs are
# published: the GPU value is used.
_ERROR_BARS: dict[tuple[Family, str], float] = {
    ("dense", "tpu"): 0.12, ("dense", "gpu"): 0.20,
    ("mixture", "tpu"): 0.14, ("mixture", "gpu"): 0.34,
    ("image", "tpu"): 0.34, ("image", "gpu"): 0.34,
}  # fmt: skip
# The same if one run of the stack was measured on that chip and is of the same family: each run of
# a stack on a chip, predicted from the measured step of every other (benchmarks.calibrated). No
# stack published several image runs on TPUs: the value without a measured step is used.
_CALIBRATED_BARS: dict[tuple[Family, str], float] = {
    ("dense", "tpu"): 0.09, ("dense", "gpu"): 0.13,
    ("mixture", "tpu"): 0.15, ("mixture", "gpu"): 0.26,
    ("image", "tpu"): 0.34, ("image", "gpu"): 0.19,
}  # fmt: skip
# Error bar for chips without a published run, from leave-one-chip-out.
_ERROR_BAR_UNKNOWN = 0.24


def efficiency_of(target: Target) -> EfficiencyFactors:
    """Return the efficiency factors of a target's chip, from its generation and matmul rate."""
    chip = target.chip
    products = BARE_MATMUL.get(chip.name, _BARE_UNKNOWN) * IN_STEP.get(chip.kind, IN_STEP["gpu"])
    return _KINDS[generation_of(chip)](products)


def generation_of(chip: Chip) -> Literal["tpu", "ampere", "hopper"]:
    """Return which attention kernels a chip has: those of TPUs, of Ampere, or of Hopper.

    Hopper includes later data-center GPUs. Ampere includes every other GPU: GeForce boards do not
    have Hopper's instructions.
    """
    if chip.kind == "tpu":
        return "tpu"
    hopper = chip.processor is not None and chip.processor.compute_capability[0] in (9, 10)
    return "hopper" if hopper else "ampere"


def is_known(target: Target) -> bool:
    """Return whether the fit includes runs on a target's chip."""
    return target.chip.name in BARE_MATMUL.keys() - _WITHOUT_RUNS


def family_of(model: Model) -> Family:
    """Return the family of a model, which selects its error bar."""
    if model.experts is not None:
        return "mixture"
    return "image" if model.inputs == "images" else "dense"


def error_bar(target: Target, family: Family = "dense") -> float:
    """Return the relative half width of a prediction for a stack outside the fit.

    For a target calibrated with a run of the same family, it is the error bar given that run.
    """
    kind = "tpu" if target.chip.kind == "tpu" else "gpu"
    if target.calibration is not None and target.calibration.family == family:
        return _CALIBRATED_BARS[family, kind]
    bar = _ERROR_BARS[family, kind]
    return bar if is_known(target) else max(bar, _ERROR_BAR_UNKNOWN)


def bar_in_words(target: Target, family: Family) -> str:
    """Return a sentence on the error bar of a calibrated target, for the plan's assumptions."""
    bar, kind = error_bar(target, family), target.chip.kind.upper()
    if target.calibration is not None and target.calibration.family != family:
        return (
            f"a measured run of {target.calibration.family} models predicts {family} models less "
            f"well: the error bar of {bar:.0%} is the one without a measured step"
        )
    return (
        f"two of three runs of {family} models on {kind}s lie within {bar:.0%} of what one "
        "other run of their stack on that chip predicts this way"
    )


def scores_share(shares: EfficiencyFactors, *, portable: bool) -> float:
    """Return s_a of the selected attention kernel."""
    return shares.portable if portable and shares.portable is not None else shares.scores


# Number of keys per query at which a kernel on Hopper reaches half of its long-sequence speed, and
# its relative speed with a head_dim of 64: as measured on an H100, 16,384 tokens per call, causal,
# sequences of 512 to 32,768 (benchmarks/history/gpu.md).
_HALF_SPEED_KEYS = {"cudnn": 650, PORTABLE: 225}
_NARROW_HEADS = {"cudnn": 0.75, PORTABLE: 0.97}


def attention_speed(target: Target, kernel: str, *, head_dim: int, keys: float) -> float:
    """Return an attention kernel's speed relative to long sequences with a head_dim of 128.

    The formula is k / (k + k_half) in the number of keys, and linear in head_dim between 0, 64 and
    128.

    Args:
      target: the machine; 1 for generations other than Hopper, which were not measured.
      kernel: as `Attention.kernel`, resolved; unmeasured kernels use cuDNN's figures.
      head_dim: width of one head.
      keys: mean number of keys that a query attends to: T / 2 for a causal sequence.
    """
    if generation_of(target.chip) != "hopper":
        return 1.0
    name = kernel if kernel in _HALF_SPEED_KEYS else "cudnn"
    half, narrow = _HALF_SPEED_KEYS[name], _NARROW_HEADS[name]
    wide = min(head_dim / 64, 1) * narrow + max(min(head_dim / 64 - 1, 1), 0) * (1 - narrow)
    return wide * keys / (keys + half)


# -- wave quantization: slowdown of GPU matmuls whose last wave of tiles is not full ---------------
# A GPU computes a matmul [m, n] in tiles, one at a time on each of its multiprocessors. All of them
# wait for the last wave, even if it has few tiles (NVIDIA, "Matrix Multiplication Background User's
# Guide", sections on tile and wave quantization). It is emptier with few rows per microbatch or
# thin tensor-parallel shards.

# cuBLAS's largest tiles, which reach the rates of `efficiency_factors.BARE_MATMUL`.
_TILES = ((256, 128), (128, 256))
# The smallest part of a split contraction (split-K) for one multiprocessor.
_SPLIT = 512


def quantization(config: Config, layout: Layout, target: Target) -> float:
    """Return the time of the layers' matmuls relative to full waves, at least 1.

    1 on a TPU, which has no waves, and for models that are not stacks of layers over tokens.

    The forward pass, input gradient and weight gradient are three matmuls with equal FLOPs.
    """
    facts, processor = Facts(config, layout).of_microbatches, target.chip.processor
    if processor is None or not facts.is_text:
        return 1.0
    ideal = taken = 0.0
    for weight in facts.weights:
        if not (weight.is_matrix and weight.is_layer) or len(weight.shape) < 2:
            continue
        alike, rows, (inputs, outputs) = _product(facts, weight)
        forwards = 1 + facts.recomputes
        for count, m, n, k in (
            (forwards, rows, outputs, inputs),
            (1, rows, inputs, outputs),
            (1, inputs, outputs, rows),
        ):
            flops = count * alike * rows * inputs * outputs
            ideal += flops
            taken += flops * waves(m, n, k, alike, processor.cores)
    return taken / ideal if ideal else 1.0


def waves(m: int, n: int, k: int, alike: int, cores: int) -> float:
    """Return the waves of `alike` matmuls [m, k] x [k, n] in one launch over those of full tiles.

    If there are fewer tiles than multiprocessors, the contraction is split between them (split-K).
    """

    def over(tile: tuple[int, int]) -> float:
        tiles = alike * math.ceil(m / tile[0]) * math.ceil(n / tile[1])
        fractional = alike * m * n / (tile[0] * tile[1])
        if tiles < cores:
            tiles, fractional = (
                x * min(cores // tiles, max(k // _SPLIT, 1)) for x in (tiles, fractional)
            )
        return math.ceil(tiles / cores) * cores / fractional

    return min(map(over, _TILES))


def _product(facts: Facts, weight: Weight) -> tuple[int, int, tuple[int, int]]:
    """Return the matmuls in one launch on a device (its experts), the rows of each, and the two
    dimensions of its weight."""
    placed = facts.layout.sharding_of(facts.layout.weight(weight.axes))
    shape = placed.shard_shape(weight.shape)
    stack, rows, columns = sides(weight.axes)
    alike = math.prod(shape[dim] for dim in stack)
    tokens, experts = facts.B * facts.T, facts.model.experts
    if experts is not None and "experts" in weight.axes:
        tokens = max(tokens * experts.per_token // alike, 1)
    return alike, tokens, (
        math.prod(shape[dim] for dim in rows), math.prod(shape[dim] for dim in columns)
    )  # fmt: skip
