"""Generator of docs/bindings.md: every gin binding, from the settings' docstrings."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

import jaxtrain.data
import jaxtrain.models
import jaxtrain.training.objectives
from jaxtrain.config import reader
from jaxtrain.config.registry import is_configurable
from jaxtrain.config.values import by_name, hints, settings_of, strip_mark
from jaxtrain.models.model import Model
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.settings import Config, Data

_HEAD = """\
# Every binding

What a `.gin` file or `-b` can set, made by `make docs` out of the settings' docstrings.
What has no default has to be bound. Syntax and rules: [configs](configs.md).
"""


def sections() -> list[type]:
    """Return the settings classes that every configuration has, in order."""
    return list(reader.sections(Config).values())


def models() -> list[type]:
    """Return the settings classes that `Train.model` takes."""
    return sorted(_settings_in(jaxtrain.models, "inputs"), key=lambda one: one.__name__.lower())


def sources() -> list[type]:
    """Return the settings classes that `Train.data` takes."""
    return sorted(_settings_in(jaxtrain.data, "abstract_batch"), key=lambda one: one.__name__)


def parts_of_sources() -> list[type]:
    """Return the settings classes nested in the settings of data sources."""
    found = {
        part
        for source in sources()
        for annotation in hints(source).values()
        for part in (strip_mark(annotation), *typing.get_args(strip_mark(annotation)))
        if dataclasses.is_dataclass(part) and part not in sources()
    }
    return sorted(found, key=lambda one: one.__name__)


def patterns() -> list[type]:
    """Return the settings classes that a model's `attention_pattern` takes."""
    return sorted(Pattern.__subclasses__(), key=lambda one: one.__name__)


def objectives() -> list[type]:
    """Return the settings classes that `Train.objective` takes."""
    found = _settings_in(jaxtrain.training.objectives, "minimized")
    return sorted(found, key=lambda one: one.__name__)


def page() -> str:
    """Return the whole page as Markdown."""
    groups: dict[str, list[type]] = {
        "Sections": sections(),
        "Update rules, for `Optimizer.name`": list(rules().values()),
        "Models, for `Train.model`": models(),
        "Patterns, for `GPT.attention_pattern` and `Llama.attention_pattern`": patterns(),
        "Objectives, for `Train.objective`": objectives(),
        "Data, for `Train.data`": sources(),
        "Parts of data": parts_of_sources(),
    }
    parts = [_HEAD]
    for title, classes in groups.items():
        links = " · ".join(f"[{cls.__name__}](#{cls.__name__.lower()})" for cls in classes)
        parts.append(_fold(f"{title}: {links}") + "\n")
    parts += [_section(cls) for classes in groups.values() for cls in classes]
    return "\n".join(parts)


def meanings(cls: type) -> dict[str, str]:
    """Return the description of each field, from the `Attributes:` of a class and its bases.

    Raises:
      ValueError: a field has no description, or a described name is not a field.
    """
    found: dict[str, str] = {}
    for base in reversed([one for one in cls.__mro__ if "__dataclass_fields__" in vars(one)]):
        _, _, attributes = _docstring(base).partition("\nAttributes:\n")
        for entry in re.split(r"\n(?=  \S)", "\n" + attributes)[1:]:
            names, _, meaning = " ".join(entry.split()).partition(": ")
            found |= dict.fromkeys(names.split(", "), meaning)
    fields = {field.name for field in dataclasses.fields(cls)}
    wrong = sorted(fields ^ found.keys()) + [name for name in found if not found[name]]
    if wrong:
        raise ValueError(f"{cls.__name__}: fields and 'Attributes:' differ in {', '.join(wrong)}")
    return found


def _settings_in(package: types.ModuleType, member: str) -> Iterator[type]:
    """Yield the settings classes with this member in the modules of a package, by module."""
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        for cls in vars(module).values():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if own and is_configurable(cls) and member in dir(cls):
                yield cls


def _section(cls: type) -> str:
    purpose = " ".join(_docstring(cls).partition("\nAttributes:\n")[0].split())
    takes, texts = hints(cls), meanings(cls)
    rows = [
        f"| `{cls.__name__}.{bound}` | {_takes(takes[field.name])} | "
        f"{_default(field, takes[field.name])} | {texts[field.name].replace('|', chr(92) + '|')} |"
        for bound, field in settings_of(cls).items()
    ]
    head = ["| binding | takes | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {cls.__name__}\n\n{_fold(purpose)}\n", *head, *rows, ""])


def _fold(prose: str) -> str:
    return "\n".join(textwrap.wrap(prose, 120, break_long_words=False, break_on_hyphens=False))


def _docstring(cls: type) -> str:
    return inspect.getdoc(cls) or ""


def _takes(annotation: Any) -> str:
    """Return a readable description of a type annotation that lists all choices."""
    mark = by_name(annotation)
    if mark is not None:
        return ", ".join(f"`{name!r}`" for name in mark.choices())
    annotation = strip_mark(annotation)
    if annotation in (Model, Data, Objective):
        classes = {Model: models, Data: sources, Objective: objectives}[annotation]()
        return ", ".join(f"`@{cls.__name__}()`" for cls in classes)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{choice!r}`" for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_takes(part) for part in typing.get_args(annotation))
    if annotation is bool:
        return "`True`, `False`"
    if annotation is type(None):
        return "`None`"
    return annotation.__name__ if isinstance(annotation, type) else f"`{annotation}`"


def _default(field: dataclasses.Field[Any], annotation: Any) -> str:
    mark = by_name(annotation)
    if mark is not None:
        return f"`{mark.name_of(type(field.default))!r}`"
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return ""


if __name__ == "__main__":
    sys.stdout.write(page())
