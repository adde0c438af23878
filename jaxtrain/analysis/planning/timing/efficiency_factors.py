"""Efficiency factors of the step time, fitted on published runs, and their error bars.

`python -m benchmarks.predictions` fits them anew and predicts each stack without its own runs.
"""

import dataclasses
import functools
from typing import Literal

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.models.model import Model
from jaxtrain.parallel.chips import Chip

# Kinds of models whose predictions share an error bar.
Family = Literal["dense", "mixture", "image"]

# The attention kernel that is written for no generation of GPUs.
PORTABLE = "triton"


@dataclasses.dataclass(frozen=True)
class EfficiencyFactors:
    """What published runs on a chip say of it; see `timing`'s formula.

    Attributes:
      products: s_p, the share of the peak that products reach.
      scores: s_a, the share of the peak that attention's products reach: on Hopper and later, of
        long sequences with a head_dim of 128 (`attention_share` has the others).
      shown: k, the share of weights' and gradients' traffic that computation does not hide.
      activations: t, the share of the time of tensor-parallel collectives that is waited for.
      passes: c, how often what products read and write goes over the memory, with the elementwise
        work between them.
      memory: h, the share of the memory's bandwidth that this reaches.
      slices: g, what each doubling of the slices adds, waiting for the slowest.
      portable: s_a in a kernel that is not written for this generation ('triton' on Hopper, whose
        own instructions it leaves unused); None: there is no such difference.
    """

    products: float
    scores: float
    shown: float
    activations: float
    passes: float = 3.22
    memory: float = 0.85
    slices: float = 0.018
    portable: float | None = None


# The part of the peak that bare bfloat16 matmuls of the best sizes reach, as others measured them:
# GPUs in stas00/ml-engineering, "Maximum Achievable Matmul FLOPS", H200 as H100 there, GB300 as
# GB200; TPUs of 8192^3: v6e 827 of 918, 7x 956 of 1,153 TFLOP/s. Nobody has published those of v4,
# v5e, v5p and RTX 3090: 0.95 and 0.80 are assumed.
BARE_MATMUL = {
    "v4": 0.95, "v5e": 0.95, "v5p": 0.95, "v6e": 0.90, "7x": 0.83,
    "a100": 0.869, "a100-40": 0.869, "h100": 0.803, "h200": 0.803,
    "b200": 0.776, "b300": 0.786, "gb200": 0.729, "gb300": 0.729, "rtx3090": 0.80,
    "mi300x": 0.514,
}  # fmt: skip
_BARE_UNKNOWN = 0.80
_WITHOUT_RUNS = {"mi300x"}  # of these, none of the runs of benchmarks/*_runs.csv
# What is left of that inside a training step: fitted, one factor for TPUs and one for GPUs.
IN_STEP = {"tpu": 0.93, "gpu": 0.84}

# Fitted on the rows of benchmarks/*_runs.csv that are fit for it, but for attention on Hopper and
# Blackwell: cuDNN's kernel and Pallas's ('triton'), forward and backward, as measured on an H100
# (benchmarks/history/gpu.md); arXiv 2407.08608 has the same of cuDNN (figures 5 and 6).
_KINDS = {
    "tpu": functools.partial(EfficiencyFactors, scores=0.42, shown=0.62, activations=0.66),
    "ampere": functools.partial(EfficiencyFactors, scores=0.38, shown=0.35, activations=0.82),
    "hopper": functools.partial(
        EfficiencyFactors, scores=0.60, shown=0.35, activations=0.82, portable=0.155
    ),
}  # fmt: skip

# Half the width of the interval that holds two of three runs of a stack that the fit has not seen,
# each stack counting alike: by leave-one-stack-out, by family and kind of chip. No images on TPUs
# were published: as on GPUs.
_ERROR_BARS: dict[tuple[Family, str], float] = {
    ("dense", "tpu"): 0.12, ("dense", "gpu"): 0.20,
    ("mixture", "tpu"): 0.14, ("mixture", "gpu"): 0.34,
    ("image", "tpu"): 0.34, ("image", "gpu"): 0.34,
}  # fmt: skip
# The same where one run of the stack was measured on that chip and is of the same family: each run
# of a stack on a chip, by the measured step of every other (benchmarks.calibrated). Of mixtures it
# says less than the fit: their layouts differ by more than their stacks. No stack published several
# images on TPUs: as without a measured step.
_CALIBRATED_BARS: dict[tuple[Family, str], float] = {
    ("dense", "tpu"): 0.08, ("dense", "gpu"): 0.16,
    ("mixture", "tpu"): 0.37, ("mixture", "gpu"): 0.37,
    ("image", "tpu"): 0.34, ("image", "gpu"): 0.19,
}  # fmt: skip
# Of chips that no run is published of, by leave-one-chip-out.
_ERROR_BAR_UNKNOWN = 0.24


