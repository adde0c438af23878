"""Error measures and tolerances of `jaxtrain verify`: relative errors and bitwise equality."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Relative error of float32 sums in a different order.
EQUAL = 1e-5
# The largest relative error of rounding to a dtype.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-9}
ROUNDINGS = 8  # per matmul: its operands and result, forward and backward
# Error of an 8-bit matmul relative to its norm, with a safety factor of 2. The errors of the two
# operands are independent. float8: rounding to 2 mantissa bits (e5m2) has a relative RMS error of
# 0.053 over an octave, rounding to 3 bits (e4m3) half of that. int8: a quantization step is 1/127
# of the largest value of a row, the RMS rounding error is 1/sqrt(12) of a step, and the largest of
# 2^12 normal samples is sqrt(2 ln 2^12) = 4.1 standard deviations.
NARROW = {
    "float8": 2 * math.hypot(0.053, 0.0265),
    "int8": 2 * math.hypot(1, 1) * math.sqrt(2 * math.log(2**12)) / 127 / math.sqrt(12),
}
# Errors of small gradients are relative to this fraction of the largest gradient instead. Some
# gradients are zero except for rounding, such as those of a bias that softmax cancels.
FLOOR = 1e-3

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Measured difference of a proof and its limit.

    Attributes:
      measured: the largest difference.
      limit: the tolerance.
      detail: a description of the largest difference and the others.
    """

    measured: float
    limit: float
    detail: str


@dataclasses.dataclass(frozen=True)
class NotChecked:
    """Result of a claim that was not checked, neither passed nor failed, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """Claim to verify.

    Attributes:
      proof: the short, stable name.
      what: a description of the comparison.
      prove: the function that runs the comparison.
    """

    proof: str
    what: str
    prove: Callable[[], Finding | NotChecked]


@dataclasses.dataclass(frozen=True)
class Step:
    """Result of a program's first step, with parameters in the model's order of layers.

    Attributes:
      loss: the mean over the targets with loss mask 1.
      gradients: the gradient of every parameter, by name.
      statistics: the running statistics after the step, by name.
    """

    loss: float
    gradients: Arrays
    statistics: Arrays


def equal(found: Step, expected: Step) -> Finding:
    """Compare loss, gradients and statistics up to float32 rounding; return the worst error."""
    loss = relative(found.loss, expected.loss)
    gradients, name = worst(found.gradients, expected.gradients)
    statistics, _ = worst(found.statistics, expected.statistics)
    detail = f"loss {loss:.1e}, gradients {gradients:.1e} ({name})"
    if expected.statistics:
        detail += f", statistics {statistics:.1e}"
    return Finding(max(loss, gradients, statistics), EQUAL, detail)


def relative(found: float, expected: float) -> float:
    """Return |found - expected| / |expected|, with infinity for NaN."""
    error = abs(found - expected) / abs(expected)
    return error if np.isfinite(error) else np.inf


def same_bits(found: Any, expected: Any) -> bool:
    """Return whether two arrays are bitwise equal: -0.0 differs from 0.0, a NaN equals itself."""
    found, expected = np.asarray(found), np.asarray(expected)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def bits(different: list[str], count: int, of: str) -> Finding:
    """Return a finding with the number of items that are not bitwise equal; the limit is 0.

    Args:
      different: the names of the items that differ.
      count: the number of compared items.
      of: a plural noun for the items.
    """
    first = f": {different[0]}" if different else ""
    return Finding(len(different), 0, f"{len(different)} of {count} {of} differ{first}")


def worst(found: Arrays, expected: Arrays) -> tuple[float, str]:
    """Return the largest error of any array, relative to its largest element, and its name.

    For an array with all elements below 1/1000 of the overall maximum, the error is relative to
    1/1000 of the overall maximum.
    """
    assert found.keys() == expected.keys(), "other arrays"
    top = max((np.abs(x).max() for x in expected.values()), default=0.0)
    errors = {}
    for name, value in expected.items():
        size = max(np.abs(value).max(), FLOOR * top)
        difference = np.abs(found[name].astype(np.float64) - value).max()
        # nan_to_num: count a NaN as an infinite error.
        errors[name] = float(np.nan_to_num(difference / size if size else difference, nan=np.inf))
    name = max(errors, key=errors.__getitem__, default="")
    return errors.get(name, 0.0), name


def relative_norm(found: Arrays, expected: Arrays) -> float:
    """Return |found - expected| / |expected| over all arrays together."""
    difference = sum(np.square(found[n].astype(np.float64) - x).sum() for n, x in expected.items())
    size = sum(np.square(x.astype(np.float64)).sum() for x in expected.values())
    return float(np.nan_to_num(np.sqrt(difference / size), nan=np.inf))


def band(dtype: str, matmul: str, products: int) -> float:
    """Return the tolerance of a gradient, relative to the norm of the float32 gradient.

    Rounding errors of successive matmuls are independent and add up like a random walk.

    Args:
      dtype: the compute or storage dtype; float32 adds no rounding error.
      matmul: Precision.matmul.
      products: the number of matmuls.
    """
    of_one = math.hypot(ROUNDINGS * ROUNDING.get(dtype, 0.0), NARROW.get(matmul, 0.0))
    return of_one * products**0.5
