"""Reader of .gin files: bindings, includes, macros and overrides to frozen dataclasses.

gin's grammar with four rules on top: a binding names a field of a registered dataclass, its value
fits the field's annotation, every binding is used, and the resolved tree can be printed and read
again. This is the only module that imports gin, and it uses gin's parser alone: there is no global
registry of bindings, so any number of configurations coexist.
"""

import contextlib
import dataclasses
import importlib
import io
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from jaxtrain.config.errors import UserError, did_you_mean, nearest
from jaxtrain.config.files import path_errors
from jaxtrain.config.registry import CONFIGURABLES, FORMER_NAMES, is_configurable
from jaxtrain.config.registry import configurable as configurable
from jaxtrain.config.values import (
    ByName,
    by_name,
    check_value,
    hints,
    is_required,
    literal,
    missing,
    settings_of,
    strip_mark,
    takes_plain_values,
)


class _RejectedError(Exception):
    """A value was rejected, with the reason in `_Bindings.mistakes`, and so what needs it."""


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
    # Not annotated in gin: its type is Any.
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Any:
        return Macro(macro_name)


@dataclasses.dataclass(frozen=True)
class Text:
    """gin text that is not from a file.

    Attributes:
      text: as it would be written there.
      origin: its name in messages; in brackets, such as `<settings>`, without line numbers.
    """

    text: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Binding:
    """Binding `Name.field = value`, and where it was written."""

    value: Any
    origin: str