def efficiency_of(target: Target) -> EfficiencyFactors:
    """The factors of a target's chip: those of its kind and generation, with its bare matmuls."""
    chip = target.chip
    products = BARE_MATMUL.get(chip.name, _BARE_UNKNOWN) * IN_STEP.get(chip.kind, IN_STEP["gpu"])
    return _KINDS[generation_of(chip)](products)


def generation_of(chip: Chip) -> Literal["tpu", "ampere", "hopper"]:
    """Return which attention kernels a chip has: those of TPUs, of Ampere, or of Hopper.

    Hopper stands for data-center GPUs from it on, Ampere for every other GPU: GeForce boards have
    no such instructions.
    """
    if chip.kind == "tpu":
        return "tpu"
    hopper = chip.processor is not None and chip.processor.compute_capability[0] in (9, 10)
    return "hopper" if hopper else "ampere"


def is_known(target: Target) -> bool:
    """Whether the fit has runs of a target's chip."""
    return target.chip.name in BARE_MATMUL.keys() - _WITHOUT_RUNS


def family_of(model: Model) -> Family:
    """Which error bar a model's predictions have."""
    if model.experts is not None:
        return "mixture"
    return "image" if model.inputs == "images" else "dense"


def error_bar(target: Target, family: Family = "dense") -> float:
    """Relative half width of a prediction for a stack that is not among the fitted ones.

    Of a target that was calibrated by a run of the same family it is the one with that run known.
    """
    kind = "tpu" if target.chip.kind == "tpu" else "gpu"
    if target.calibration is not None and target.calibration.family == family:
        return _CALIBRATED_BARS[family, kind]
    bar = _ERROR_BARS[family, kind]
    return bar if is_known(target) else max(bar, _ERROR_BAR_UNKNOWN)


def bar_in_words(target: Target, family: Family) -> str:
    """Return what the error bar of a calibrated target says, for the plan's assumptions."""
    bar, kind = error_bar(target, family), target.chip.kind.upper()
    if target.calibration is not None and target.calibration.family != family:
        return (
            f"what was measured is a {target.calibration.family} model, which says less of a "
            f"{family} model: the error bar of {bar:.0%} is that without a measured step"
        )
    return (
        f"of a {family} model on {kind}s two of three runs lie within {bar:.0%} of what one other "
        "run of their stack on that chip predicts so"
    )


def scores_share(shares: EfficiencyFactors, *, portable: bool) -> float:
    """s_a of the kernel that runs."""
    return shares.portable if portable and shares.portable is not None else shares.scores


# Keys a query sees with which a kernel on Hopper reaches half of what it does with many, and what
# is left of that with a head_dim of 64: as measured on an H100, 16,384 tokens a call, causal,
# sequences of 512 to 32,768 (benchmarks/history/gpu.md).
_HALF_SPEED_KEYS = {"cudnn": 650, PORTABLE: 225}
_NARROW_HEADS = {"cudnn": 0.75, PORTABLE: 0.97}


def attention_speed(target: Target, kernel: str, *, head_dim: int, keys: float) -> float:
    """What a kernel reaches of its own speed with long sequences and a head_dim of 128.

    The formula is k / (k + k_half) for the keys, and linear in head_dim between 0, 64 and 128.

    Args:
      target: the machine; of generations other than Hopper nothing is measured: 1.
      kernel: as `Attention.kernel`, resolved; of those not measured, cuDNN's figures.
      head_dim: width of one head.
      keys: that a query sees, in the mean: T / 2 of a causal sequence.
    """
    if generation_of(target.chip) != "hopper":
        return 1.0
    name = kernel if kernel in _HALF_SPEED_KEYS else "cudnn"
    half, narrow = _HALF_SPEED_KEYS[name], _NARROW_HEADS[name]
    wide = min(head_dim / 64, 1) * narrow + max(min(head_dim / 64 - 1, 1), 0) * (1 - narrow)
    return wide * keys / (keys + half)
