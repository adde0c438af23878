"""Registry of settings classes by gin name, and of implementations by `name`."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Iterator

CONFIGURABLES: dict[str, type] = {}

T = typing.TypeVar("T", bound=type)
C = typing.TypeVar("C")


def configurable(cls: T) -> T:
    """Registers a frozen dataclass under its own name, so that gin bindings can set its fields."""
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    if any(re.search(r"\bdict\b", str(field.type)) for field in dataclasses.fields(cls)):
        # Figures of a plan are cached by configuration, and a dict has no hash of its own.
        setattr(cls, "__hash__", _hash_settings)  # noqa: B010
    CONFIGURABLES[cls.__name__] = cls
    return cls


def _hash_settings(settings: typing.Any) -> int:
    """The hash of a dataclass whose fields may hold dicts."""
    return hash(tuple(_hashable(getattr(settings, f.name)) for f in dataclasses.fields(settings)))


def _hashable(value: typing.Any) -> typing.Any:
    """A value by which equal ones have the same hash, whatever the order of their dicts."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(one)) for key, one in value.items())
    return value


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