class _Bindings:
    """Bindings of all files and the command line; later ones override earlier ones."""

    def __init__(self, root: type, *, allow_imports: bool, search_path: Path, folder: Path) -> None:
        self.root = root
        self.fields: dict[tuple[str, str], Binding] = {}
        self.macros: dict[str, Binding] = {}
        self.used_fields: set[tuple[str, str]] = set()
        self.used_macros: set[str] = set()
        self.imports: list[str] = []
        self.mistakes: list[str] = []
        self.notes: list[str] = []
        # After a read error, settings may wrongly look missing or unused.
        self.lacks_bindings = self.lacks_modules = False
        self.allow_imports = allow_imports
        self.search_path = search_path
        self.folder = folder
        # Bindings that later ones override, and the name of those later ones in messages.
        self._overridden: list[tuple[_Bindings, str]] = []
        self._being_built: list[str] = []

    def add_file(self, file: Path | Text, *, included_from: Path | None = None) -> None:
        with self._noting_what_is_lacking():
            is_text = isinstance(file, Text)
            text, path = (file.text, Path(file.origin)) if is_text else (_read(file), file)
            self._add_statements(_statements(text, str(path)), path, included_from)

    def _add_statements(
        self, statements: Sequence[Any], path: Path, included_from: Path | None
    ) -> None:
        includes: list[str] = []
        for statement in statements:
            if isinstance(statement, config_parser.IncludeStatement):
                includes.append(statement.filename)
                with self._noting_what_is_lacking():
                    if included_from is not None or len(includes) > 1:
                        raise UserError(
                            f"{path}:{statement.location.line_num}: include {statement.filename!r}:"
                            " a run file includes at most one base, and a base includes nothing"
                        )
                    self.add_file(self._base(path, statement.filename), included_from=path)
                self.let_override(str(path))
            else:
                with self._noting_what_is_lacking():
                    self._add(statement, str(path))

    def add(self, statements: Sequence[Any], origin: str) -> None:
        for statement in statements:
            with self._noting_what_is_lacking():
                if isinstance(statement, config_parser.IncludeStatement):
                    raise UserError(f"{origin}: include belongs in a .gin file, not in a binding")
                self._add(statement, origin)

    def add_single(self, text: str) -> None:
        """Add a command-line binding; its text needs no quotes if that is unambiguous."""
        origin, statements = f"-b {text!r}", []
        with self._noting_what_is_lacking():
            try:
                statements = _statements(text, origin)
            except UserError as error:
                from jaxtrain.config.values import add_quotes

                in_quotes = add_quotes(text)
                if in_quotes is None:
                    name = text.partition("=")[0].strip()
                    if name.isidentifier() and (hint := self._suggest(None, name)):
                        raise UserError(f"{origin}: {name} is not a setting{hint}") from error
                    raise
                statements = _statements(in_quotes, origin)
                self.notes.append(f"{origin} is taken as text: {in_quotes}")
        self.add([one for one in statements if not _is_import(one)], origin)

    @contextlib.contextmanager
    def _noting_what_is_lacking(self) -> Iterator[None]:
        """Collect errors for the end, and mark what they prevented from being read, within the
        context.
        """
        try:
            yield
        except UserError as error:
            self.mistakes.append(str(error))
            self.lacks_bindings = True

    def _base(self, path: Path, name: str) -> Path:
        with path_errors(f"{path}: include {name!r}", needs="include a file next to it"):
            for folder in (path.parent, self.search_path):
                base = (folder / name).resolve()
                if base.is_file() and base.is_relative_to(folder.resolve()):
                    return base
        raise UserError(
            f"{path}: include {name!r}: no such file next to it or among the shipped configs "
            f"(a base stays inside its folder){did_you_mean(name, _gin_files(path.parent))}"
        )

    def _add(self, statement: Any, origin: str) -> None:
        if isinstance(statement, config_parser.BlockDeclaration):
            return
        where = origin if _lacks_numbers(origin) else f"{origin}:{statement.location.line_num}"
        if _is_import(statement):
            self._import(statement.module, where)
            return
        name, field = statement.selector, statement.arg_name
        if statement.scope:
            raise UserError(f"{where}: {statement.scope}/{name}: gin scopes are not supported")
        if not field:
            self.macros[name] = Binding(statement.value, where)
            return
        if (present := FORMER_NAMES.get(f"{name}.{field}")) is not None:
            self.notes.append(
                f"{where}: {name}.{field} is now {present}; its former name still works"
            )
            name, _, field = present.partition(".")
        if name not in CONFIGURABLES:
            if self.lacks_modules:
                return
            raise UserError(
                f"{where}: unknown name {name!r} in {name}.{field}"
                f"{self._suggest(name, field) or did_you_mean(name, CONFIGURABLES)}"
            )
        known = settings_of(CONFIGURABLES[name])
        if field not in known:
            # Imported here, as below: suggestions are needed only for errors.
            from jaxtrain.config.values import of_a_choice

            close = nearest(field, known)
            hint = (
                of_a_choice(CONFIGURABLES[name], field)
                or self._suggest(name, field)
                or (f"; did you mean {close!r}?" if close is not None else "")
            )
            raise UserError(
                f"{where}: {name} has no setting {field!r}{hint} ({name} takes: {', '.join(known)})"
            )
        self.fields[name, field] = Binding(statement.value, where)

    def _suggest(self, section: str | None, word: str) -> str:
        """Return `; did you mean 'Section.setting'?` for a setting of another section or library,
        else ''.
        """
        from jaxtrain.config.synonyms import CHOSEN, suggest_section, suggest_setting

        chosen = {key: cls for key, where in CHOSEN.items() if (cls := self._section_of(*where))}
        used = {cls.__name__: cls for cls in sections(self.root).values()}
        if section is not None and section not in CONFIGURABLES:
            close = suggest_section(section, chosen) or nearest(section, used, cutoff=0.7)
            cls = CONFIGURABLES.get(close or "")
            if cls is not None and word in settings_of(cls):
                return f"; did you mean {f'{close}.{word}'!r}?"
            return suggest_setting(close, word, used, chosen) or (
                f"; did you mean {close!r}?" if close else ""
            )
        if section is not None:
            used[section] = CONFIGURABLES[section]
        return suggest_setting(section, word, used, chosen)

    def _section_of(self, section: str, setting: str) -> type | None:
        """Return the section that a setting names, as far as the bindings have been read."""
        cls = CONFIGURABLES.get(section)
        if cls is None or setting not in settings_of(cls):
            return None
        field, binding = settings_of(cls)[setting], self.fields.get((section, setting))
        if binding is None:
            return type(field.default) if is_configurable(type(field.default)) else None
        if isinstance(binding.value, Reference):
            return CONFIGURABLES.get(binding.value.name)
        mark = by_name(hints(cls)[field.name])
        return mark.choices().get(binding.value) if mark is not None else None

    def _import(self, module: str, where: str) -> None:
        is_own = module.split(".")[0] == "jaxtrain"
        if not is_own and not self.allow_imports:
            self.lacks_modules = True
            raise UserError(
                f"{where}: import {module}: a config does not run code from outside jaxtrain; "
                "pass --allow-imports if you trust that module"
            )
        try:
            if is_own:
                importlib.import_module(module)
            else:
                from jaxtrain.config.registry import import_trusted

                import_trusted(module, (self.folder, Path.cwd()))
        except ImportError as error:
            self.lacks_modules = True
            searched = " (looked for next to the config, in this folder and where Python looks; "
            searched = "" if is_own else f"{searched}PYTHONPATH adds folders)"
            raise UserError(f"{where}: import {module}: {error}{searched}") from error
        if module not in self.imports:
            self.imports.append(module)

    # -- building -----------------------------------------------------------------------------

    def build_root(self) -> Any:
        """Build the root from the bindings; None if anything is rejected: `mistakes` says what."""
        built = {}
        for name, cls in sections(self.root).items():
            with contextlib.suppress(_RejectedError):
                built[name] = self.build(cls)
        return None if self.mistakes else self.root(imports=tuple(self.imports), notes=(), **built)

    def build(self, cls: type) -> Any:
        """Build a registered dataclass, its fields from the bindings or its defaults.

        All fields are read before a rejected one raises _RejectedError.
        """
        name, values, is_rejected = cls.__name__, {}, False
        self._being_built.append(name)
        takes = hints(cls)
        for bound, field in settings_of(cls).items():
            binding, mark = self.fields.get((name, bound)), by_name(takes[field.name])
            written, annotation = f"{name}.{bound}", strip_mark(takes[field.name])
            try:
                if mark is not None:
                    values[field.name] = self._choose(name, field, mark)
                elif binding is not None:
                    self.used_fields.add((name, bound))
                    values[field.name] = self._value(written, binding, annotation)
                elif is_required(field):
                    is_rejected = True
                    if not self.lacks_bindings:
                        known = CONFIGURABLES.values()
                        self.mistakes.append(missing(written, annotation, known))
            except _RejectedError:
                is_rejected = True
        self._being_built.pop()
        if is_rejected:
            raise _RejectedError
        try:
            return cls(**values)
        except ValueError as error:
            prefix = "" if isinstance(error, UserError) else f"{name}: "
            self.mistakes.append(f"{prefix}{error}")
            raise _RejectedError from error

    def _value(self, name: str, binding: Binding, annotation: Any) -> Any:
        """Return a field's value; raises _RejectedError if it is rejected."""
        value = None
        try:
            value = self._resolve(binding.value, binding.origin)
            return check_value(name, value, annotation, binding.origin)
        except UserError as error:
            self.mistakes.append(str(error))
            # Nothing of the section that it might have named is read now.
            self.lacks_bindings |= value is None or not takes_plain_values(annotation)
            raise _RejectedError from error
        except _RejectedError:
            # A section has read all of its own; behind the rejected one of a tuple none was read.
            self.lacks_bindings |= not isinstance(binding.value, Reference)
            raise

    def _choose(self, section: str, field: dataclasses.Field[Any], mark: ByName) -> Any:
        """Build the class that a binding names, or the default's."""
        binding = self.fields.get((section, mark.binding))
        if binding is None:
            return self.build(type(field.default))
        self.used_fields.add((section, mark.binding))
        if isinstance(binding.value, str) and binding.value in mark.choices():
            return self.build(mark.choices()[binding.value])
        if self.lacks_modules:
            self.lacks_bindings = True
            raise _RejectedError  # a module that was not imported may define it
        try:
            name = self._value(f"{section}.{mark.binding}", binding, literal(mark.choices()))
            return self.build(mark.choices()[name])
        except _RejectedError:
            self.lacks_bindings = True  # the section that it names might have used some
            raise

    def _resolve(self, value: Any, where: str, macros: tuple[str, ...] = ()) -> Any:
        if isinstance(value, Macro):
            if value.name not in self.macros or value.name in macros:
                known = did_you_mean(value.name, self.macros) if self.macros else ""
                raise UserError(f"{where}: %{value.name} has no value{known}")
            self.used_macros.add(value.name)
            macro = self.macros[value.name]
            return self._resolve(macro.value, macro.origin, (*macros, value.name))
        if isinstance(value, Reference):
            if value.name not in CONFIGURABLES:
                if self.lacks_modules:
                    raise _RejectedError
                raise UserError(
                    f"{where}: {value}: unknown name{did_you_mean(value.name, CONFIGURABLES)}"
                )
            if not value.evaluate:
                raise UserError(f"{where}: write @{value.name}() with parentheses")
            if value.name in self._being_built:
                raise UserError(f"{where}: {value} would contain itself; refer to another")
            return self.build(CONFIGURABLES[value.name])
        if isinstance(value, list | tuple):
            return tuple(self._resolve(item, where, macros) for item in value)
        if isinstance(value, dict):
            return {key: self._resolve(item, where, macros) for key, item in value.items()}
        return value

    def let_override(self, others: str) -> None:
        """Let later bindings override those added so far.

        Args:
          others: the name of the later ones in messages.
        """
        before = _Bindings(
            self.root,
            allow_imports=self.allow_imports,
            search_path=self.search_path,
            folder=self.folder,
        )
        before.fields, before.macros = dict(self.fields), dict(self.macros)
        self._overridden.append((before, others))

    def has_used(self, key: str | tuple[str, str], binding: Binding) -> bool:
        """Whether this binding, of a macro or a field, was used."""
        if isinstance(key, str):
            return self.macros.get(key) is binding and key in self.used_macros
        return self.fields.get(key) is binding and key in self.used_fields

    def reject_unused(self) -> None:
        """Reject unused bindings; those that later bindings override get a note."""
        if self.lacks_bindings or self.lacks_modules:
            return
        fields = {key: one for key, one in self.fields.items() if key not in self.used_fields}
        macros = {key: one for key, one in self.macros.items() if key not in self.used_macros}
        overridden = self._overridden[::-1] if fields or macros else []
        for before, _ in overridden:
            before.build_root()

        def overridden_by(key: str | tuple[str, str], binding: Binding) -> str | None:
            return next((others for one, others in overridden if one.has_used(key, binding)), None)

        replaced: dict[str, list[str]] = {}
        for key, binding in fields.items():
            name, field = key
            if (others := overridden_by(key, binding)) is not None:
                unused = f"with {others} nothing uses {name}"
                replaced.setdefault(unused, []).append(f"{name}.{field}")
            else:
                from jaxtrain.config.values import how_to_choose

                self.mistakes.append(
                    f"{binding.origin}: {name}.{field} is set, but nothing in this configuration "
                    f"uses {name}{how_to_choose(name)}"
                )
        for name, binding in macros.items():
            if (others := overridden_by(name, binding)) is not None:
                replaced.setdefault(f"with {others} nothing refers to %{name}", []).append(name)
            else:
                self.mistakes.append(
                    f"{binding.origin}: {name} = ... is set, but nothing refers to %{name}"
                    f"{self._suggest(None, name) or '; a setting is written Section.name = value'}"
                )
        for unused, names in replaced.items():
            self.notes.append(f"{', '.join(names)}: left out, since {unused}")


