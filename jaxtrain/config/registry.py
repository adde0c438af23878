"""Registry of settings by gin name, of implementations by `name`; trusted imports of modules.

A folder on `sys.path` would expose its files to every library that is loaded meanwhile: a
`matplotlib.py` next to a downloaded config would run in place of the library. Modules that a config
names are therefore imported without extending the path.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

T = typing.TypeVar("T", bound=type)
C = typing.TypeVar("C")


def scan_sources(package: types.ModuleType, pattern: str) -> dict[str, str]:
    """Return the modules of a package whose source matches a pattern; imports none of them.

    Args:
      package: where to look, packages inside it too.
      pattern: a regular expression, whose group is the name.
    """
    found: dict[str, str] = {}
    for folder in map(Path, package.__path__):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            module = ".".join((package.__name__, *parts)).removesuffix(".__init__")
            for name in re.findall(pattern, file.read_text(), re.MULTILINE):
                found[name] = module
    return found


class _Configurables(dict[str, type]):
    """Settings classes by their gin names. Those of added packages are imported once named: a run
    uses a few of some hundred modules."""

    def __init__(self) -> None:
        super().__init__()
        self._packages: list[types.ModuleType] = []

    def add_package(self, package: types.ModuleType) -> None:
        """Register the settings classes of a package without importing them."""
        if package not in self._packages:
            self._packages.append(package)
            vars(self).pop("_modules", None)

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        pattern = r"^@configurable\n(?:@.*\n)*class (\w+)"
        scanned = [scan_sources(package, pattern) for package in self._packages]
        return {name: module for names in scanned for name, module in names.items()}

    def register(self, cls: type) -> None:
        """Register a class; a class imported by name from outside the packages stays."""
        known = super().get(cls.__name__)
        late = cls.__module__ == self._modules.get(cls.__name__) if self._packages else False
        if known is None or not late or known.__module__ == cls.__module__:
            self[cls.__name__] = cls

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._modules

    def __missing__(self, name: str) -> type:
        importlib.import_module(self._modules[name])
        return dict.__getitem__(self, name)

    def get(self, name: str, default: typing.Any = None) -> typing.Any:
        """Return the class of a name, or a default, as `dict.get` does."""
        return self[name] if name in self else default  # noqa: SIM401 - `get` of itself

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(super().__iter__()), **self._modules})

    def values(self) -> typing.Any:
        """Return all classes, as `dict.values` does; imports all of them."""
        return [self[name] for name in self]

    def items(self) -> typing.Any:
        """Return all names and classes, as `dict.items` does; imports all of them."""
        return [(name, self[name]) for name in self]


CONFIGURABLES = _Configurables()

# Names of settings in earlier releases, which gin files may still use.
FORMER_NAMES = {
    **{
        f"Deadlines.{name}": f"Timeouts.{name}"
        for name in (
            "start",
            "restore",
            "compile",
            "data",
            "step",
            "evaluation",
            "save",
            "factor",
            "minimum_seconds",
        )
    },
    "Finetune.few_bits": "Finetune.quantize_bits",
    "Finetune.few_bits_group": "Finetune.quantize_group",
    "LabelledText.place": "LabelledText.pooling",
    "SequenceData.place": "SequenceData.pooling",
    "TaggedText.place": "TaggedText.pooling",
    "Finetune.fresh": "Finetune.reinitialize",
    "Mixture.between": "Mixture.interpolation",
    "Mixture.once": "Mixture.single_epoch",
}


def with_present_names(bindings: Mapping[str, str]) -> dict[str, str]:
    """Return bindings by name, each former name replaced by the present one."""
    return {FORMER_NAMES.get(name, name): value for name, value in bindings.items()}


def configurable(cls: T) -> T:
    """Register a frozen dataclass under its own name, so that gin bindings can set its fields."""
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    if any(re.search(r"\bdict\b", str(field.type)) for field in dataclasses.fields(cls)):
        # Results of a plan are cached by configuration, and a dict is not hashable.
        setattr(cls, "__hash__", _hash_settings)  # noqa: B010
    CONFIGURABLES.register(cls)
    return cls


def _hash_settings(settings: typing.Any) -> int:
    """Return the hash of a dataclass whose fields may hold dicts."""
    return hash(tuple(_hashable(getattr(settings, f.name)) for f in dataclasses.fields(settings)))


def _hashable(value: typing.Any) -> typing.Any:
    """Return a hashable form of a value, independent of the order of its dicts."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(one)) for key, one in value.items())
    return value


def is_configurable(cls: type) -> bool:
    """Whether gin bindings can set a class's fields."""
    return cls.__name__ in CONFIGURABLES and CONFIGURABLES[cls.__name__] is cls


def is_known(name: str) -> bool:
    """Whether gin bindings can set fields of a class of this name, even if it was redefined
    since."""
    return name in CONFIGURABLES


class Named(Mapping[str, type[C]]):
    """Implementations of a base class by `name`: a package's, each imported when it is requested,
    and those of all modules imported so far.

    Abstract classes and those that only inherit a name have none. Of two classes with one name the
    later counts: a notebook cell was run again.
    """

    def __init__(self, base: type[C], package: types.ModuleType) -> None:
        """Args: base: the base class. package: where the implementations are."""
        self._base, self._package = base, package

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        pattern = r"^    name(?:: ClassVar\[str\])? = \"(\w+)\"$"
        return scan_sources(self._package, pattern)

    def _collect(self) -> dict[str, type[C]]:
        return {
            vars(cls)["name"]: cls
            for cls in _below(self._base)
            if "name" in vars(cls) and not inspect.isabstract(cls)
        }

    def __getitem__(self, name: str) -> type[C]:
        if name not in self._collect() and name in self._modules:
            importlib.import_module(self._modules[name])
        return self._collect()[name]

    def __iter__(self) -> Iterator[str]:
        for module in set(self._modules.values()):
            importlib.import_module(module)
        return iter(sorted(self._collect()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _below(cls: type[C]) -> Iterator[type[C]]:
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)


class _Finder:
    """A path finder limited to some folders, and to one top-level module if a name is given."""

    def __init__(self, folders: Sequence[Path], name: str | None = None) -> None:
        self._folders, self._name = [str(folder) for folder in folders], name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a top-level module is; None if it is in none of the folders."""
        if path is not None or self._name not in (None, name):
            return None
        return PathFinder.find_spec(name, self._folders, target)


def import_trusted(module: str, folders: Sequence[Path]) -> None:
    """Import a module that the user trusts, from these folders first.

    What it imports in turn is looked for on the usual path first and in the folders last, so that
    no file there replaces an installed library.

    Raises:
      ImportError: no such module, or another module of that name is loaded already.
    """
    name = module.partition(".")[0]
    own = PathFinder.find_spec(name, [str(folder) for folder in folders])
    loaded = sys.modules.get(name)
    if own is not None and own.origin is not None and loaded is not None:
        origin = getattr(loaded.__spec__, "origin", None)
        if origin is not None and Path(origin).resolve() != Path(own.origin).resolve():
            raise ImportError(
                f"{own.origin} has the name of a module that is loaded already, {origin}; rename it"
            )
    with _search_first(folders, name):
        importlib.import_module(module)


@contextlib.contextmanager
def _search_first(folders: Sequence[Path], name: str) -> Iterator[None]:
    """Within, the module `name` is looked for in the folders first, and all others last."""
    first, last = _Finder(folders, name), _Finder(folders)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
