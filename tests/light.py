"""Imported first, lets a program take single modules of jaxtrain without what the package imports.

The channel between processes needs the standard library alone; JAX, Flax and Orbax would take each
of a test's processes seconds to import.
"""

import sys
import types
from pathlib import Path

_package = types.ModuleType("jaxtrain")
_package.__path__ = [str(Path(__file__).parent.parent / "jaxtrain")]
sys.modules["jaxtrain"] = _package
