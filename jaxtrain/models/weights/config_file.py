"""Published config.json: a typed reader that collects unsupported values, and rows of keys.

A row has keys of a config.json and our settings. It is used in both directions, so that an import
and an export cannot disagree: `whole("hidden_size", "embed_dim")` reads the key into the setting
and writes the setting as the key.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxtrain.config.key_table import KeyTable, Only, ignore_keys, read_keys
from jaxtrain.config.values import LARGEST

_MOST_LISTED = 10_000
_LONGEST = 80  # characters of a value in a message
_LISTED = ("layer", "layers", "experts")


class ConfigFile:
    """A config.json, or an object in it; errors are collected rather than raised.

    Attributes:
      content: all keys.
      reasons: a clause for each unsupported value.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.reasons: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        """Read an integer; required without a default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            return self._validate(key, value, "a whole number", 1)
        # Layers and experts are enumerated before anything else can notice that there are not
        # as many.
        most = _MOST_LISTED if key.endswith(_LISTED) else LARGEST
        return value if abs(value) <= most else self._validate(key, value, f"at most {most:,}", 1)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number; required without a default."""
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return self._validate(key, value, "a number", 1.0)

    def flag(self, key: str, default: bool) -> bool:
        """Read a boolean."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        return self._validate(key, value, "true or false", default)

    def table(self, key: str) -> "ConfigFile":
        """Read a nested object, empty if missing; its reasons are this one's."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            value = self._validate(key, value, "an object", {})
        return self.inner(value or {})

    def inner(self, content: Mapping[str, Any]) -> "ConfigFile":
        """Wrap an object that shares this one's reasons."""
        found = ConfigFile(content)
        found.reasons = self.reasons
        return found

    def only(self, key: str, allowed: Iterable[Any], *, default: Any) -> None:
        """Reject other values than these; None, or no such key, means the default."""
        value, allowed = self._value(key, default), list(allowed)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                   for one in allowed):  # fmt: skip
            self._validate(key, value, " or ".join(map(repr, allowed)), None)

    def reject(self, reason: str) -> None:
        """Add a reason, unless it is there already."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        return default if value is None else value

    def _validate(self, key: str, value: Any, allowed: str, instead: Any) -> Any:
        shown = repr(value)
        shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
        found = f"{key} is missing" if value is None else f"{key} = {shown}"
        self.reject(f"{found}; it must be {allowed}")
        return instead


def _nothing(_: Any) -> Mapping[str, Any]:
    return {}


class Row(NamedTuple):
    """Some keys of a config.json and the settings that they correspond to.

    Attributes:
      keys: the entry of each key in the family's key table.
      read: returns the settings of a config.json; collects values that are not
        supported.
      write: returns the keys of a model's config.json; None: it is not of this family.
    """

    keys: KeyTable = {}
    read: Callable[[ConfigFile], Mapping[str, Any]] = _nothing
    write: Callable[[Any], Mapping[str, Any] | None] = _nothing


def integer(key: str, setting: str, default: int | None = None, *, null: bool = False) -> Row:
    """Return the row of an integer.

    Args:
      key: in config.json.
      setting: of our sizes.
      default: the value of a missing key; None: the key is required.
      null: whether null is read as None, and a missing key with default None too.
    """
    return _value(ConfigFile.integer, key, setting, default, null=null)


def number(key: str, setting: str, default: float | None = None, *, null: bool = False) -> Row:
    """Return the row of a number; the arguments are those of `integer`."""
    return _value(ConfigFile.number, key, setting, default, null=null)


def flag(key: str, setting: str, default: bool) -> Row:
    """Return the row of a boolean; the arguments are those of `integer`."""
    return _value(ConfigFile.flag, key, setting, default, null=False)


def _value(
    read: Callable[[ConfigFile, str, Any], Any], key: str, setting: str, default: Any, *, null: bool
) -> Row:
    def read_value(config: ConfigFile) -> Mapping[str, Any]:
        is_null = null and config.content.get(key, default) is None
        return {setting: None if is_null else read(config, key, default)}

    return Row(read_keys(key), read_value, lambda model: {key: getattr(model, setting)})


_FIRST = object()


def constant(key: str, value: Any, *others: Any, default: Any = _FIRST) -> Row:
    """Return the row of a key that has the same value in all models of the family.

    Args:
      key: in config.json.
      value: the written value.
      others: values that are read as well.
      default: the value that a missing key means; left out: `value`.
    """
    entry = Only((value, *others), value if default is _FIRST else default)
    return Row({key: entry}, write=lambda _: {key: value})


def ignore(reason: str, *keys: str) -> Row:
    """Return the row of keys that change nothing; `reason` says why."""
    return Row(ignore_keys(reason, *keys))


def write_only(**content: Any) -> Row:
    """Return the row of keys that are written with these values; their entries are elsewhere."""
    return Row(write=lambda _: content)


def derive(
    key: str,
    expected: Callable[[ConfigFile], Any],
    write: Callable[[Any], Any] | None = None,
    *,
    default: Any = None,
) -> Row:
    """Return the row of a key that follows from others; another value is rejected.

    Args:
      key: in config.json.
      expected: the value that follows from the other keys.
      write: the value for a model; None: the key is not written.
      default: the value that a missing key means; None: `expected`.
    """

    def read(config: ConfigFile) -> Mapping[str, Any]:
        value = expected(config)
        config.only(key, [value], default=value if default is None else default)
        return {}

    return Row(
        read_keys(key), read, _nothing if write is None else lambda model: {key: write(model)}
    )


def holds(**settings: Any) -> Row:
    """Return the row of settings that all models of the family share and that have no key."""
    shared = settings.items()
    return Row(
        read=lambda _: settings,
        write=requires(lambda model: all(getattr(model, k) == v for k, v in shared)).write,
    )


def requires(is_member: Callable[[Any], bool]) -> Row:
    """Return a row without keys that writes only models for which `is_member` is true."""
    return Row(write=lambda model: {} if is_member(model) else None)


def read_rows(rows: Iterable[Row], config: ConfigFile) -> dict[str, Any]:
    """Return the settings of all rows; a later row overrides an earlier one."""
    return {name: value for row in rows for name, value in row.read(config).items()}


def write_rows(rows: Iterable[Row], model: Any) -> dict[str, Any] | None:
    """Return the keys of all rows; None: the model is not of the family."""
    content: dict[str, Any] = {}
    for row in rows:
        own = row.write(model)
        if own is None:
            return None
        content |= own
    return content


def _read_classes(config: ConfigFile) -> Mapping[str, Any]:
    names = config.table("id2label").content
    # Two if neither key is set, as in transformers.
    return {"num_classes": len(names) if names else config.integer("num_labels", 2)}


def _write_classes(model: Any) -> Mapping[str, Any]:
    names = {str(number): f"LABEL_{number}" for number in range(model.num_classes)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}


# A classifier's labels; `config_keys.CLASSES` has the entries.
CLASSES = Row(read=_read_classes, write=_write_classes)
