"""Architectures: one file each, a frozen dataclass of sizes and a pure module.

`from jaxtrain.models import GPT, Model` finds the sizes of every architecture, and the protocols of
`jaxtrain.models.model`, by their names.
"""

import dataclasses
import importlib
import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    # Loaded lazily: they import JAX. Module names are lowercase.
    if name[:1].isupper():
        interface = importlib.import_module(f"{__name__}.model")
        if name in interface.__all__:
            return vars(interface)[name]
        for info in pkgutil.walk_packages(__path__, __name__ + "."):
            found = vars(importlib.import_module(info.name)).get(name)
            is_own = isinstance(found, type) and found.__module__ == info.name
            if is_own and dataclasses.is_dataclass(found) and "build" in dir(found):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
