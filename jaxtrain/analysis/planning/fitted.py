"""What published runs say of the chips: the fitted constants of `timing`'s formula.

`python -m benchmarks.predictions --fit` fits them anew and prints what they leave unexplained.
"""

import dataclasses
import functools

from jaxtrain.analysis.planning.machines.targets import Target

# The attention kernel that is written for no generation of GPUs.
PORTABLE = "triton"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What published runs on a chip say of it; see `timing`'s formula.

    Attributes:
      products: s_p, the share of the peak that products reach.
      scores: s_a, the share of the peak that attention's products reach.
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
    passes: float = 2.95
    memory: float = 0.85
    slices: float = 0.02
    portable: float | None = None


# Fitted on the 121 rows of benchmarks/published_runs.csv that are fit for it (22 of them were told
# anew since: a fit today moves no share by more than 0.05), but for attention on Hopper and
# Blackwell: cuDNN's kernel at half of the peak, as arXiv 2407.08608 measured it (figures 5 and 6,
# head_dim 128, long sequences). MaxText's TPU runs hide next to nothing of what fsdp moves, and a
# third of what tensor does.
_TPU = functools.partial(Fitted, scores=0.43, shown=0.94, activations=0.65)
_AMPERE = functools.partial(Fitted, scores=0.35, shown=0.63, activations=0.63)
_HOPPER = functools.partial(Fitted, scores=0.50, shown=0.63, activations=0.63, portable=0.18)
FITTED = {
    "v4": _TPU(0.83), "v5e": _TPU(1.0), "v5p": _TPU(0.88), "v6e": _TPU(0.80), "7x": _TPU(0.90),
    "a100": _AMPERE(0.72), "a100-40": _AMPERE(0.72),
    "h100": _HOPPER(0.67), "h200": _HOPPER(0.69), "b200": _HOPPER(0.64),
}  # fmt: skip
# Of a chip without published runs: the least of its kind, and of GPUs of its generation.
_UNKNOWN_TPU, _UNKNOWN_HOPPER, _UNKNOWN_GPU = _TPU(0.80), _HOPPER(0.64), _AMPERE(0.64)

# The half width of an interval that holds two of three published runs of a stack that the fit has
# not seen, on a TPU and on a GPU (the same command prints it); of a chip that none is published of,
# nine of ten on the GPUs.
_ERROR_BARS = {"tpu": 0.06, "gpu": 0.15}
_ERROR_BAR_UNKNOWN = 0.20


def fitted(target: Target) -> Fitted:
    """The shares of a target's chip, or of its kind where nobody has published a run."""
    chip = target.chip
    if chip.name in FITTED:
        return FITTED[chip.name]
    if chip.kind == "tpu":
        return _UNKNOWN_TPU
    # Data-centre GPUs from Hopper on; GeForce boards have instructions of another kind.
    hopper = chip.processor is not None and chip.processor.compute_capability[0] in (9, 10)
    return _UNKNOWN_HOPPER if hopper else _UNKNOWN_GPU


def error_bar(target: Target) -> float:
    """Relative half width of a prediction."""
    known = target.chip.name in FITTED
    return _ERROR_BARS[target.chip.kind] if known else _ERROR_BAR_UNKNOWN


def scores_share(shares: Fitted, *, portable: bool) -> float:
    """s_a of the kernel that runs."""
    return shares.portable if portable and shares.portable is not None else shares.scores
