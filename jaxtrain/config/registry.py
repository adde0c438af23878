"""The registered settings classes, by their names in a gin file."""

import dataclasses
import typing

CONFIGURABLES: dict[str, type] = {}

T = typing.TypeVar("T", bound=type)


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