def load(
    root: type,
    file: Path | Text | None,
    bindings: Sequence[str] = (),
    *,
    search_path: Path,
    allow_imports: bool = False,
    implied: Callable[[Any, Collection[tuple[str, str]]], Mapping[tuple[str, str], Any]] = (
        lambda loaded, bound: {}
    ),
) -> Any:
    """Build the frozen dataclass `root` from its bindings: its `imports`, and its sections.

    Args:
      root: the annotation of each field but two is a registered dataclass, built from the bindings
        of its name; `imports: tuple[str, ...]` takes what was imported, `notes: tuple[str, ...]` a
        message for everything that was changed on reading.
      file: the .gin file, or its text, which is read as one of the current folder; None for
        `bindings` alone.
      bindings: single gin bindings, applied after the file, the later over the earlier; the modules
        that they import are there for the file too.
      search_path: the folder of shipped configs, where `include` looks after the file's own folder.
      allow_imports: let `import` lines run modules from outside the package, in the file's folder
        or the current one before all others. Neither folder is on Python's search path.
      implied: maps what was built and the bound (section, field) pairs to values of
        fields that are not bound.

    Raises:
      UserError: unknown names, values of the wrong type, bindings nothing uses, a bad file:
        everything at once.
    """
    folder = file.resolve().parent if isinstance(file, Path) else Path.cwd()
    found = _Bindings(root, allow_imports=allow_imports, search_path=search_path, folder=folder)
    for text in bindings:
        with contextlib.suppress(UserError):  # `add_single` says it
            statements = _statements(text, f"-b {text!r}")
            found.add([one for one in statements if _is_import(one)], f"-b {text!r}")
    if file is not None:
        found.add_file(file)
    found.let_override("the bindings of the command line")
    for text in bindings:
        found.add_single(text)
    loaded = found.build_root()
    found.reject_unused()
    if loaded is not None and (more := implied(loaded, found.fields.keys())):
        found.fields |= {key: Binding(value, "<data>") for key, value in more.items()}
        written = ", ".join(f"{name}.{field} = {value!r}" for (name, field), value in more.items())
        found.notes.append(f"{written}: taken from the data, because not set")
        loaded = found.build_root()
    if found.mistakes:
        raise UserError("\n".join(found.mistakes))
    return dataclasses.replace(loaded, notes=tuple(found.notes))


