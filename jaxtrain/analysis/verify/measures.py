"""Measures of verification: differences of numbers, arrays and bits, with their limits."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# float32 sums in another order, relative.
EQUAL = 1e-5
# The largest relative error of rounding to a dtype.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-9}
ROUNDINGS = 8  # of each product's operands and result, forward and backward
# The error of a product of 8 bits relative to its norm, with a factor of 2 to spare; those of the
# two operands are independent. float8: rounding to 2 bits behind the leading one (e5m2) errs by
# 0.053 of a number in the root mean square over an octave, to 3 bits (e4m3) by half of that. int8:
# a step is 1/127 of a row's largest number, rounding errs by 1/sqrt(12) of a step in the root mean
# square, and the largest of 2^12 normal numbers is sqrt(2 ln 2^12) = 4.1 of theirs.
NARROW = {
    "float8": 2 * math.hypot(0.053, 0.0265),
    "int8": 2 * math.hypot(1, 1) * math.sqrt(2 * math.log(2**12)) / 127 / math.sqrt(12),
}
# Arrays whose gradients are small compared with the others' are compared on this fraction of the
# largest: some are zero but for rounding, such as those of a bias that softmax cancels.
FLOOR = 1e-3

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Measurement of a proof.

    Attributes:
      measured: the largest difference.
      limit: what it must not exceed.
      detail: which difference that was, and the others.
    """

    measured: float
    limit: float
    detail: str


@dataclasses.dataclass(frozen=True)
class NotChecked:
    """Verdict of a claim that was not checked here, neither passed nor failed, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """Claim to verify.

    Attributes:
      proof: its short name, stable.
      what: what is compared, in words.
      prove: runs it.
    """

    proof: str
    what: str
    prove: Callable[[], Finding | NotChecked]


@dataclasses.dataclass(frozen=True)
class Step:
    """Result of a program's first step, with parameters in the model's order of layers.

    Attributes:
      loss: mean over the targets that count.
      gradients: of every parameter, by name.
      statistics: the running statistics after it, by name.
    """

    loss: float
    gradients: Arrays
    statistics: Arrays


def equal(found: Step, expected: Step) -> Finding:
    """Compare loss, gradients and statistics up to float32 rounding; the worst is measured."""
    loss = relative(found.loss, expected.loss)
    gradients, name = worst(found.gradients, expected.gradients)
    statistics, _ = worst(found.statistics, expected.statistics)
    detail = f"loss {loss:.1e}, gradients {gradients:.1e} ({name})"
    if expected.statistics:
        detail += f", statistics {statistics:.1e}"
    return Finding(max(loss, gradients, statistics), EQUAL, detail)


def relative(found: float, expected: float) -> float:
    """Return |found - expected| / |expected|; infinite where that is not a number."""
    error = abs(found - expected) / abs(expected)
    return error if np.isfinite(error) else np.inf


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two arrays have one dtype and the same bytes: -0.0 is not 0.0, a NaN is itself."""
    found, expected = np.asarray(found), np.asarray(expected)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def bits(different: list[str], count: int, of: str) -> Finding:
    """Return the number of items that are not bitwise equal, and name the first; none may differ.

    Args:
      different: the names of those that differ.
      count: how many were compared.
      of: what they are called, in the plural.
    """
    first = f": {different[0]}" if different else ""
    return Finding(len(different), 0, f"{len(different)} of {count} {of} differ{first}")


def worst(found: Arrays, expected: Arrays) -> tuple[float, str]:
    """Return the largest difference of any array, relative to its largest entry, and its name.

    An array whose entries are all under 1/1000 of the largest of all counts relative to that.
    """
    assert found.keys() == expected.keys(), "other arrays"
    top = max((np.abs(x).max() for x in expected.values()), default=0.0)
    errors = {}
    for name, value in expected.items():
        size = max(np.abs(value).max(), FLOOR * top)
        difference = np.abs(found[name].astype(np.float64) - value).max()
        # nan_to_num: what is not a number is no small difference.
        errors[name] = float(np.nan_to_num(difference / size if size else difference, nan=np.inf))
    name = max(errors, key=errors.__getitem__, default="")
    return errors.get(name, 0.0), name


def relative_norm(found: Arrays, expected: Arrays) -> float:
    """Return |found - expected| / |expected| over all arrays together."""
    difference = sum(np.square(found[n].astype(np.float64) - x).sum() for n, x in expected.items())
    size = sum(np.square(x.astype(np.float64)).sum() for x in expected.values())
    return float(np.nan_to_num(np.sqrt(difference / size), nan=np.inf))


def band(dtype: str, matmul: str, products: int) -> float:
    """Return the tolerance for a gradient, relative to the norm of the float32 one.

    Rounding errors of the matmuls along the path are independent and add up like a random walk.

    Args:
      dtype: what is computed in, or kept in; float32 rounds nothing.
      matmul: Precision.matmul.
      products: on the way.
    """
    of_one = math.hypot(ROUNDINGS * ROUNDING.get(dtype, 0.0), NARROW.get(matmul, 0.0))
    return of_one * products**0.5
