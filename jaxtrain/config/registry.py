"""The registered settings classes, by their names in a gin file, and classes by their `name`."""

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator

CONFIGURABLES: dict[str, type] = {}

T = typing.TypeVar("T", bound=type)
C = typing.TypeVar("C")


def configurable(cls: T) -> T:
    """Registers a frozen dataclass under its own name, so that gin bindings can set its fields."""
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    CONFIGURABLES[cls.__name__] = cls
    return cls


def is_configurable(cls: type) -> bool:
    """Whether gin bindings can set a class's fields."""
    return CONFIGURABLES.get(cls.__name__) is cls


def is_known(name: str) -> bool:
    """Whether gin bindings can set fields of a class of this name, were it defined again since."""
    return name in CONFIGURABLES


def named_subclasses(base: type[C], package: types.ModuleType) -> dict[str, type[C]]:
    """The classes under `base` by their `name`: those of a package, and of every module that is
    imported so far.

    Abstract ones and those that only inherit a name have none. Of two that are called alike the
    later counts: a notebook's cell was run again.
    """
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return {
        vars(cls)["name"]: cls
        for cls in _below(base)
        if "name" in vars(cls) and not inspect.isabstract(cls)
    }


def _below(cls: type[C]) -> Iterator[type[C]]:
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)