def sections(root: type) -> dict[str, type]:
    """Return the registered dataclasses that are fields of a root, by field."""
    classes = hints(root)
    return {
        f.name: classes[f.name]
        for f in dataclasses.fields(root)
        if f.name not in ("imports", "notes")
    }


def _lacks_numbers(origin: str) -> bool:
    """Whether a source with this name has no line numbers."""
    return origin.startswith(("-b", "<"))


def _is_import(statement: Any) -> bool:
    return isinstance(statement, config_parser.ImportStatement)


def _read(path: Path) -> str:
    try:
        with path_errors(f"config {str(path)!r}", needs="use a .gin file that can be read"):
            return path.read_text(encoding="utf-8-sig")  # Windows editors write a byte-order mark
    except UnicodeDecodeError as error:
        message = (
            f"config {str(path)!r} is not UTF-8 text (byte {error.start}); convert it with iconv"
        )
        raise UserError(message) from error


def _statements(text: str, origin: str) -> list[Any]:
    try:
        return list(config_parser.ConfigParser(io.StringIO(text), _Delegate()))
    except RecursionError:
        raise UserError(
            f"{origin}: its parentheses are nested too deeply; use fewer levels"
        ) from None
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        if isinstance(error, tokenize.TokenError):  # as Python 3.12 reports a missing quote
            row = error.args[1][0]
            line = dict(enumerate(text.splitlines(), 1)).get(row, "")
            error = SyntaxError("Unable to parse value.", (origin, row, None, line))
        line = getattr(error, "lineno", None)
        where = f"{origin}:{line}" if line and not _lacks_numbers(origin) else origin
        detail, example = str(error).strip(), "TextData.source = 'notes.txt'"
        if isinstance(error, SyntaxError):
            from jaxtrain.config.values import no_value

            detail, example = no_value(error) or (error.msg.strip(), example)
        raise UserError(
            f"{where}: not a gin binding ({detail}); write Name.field = value, "
            f"with text in quotes: {example}"
        ) from error


def _gin_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.gin")]
