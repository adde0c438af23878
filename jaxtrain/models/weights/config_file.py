"""Typed reader of a published config.json, which collects what is not supported."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.config.values import LARGEST

_MOST_LISTED = 10_000
_LONGEST = 80  # characters of a value in a message
_LISTED = ("layer", "layers", "experts")


class ConfigFile:
    """A config.json, or an object in it; errors are collected rather than raised.

    Attributes:
      content: all keys.
      reasons: a clause for each value that is not supported.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.reasons: list[str] = []

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; required where it has no default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            return self._validate(key, value, "a whole number", 1)
        # Layers and experts are listed one by one before anything else can tell that there are not
        # as many.
        most = _MOST_LISTED if key.endswith(_LISTED) else LARGEST
        return value if abs(value) <= most else self._validate(key, value, f"at most {most:,}", 1)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; required where it has no default."""
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return self._validate(key, value, "a number", 1.0)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        return self._validate(key, value, "true or false", default)

    def table(self, key: str) -> "ConfigFile":
        """An object of its own, empty where there is none; its reasons are this one's."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            value = self._validate(key, value, "an object", {})
        return self.inner(value or {})

    def inner(self, content: Mapping[str, Any]) -> "ConfigFile":
        """An object that collects its reasons with this one's."""
        found = ConfigFile(content)
        found.reasons = self.reasons
        return found

    def only(self, key: str, allowed: Iterable[Any], *, default: Any) -> None:
        """Rejects what is none of these; None, or no such key, means the default."""
        value, allowed = self._value(key, default), list(allowed)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                   for one in allowed):  # fmt: skip
            self._validate(key, value, " or ".join(map(repr, allowed)), None)

    def reject(self, reason: str) -> None:
        """One reason more, unless it is there already."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        return default if value is None else value

    def _validate(self, key: str, value: Any, allowed: str, instead: Any) -> Any:
        shown = repr(value)
        shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
        found = f"{key} is missing" if value is None else f"{key} = {shown}"
        self.reject(f"{found}; here it is {allowed}")
        return instead
