"""Partial reading of an invalid section, so that one error does not hide another."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxtrain.config.errors import UserError


class NotRead(Exception):  # noqa: N818 - whoever asks has nothing to say, which is no error
    """A requested setting had an invalid value, so that results that depend on it are unknown."""


def as_far_as_read(cls: type, values: Mapping[str, Any], unread: Collection[str]) -> Any:
    """Return an instance of a frozen dataclass without validation, with missing fields.

    Args:
      cls: the dataclass; the instance is one of it, and its methods work as far as they can.
      values: of its fields; the others have their defaults.
      unread: fields that raise NotRead where they are asked for.
    """

    def hole(_: Any) -> Any:
        raise NotRead

    holes = type(cls.__name__, (cls,), dict.fromkeys(unread, property(hole)))
    made = object.__new__(holes)
    for field in dataclasses.fields(cls):
        if field.name in unread:
            continue
        if field.name in values:
            value = values[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        object.__setattr__(made, field.name, value)
    return made


def own_refusals(
    cls: type, values: Mapping[str, Any], unread: Collection[str]
) -> tuple[list[str], set[str]]:
    """Return all errors of a dataclass's `__post_init__`, although it raises at the first.

    It is asked again without the fields that it named, until it has nothing more to say: what it
    says of a field that was not written, or was named before, is not said.

    Args:
      cls: the dataclass.
      values: of its fields, each of which fits its annotation.
      unread: fields whose values did not.

    Returns:
      The sentences, and the fields that have no value now: `unread` and those that were named.
    """
    said: list[str] = []
    without = set(unread)
    fields = {field.name for field in dataclasses.fields(cls)}
    while hasattr(cls, "__post_init__"):
        kept = {name: value for name, value in values.items() if name not in without}
        missing = [f.name for f in dataclasses.fields(cls) if is_required(f) and f.name not in kept]
        try:
            as_far_as_read(cls, kept, missing).__post_init__()
        except NotRead:
            return said, without
        except UserError as error:
            sentences = str(error).splitlines()
        except ValueError as error:
            sentences = [f"{cls.__name__}: {error}"]
        else:
            break
        before = len(without)
        for sentence in sentences:
            named = fields & set(re.findall(rf"\b{cls.__name__}\.(\w+)", sentence))
            if not named & without and sentence not in said:
                said.append(sentence)
                without |= named or fields
        if len(without) == before:
            break
    return said, without


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is field.default_factory is dataclasses.MISSING
