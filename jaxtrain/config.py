"""Reads .gin files into frozen dataclasses and refuses what does not fit.

gin's grammar with four rules on top: a binding names a field of a registered dataclass, its value
fits the field's annotation, every binding is used, and the resolved tree can be printed and read
again. This is the only module that imports gin, and it uses gin's parser alone: there is no global
registry of bindings, so any number of configurations live side by side.
"""

import dataclasses
import importlib
import io
import re
import tokenize
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from jaxtrain.errors import UserError, did_you_mean
from jaxtrain.files import refused_path
from jaxtrain.values import check_value, located

_CONFIGURABLES: dict[str, type] = {}

T = typing.TypeVar("T", bound=type)


def configurable(cls: T) -> T:
    """Registers a frozen dataclass under its own name, so that gin bindings can set its fields."""
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    _CONFIGURABLES[cls.__name__] = cls
    return cls


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@Name()` in a gin file: an instance of the registered dataclass Name."""

    name: str
    evaluate: bool

    def __str__(self) -> str:
        return f"@{self.name}()" if self.evaluate else f"@{self.name}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%NAME` in a gin file: the value that `NAME = ...` gave."""

    name: str


class _Delegate(config_parser.ParserDelegate):
    # Typed loosely in gin: it says Any by saying nothing.
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Any:
        return Macro(macro_name)


@dataclasses.dataclass(frozen=True)
class Binding:
    """One `Name.field = value`, with the place it was written at."""

    value: Any
    origin: str


class _Bindings:
    """Everything that files and the command line said, the later over the earlier."""

    def __init__(self, *, allow_imports: bool, search_path: Path) -> None:
        self.fields: dict[tuple[str, str], Binding] = {}
        self.macros: dict[str, Binding] = {}
        self.used_fields: set[tuple[str, str]] = set()
        self.used_macros: set[str] = set()
        self.imports: list[str] = []
        self.allow_imports = allow_imports
        self.search_path = search_path
        self._being_built: list[str] = []

    def add_file(self, path: Path, *, included_from: Path | None = None) -> None:
        text = _read(path)
        includes: list[str] = []
        for statement in _statements(text, str(path)):
            if isinstance(statement, config_parser.IncludeStatement):
                includes.append(statement.filename)
                if included_from is not None or len(includes) > 1:
                    raise UserError(
                        f"{path}:{statement.location.line_num}: include {statement.filename!r}: "
                        "a run file includes at most one base, and a base includes nothing"
                    )
                self.add_file(self._base(path, statement.filename), included_from=path)
            else:
                self._add(statement, str(path))

    def add(self, statements: Sequence[Any], origin: str) -> None:
        for statement in statements:
            if isinstance(statement, config_parser.IncludeStatement):
                raise UserError(f"{origin}: include belongs in a .gin file, not in a binding")
            self._add(statement, origin)

    def _base(self, path: Path, name: str) -> Path:
        for folder in (path.parent, self.search_path):
            base = (folder / name).resolve()
            if base.is_file() and base.is_relative_to(folder.resolve()):
                return base
        raise UserError(
            f"{path}: include {name!r}: no such file beside it or among the shipped configs "
            f"(a base stays inside its folder){did_you_mean(name, _gin_files(path.parent))}"
        )

    def _add(self, statement: Any, origin: str) -> None:
        if isinstance(statement, config_parser.BlockDeclaration):
            return
        where = origin if origin.startswith("-b") else f"{origin}:{statement.location.line_num}"
        if _is_import(statement):
            self._import(statement.module, where)
            return
        name, field = statement.selector, statement.arg_name
        if statement.scope:
            raise UserError(f"{where}: {statement.scope}/{name}: gin scopes are not used here")
        if not field:
            self.macros[name] = Binding(statement.value, where)
            return
        if name not in _CONFIGURABLES:
            raise UserError(
                f"{where}: unknown name {name!r} in {name}.{field}"
                f"{did_you_mean(name, _CONFIGURABLES)}"
            )
        known = [f.name for f in dataclasses.fields(_CONFIGURABLES[name])]
        if field not in known:
            raise UserError(
                f"{where}: {name} has no setting {field!r}{did_you_mean(field, known)} "
                f"({name} takes: {', '.join(known)})"
            )
        self.fields[name, field] = Binding(statement.value, where)

    def _import(self, module: str, where: str) -> None:
        if module.split(".")[0] != "jaxtrain" and not self.allow_imports:
            raise UserError(
                f"{where}: import {module}: a config does not run code from outside jaxtrain; "
                "pass --allow-imports if you trust that module"
            )
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"{where}: import {module}: {error}") from error
        if module not in self.imports:
            self.imports.append(module)

    # -- building ------------------------------------------------------------------------------

    def build(self, cls: type) -> Any:
        """An instance of a registered dataclass, its fields from the bindings or its defaults."""
        name, values = cls.__name__, {}
        self._being_built.append(name)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            binding = self.fields.get((name, field.name))
            if binding is None:
                if (
                    field.default is dataclasses.MISSING
                    and field.default_factory is dataclasses.MISSING
                ):
                    raise UserError(f"{name}.{field.name} has no value: bind it ({field.type})")
                continue
            self.used_fields.add((name, field.name))
            value = self._resolve(binding.value, binding.origin)
            values[field.name] = check_value(
                f"{name}.{field.name}", value, hints[field.name], binding.origin
            )
        self._being_built.pop()
        try:
            return cls(**values)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error

    def _resolve(self, value: Any, where: str, macros: tuple[str, ...] = ()) -> Any:
        if isinstance(value, Macro):
            if value.name not in self.macros or value.name in macros:
                raise UserError(
                    f"{where}: %{value.name} has no value{did_you_mean(value.name, self.macros)}"
                )
            self.used_macros.add(value.name)
            macro = self.macros[value.name]
            return self._resolve(macro.value, macro.origin, (*macros, value.name))
        if isinstance(value, Reference):
            if value.name not in _CONFIGURABLES:
                raise UserError(
                    f"{where}: {value}: unknown name{did_you_mean(value.name, _CONFIGURABLES)}"
                )
            if not value.evaluate:
                raise UserError(f"{where}: write @{value.name}() with the brackets")
            if value.name in self._being_built:
                raise UserError(f"{where}: {value} would be a part of itself; refer to another")
            return self.build(_CONFIGURABLES[value.name])
        if isinstance(value, list | tuple):
            return tuple(self._resolve(item, where, macros) for item in value)
        if isinstance(value, dict):
            return {key: self._resolve(item, where, macros) for key, item in value.items()}
        return value

    def refuse_unused(self) -> None:
        """Raises for the bindings that nothing read."""
        unused = [
            f"{binding.origin}: {name}.{field} is set, but nothing in this configuration "
            f"uses {name}"
            for (name, field), binding in self.fields.items()
            if (name, field) not in self.used_fields
        ]
        unused += [
            f"{binding.origin}: {name} = ... is set, but nothing refers to %{name}"
            for name, binding in self.macros.items()
            if name not in self.used_macros
        ]
        if unused:
            raise UserError("\n".join(unused))


def load(
    root: type,
    file: Path | None,
    bindings: Sequence[str] = (),
    *,
    search_path: Path,
    allow_imports: bool = False,
) -> Any:
    """An instance of the frozen dataclass `root`: its `imports`, and its sections.

    Args:
      root: the annotation of each field but `imports` is a registered dataclass, built from the
        bindings of its name; `imports: tuple[str, ...]` takes what was imported.
      file: the .gin file, or None for `bindings` alone.
      bindings: single gin bindings, applied after the file, the later over the earlier; the modules
        that they import are there for the file too.
      search_path: the folder of shipped configs, where `include` looks after the file's own folder.
      allow_imports: let `import` lines run modules from outside the package.

    Raises:
      UserError: an unknown name, a value of the wrong type, a binding nothing uses, a bad file.
    """
    found = _Bindings(allow_imports=allow_imports, search_path=search_path)
    single = [(_statements(text, f"-b {text!r}"), f"-b {text!r}") for text in bindings]
    for statements, origin in single:
        found.add([one for one in statements if _is_import(one)], origin)
    if file is not None:
        found.add_file(file)
    for statements, origin in single:
        found.add([one for one in statements if not _is_import(one)], origin)
    built = {name: found.build(cls) for name, cls in sections(root).items()}
    found.refuse_unused()
    return root(imports=tuple(found.imports), **built)


def sections(root: type) -> dict[str, type]:
    """The registered dataclasses that a root consists of, by field."""
    hints = typing.get_type_hints(root)
    return {f.name: hints[f.name] for f in dataclasses.fields(root) if f.name != "imports"}


def to_gin(root: Any, *, absolute: bool = False) -> str:
    """The resolved tree as gin text: every value, so that reading it again gives an equal tree.

    Args:
      root: as of `load`.
      absolute: paths on this machine are written from its root on: the text then means the same in
        whatever folder it is read.
    """
    blocks = {"imports": [f"import {module}" for module in root.imports]} if root.imports else {}
    for name in sections(type(root)):
        _format_block(getattr(root, name), blocks, absolute)
    return "\n".join(line for block in blocks.values() for line in (*block, "")).rstrip() + "\n"


def _format_block(section: Any, blocks: dict[str, list[str]], absolute: bool) -> None:
    name = type(section).__name__
    lines = blocks.setdefault(name, [])
    hints = typing.get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if absolute:
            value = located(value, hints[field.name])
        lines.append(f"{name}.{field.name} = {_format_value(value, blocks, absolute)}")


def _format_value(value: Any, blocks: dict[str, list[str]], absolute: bool) -> str:
    if type(value).__name__ in _CONFIGURABLES and dataclasses.is_dataclass(value):
        _format_block(value, blocks, absolute)
        return f"@{type(value).__name__}()"
    if isinstance(value, tuple):
        items = [_format_value(item, blocks, absolute) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    return repr(value)


def _is_import(statement: Any) -> bool:
    return isinstance(statement, config_parser.ImportStatement)


def _read(path: Path) -> str:
    try:
        with refused_path(f"config {str(path)!r}", needs="use a .gin file that can be read"):
            return path.read_text(encoding="utf-8-sig")  # editors of Windows begin with a mark
    except UnicodeDecodeError as error:
        told = f"config {str(path)!r} is not UTF-8 text (byte {error.start}); convert it with iconv"
        raise UserError(told) from error


def _statements(text: str, origin: str) -> list[Any]:
    try:
        return list(config_parser.ConfigParser(io.StringIO(text), _Delegate()))
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        if isinstance(error, tokenize.TokenError):  # as Python 3.12 says it of a missing quote
            row = error.args[1][0]
            line = dict(enumerate(text.splitlines(), 1)).get(row, "")
            error = SyntaxError("Unable to parse value.", (origin, row, None, line))
        line = getattr(error, "lineno", None)
        where = f"{origin}:{line}" if line and not origin.startswith("-b") else origin
        detail, example = str(error).strip(), "TextData.source = 'notes.txt'"
        if isinstance(error, SyntaxError):
            detail, example = _no_value(error) or (error.msg.strip(), example)
        raise UserError(
            f"{where}: not a gin binding ({detail}); write Name.field = value, "
            f"with text in quotes: {example}"
        ) from error


def _no_value(error: SyntaxError) -> tuple[str, str] | None:
    """What is wrong with a value that is none, and the same line with quotes around it."""
    name, _, rest = (error.text or "").partition("=")
    name, value = name.strip(), rest.strip()
    token = re.search(r"Failed to parse token '(.*)'", error.msg)
    if not value or not (token or error.msg.startswith("Unable to parse value")):
        return None
    word = token.group(1) if token else value
    if not value.startswith(word):  # one of several, in brackets
        return f"{word} is no value", f"{name} = {value.replace(word, repr(word), 1)}"
    known = {"True": "True", "False": "False", "None": "None"}
    known |= {cls: f"@{cls}()" for cls in _CONFIGURABLES}
    meant = known.get(word) or known.get(word.capitalize())
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{value} is no value{hint}", f"{name} = {value.strip(chr(39) + chr(34))!r}"


def _gin_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.gin")]
