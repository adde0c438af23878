"""Writer of gin text: frozen dataclasses to a config.gin that reads back equal."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import sections
from jaxtrain.config.registry import is_known
from jaxtrain.config.values import by_name, hints, resolve_paths, settings_of


def to_gin(root: Any, *, absolute: bool = False) -> str:
    """Return all values of the resolved tree as gin text, which reads back equal.

    Args:
      root: as in `load`.
      absolute: paths on this machine are written from its root on: the text then means the same in
        whatever folder it is read.
    """
    imports = [f"import {module}" for module in root.imports]
    text = format_gin([getattr(root, name) for name in sections(type(root))], absolute=absolute)
    return "\n".join([*imports, "", text]) if imports else text


def changes(root: Any) -> str:
    """Return the values of the resolved tree that differ from their defaults, as gin text.

    Args:
      root: as in `load`.
    """
    return format_gin([getattr(root, name) for name in sections(type(root))], defaults=False)


def format_gin(instances: Sequence[Any], *, absolute: bool = False, defaults: bool = True) -> str:
    """Return registered dataclasses as gin text, with all their values and those they refer to.

    Args:
      instances: one of each class.
      absolute: as in `to_gin`.
      defaults: write also values that equal their defaults.

    Raises:
      UserError: one is of a class that is not registered.
    """
    blocks: dict[str, list[str]] = {}
    for instance in instances:
        _format_block(instance, blocks, absolute, defaults)
    filled = filter(None, blocks.values())
    return "\n".join(line for block in filled for line in (*block, "")).rstrip() + "\n"


def _format_block(
    section: Any, blocks: dict[str, list[str]], absolute: bool, defaults: bool
) -> None:
    name = type(section).__name__
    if not is_known(name):
        raise UserError(
            f"{name} has no name in a configuration: put @configurable (of jaxtrain.config) over "
            f"`class {name}`, above its @dataclass"
        )
    lines = blocks.setdefault(name, [])
    takes = hints(type(section))
    for bound, field in settings_of(type(section)).items():
        value, mark = getattr(section, field.name), by_name(takes[field.name])
        if absolute:
            value = resolve_paths(value, takes[field.name])
        if mark is None:
            written = _format_value(value, blocks, absolute, defaults)
        else:
            written = repr(mark.name_of(type(value)))
            _format_block(value, blocks, absolute, defaults)
        default = _default_of(field)
        is_default = value == default if mark is None else type(value) is type(default)
        if defaults or not is_default:
            lines.append(f"{name}.{bound} = {written}")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _format_value(value: Any, blocks: dict[str, list[str]], absolute: bool, defaults: bool) -> str:
    if dataclasses.is_dataclass(value):
        _format_block(value, blocks, absolute, defaults)
        return f"@{type(value).__name__}()"
    if isinstance(value, tuple):
        items = [_format_value(item, blocks, absolute, defaults) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    # NumPy's numbers are instances too, but have a different repr.
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"  # read, it is rejected with its real type
    return repr(value)
