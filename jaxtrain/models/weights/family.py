"""Family of published models: names and settings, in both directions."""

import dataclasses
import functools
import importlib
import itertools
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import jaxtrain.models.weights.families
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.key_table import KeyTable, check_keys
from jaxtrain.models.model import Model
from jaxtrain.models.weights.config_file import (
    QUANTIZATION,
    ConfigFile,
    Row,
    apply_aliases,
    read_rows,
    write_rows,
)
from jaxtrain.models.weights.formats import awq

# -- name map between a published model's tensors and our parameters, in both directions -----------
# A `Name` is one line of it. `"LDNH->(NH)D"` means that our parameter [L, D, N, H] is a tensor [N
# H, D] for each L: letters in brackets are one dimension there, of size 1 if empty, and a letter
# that is missing there is written in the tensor's name, `"layers.{L}.q_proj.weight"`, as a number
# or as one of the words that follow it, `"{P:query|key|value}.weight"`. Letters in brackets on our
# side are one dimension here, `"(SUC)D->DCSU"`, and the line has their sizes. Reading it from the
# right converts theirs to ours, from the left ours to theirs, so that one is the inverse of the
# other. Several parameters that are one tensor there have a line each, in order, with their rows,
# or their turn along its last dimension.

_DIMENSION = re.compile(r"\(([A-Z]*)\)|([A-Z])")
_NAMED = re.compile(r"\{([A-Z])(?::([^}]*))?\}")


@dataclasses.dataclass(frozen=True)
class Name:
    """A kind of published tensor, and our parameter that consists of them.

    Attributes:
      theirs: the tensor's name, with a letter in braces for each of our dimensions that it indexes.
      ours: the parameter's path, separated by "/".
      form: our dimensions, "->", theirs; the letters in braces come first among ours.
      rows: if a tensor's rows are of several parameters, the first of this one's and the number
        of all rows; None: it is this parameter alone.
      sizes: of the letters that are in brackets on our side.
      turn: if several parameters are interleaved along a tensor's last dimension, this one's index,
        from 0 on, and their number; None: it is this parameter alone.
      first: the number there of our first layer, where other layers precede it.
    """

    theirs: str
    ours: str
    form: str
    rows: tuple[int, int] | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    turn: tuple[int, int] | None = None
    first: int = 0

    def __post_init__(self) -> None:
        assert "".join(sorted(self.named + "".join(self._groups))) == "".join(sorted(self._here))
        assert self._here.startswith(self.named), f"{self.form}: {self.named} must come first"

    @functools.cached_property
    def named(self) -> str:
        """The letters in braces in the tensor's name."""
        return "".join(letter for letter, _ in _NAMED.findall(self.theirs))

    @functools.cached_property
    def _here(self) -> str:
        return "".join(self._ours)

    @functools.cached_property
    def _ours(self) -> tuple[str, ...]:
        """The letters of each of our dimensions."""
        return _letters(self.form.partition("->")[0])

    @functools.cached_property
    def _groups(self) -> tuple[str, ...]:
        """The letters of each of their dimensions."""
        return _letters(self.form.partition("->")[2])

    def _all_sizes(self, shape: tuple[int, ...], first: int = 0) -> dict[str, int]:
        """Return the size of every letter, from our dimensions from `first` on."""
        pairs = zip(self._ours[first:], shape, strict=True)
        return dict(self.sizes) | {group: size for group, size in pairs if len(group) == 1}

    def tensors(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield every tensor of this kind: its index in our leading dimensions, and its name.

        Args:
          shape: of our parameter.
        """
        sizes = shape[: len(self.named)]
        for index in itertools.product(*map(range, sizes)):
            numbers = dict(zip(self.named, index, strict=True))
            if "L" in numbers:
                numbers["L"] += self.first
            yield index, _NAMED.sub(functools.partial(_word, numbers), self.theirs)

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each tensor of a parameter of this shape."""
        own = self._own_shape(shape)
        if self.turn is not None:
            return (*own[:-1], own[-1] * self.turn[1])
        return own if self.rows is None else (self.rows[1], *own[1:])

    def _own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part of a tensor that belongs to this parameter."""
        sizes = self._all_sizes(shape)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self._groups)

    def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor reshaped to one slice of our parameter: a view, but where some
        of its letters are one dimension here.

        Args:
          tensor: of `their_shape`.
          shape: of our parameter.
        """
        sizes, named = self._all_sizes(shape), len(self.named)
        there = "".join(self._groups)
        if self.rows is not None:
            tensor = tensor[self.rows[0] :][: self._own_shape(shape)[0]]
        if self.turn is not None:
            tensor = tensor[..., self.turn[0] :: self.turn[1]]
        split = tensor.reshape([sizes[letter] for letter in there])
        turned = split.transpose([there.index(letter) for letter in self._here[named:]])
        return turned.reshape(shape[named:])

    def to_theirs(self, part: np.ndarray) -> np.ndarray:
        """Return the tensor that one slice of our parameter becomes there, or its rows or turns of
        it."""
        named = len(self.named)
        here, sizes = self._here[named:], self._all_sizes(part.shape, named)
        split = part.reshape([sizes[letter] for letter in here])
        turned = split.transpose([here.index(letter) for letter in "".join(self._groups)])
        return turned.reshape([math.prod(sizes[one] for one in group) for group in self._groups])


def layer_norm(theirs: str, ours: str, form: str) -> tuple[Name, Name]:
    """Return the two lines of a layer norm: its scale and its bias.

    Args:
      theirs: prefix of both names there.
      ours: the same here.
      form: of each.
    """
    return (
        Name(f"{theirs}.weight", f"{ours}_scale", form),
        Name(f"{theirs}.bias", f"{ours}_bias", form),
    )


def linear(theirs: str, ours: str, form: str, bias: str) -> tuple[Name, Name]:
    """Return the two lines of a linear layer: its weight and its bias.

    Args:
      theirs: prefix of both names there.
      ours: the name of the weight here; that of the bias ends in "_bias".
      form: of the weight.
      bias: the form of the bias.
    """
    return (
        Name(f"{theirs}.weight", ours, form),
        Name(f"{theirs}.bias", f"{ours}_bias", bias),
    )


def one_after_the_other(theirs: str, *parts: tuple[str, str, int]) -> tuple[Name, ...]:
    """Return the lines of parameters that are concatenated to one tensor there.

    Args:
      theirs: its name.
      parts: our parameter, the form, and its number of rows, in order.
    """
    whole, first, lines = sum(rows for _, _, rows in parts), 0, []
    for ours, form, rows in parts:
        lines.append(Name(theirs, ours, form, (first, whole)))
        first += rows
    return tuple(lines)


def in_turn(theirs: str, *parts: str, form: str) -> tuple[Name, ...]:
    """Return the lines of parameters that are interleaved along the last dimension of one tensor
    there.

    Args:
      theirs: its name.
      parts: our parameters, in their order.
      form: of each of them.
    """
    return tuple(
        Name(theirs, ours, form, turn=(index, len(parts))) for index, ours in enumerate(parts)
    )


def join(lines: Sequence[Name], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Combine the parts of one tensor."""
    if len(parts) == 1:
        return parts[0]
    if lines[0].turn is None:
        return np.concatenate(parts)
    return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)


def _letters(side: str) -> tuple[str, ...]:
    """Split one side of a form into dimensions."""
    return tuple(several or one for several, one in _DIMENSION.findall(side))


def _word(numbers: Mapping[str, int], named: re.Match) -> str:
    """Return the text that replaces a letter in braces in a tensor's name."""
    letter, words = named.groups()
    return str(numbers[letter]) if words is None else words.split("|")[numbers[letter]]


def their_shapes(
    names: Iterable[Name], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every published tensor of parameters of these shapes, by name."""
    return {
        tensor: name.their_shape(shapes[name.ours])
        for name in names
        for _, tensor in name.tensors(shapes[name.ours])
    }


# -- families --------------------------------------------------------------------------------------

# Errors that families raise for unexpected values.
_OTHER_KINDS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Family of published models: config.json keys and tensor names; an entry of a file's
    `FAMILIES`.

    Attributes:
      architecture: its name in config.json, "LlamaForCausalLM".
      model_type: its short name, "llama".
      model: the class of our sizes.
      rows: the keys of its config.json and the settings of `model`, in the order of the file.
      names: the map between its tensors and our parameters.
      prefix: of all names except an output matrix's; files of a model without its
        output matrix may lack it.
      copies: tensors that may be stored in a file a second time, where they are tied -> the first.
      buffers: a regular expression of tensors that are not parameters: they follow from the sizes.
      counts: names of tensors with an integer that is unused here; written as 0, before
        all others.
      extra_files: contents of further files of the checkpoint, by name.
      dequantized: methods of config.json's quantization_config whose weights are read as the floats
        that they represent.
      aliases: other names of keys of config.json -> the names here.
    """

    architecture: str
    model_type: str
    model: type
    rows: tuple[Row, ...]
    names: Callable[[Any], tuple[Name, ...]]
    prefix: str
    copies: Mapping[str, str]
    buffers: str = r"(?!)"
    counts: Callable[[Any], tuple[str, ...]] = lambda _: ()
    extra_files: Callable[[Any], Mapping[str, bytes]] = lambda _: {}
    dequantized: tuple[str, ...] = (awq.METHOD,)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def keys(self) -> KeyTable:
        """The entry of each key of a config.json; a later row overrides an earlier one."""
        return {key: entry for row in self.rows for key, entry in row.keys.items()}

    def read(self, config: ConfigFile) -> dict[str, Any]:
        """Return the settings of `model` from a config.json."""
        return read_rows(self.rows, config)

    def write(self, model: Any) -> dict[str, Any] | None:
        """Return the config.json of sizes; None: they are not of this family."""
        return write_rows(self.rows, model)


def families() -> list[Family]:
    """Return all families, in the order of their files."""
    package = jaxtrain.models.weights.families
    modules = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return [
        family
        for module in modules
        for family in getattr(importlib.import_module(module.name), "FAMILIES", ())
    ]


def family_of(content: Mapping[str, Any], *, where: str) -> Family:
    """Return the family of a config.json.

    Raises:
      UserError: the family is not supported; names the nearest.
    """
    known = {family.architecture: family for family in families()}
    named = content.get("architectures") or [f"model_type {content.get('model_type')!r}"]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{where}: architectures = {named!r}; use a list of names")
    for name in named:
        if name in known:
            return known[name]
    # Of several heads on one body, the first is the default.
    by_type = {family.model_type: family for family in reversed(known.values())}
    if content.get("model_type") in by_type and not content.get("architectures"):
        return by_type[content["model_type"]]
    hint = did_you_mean(str(named[0]), known)
    raise UserError(f"{where}: the architecture {named[0]} is not supported{hint}")


def model_of(content: Mapping[str, Any], *, where: str) -> tuple[Family, Model]:
    """Return the family and the sizes of a config.json.

    Args:
      content: of config.json.
      where: the file, for the message.

    Raises:
      UserError: everything that is not supported, in one message.
    """
    family = family_of(content, where=where)
    config = ConfigFile(apply_aliases(content, family.aliases))
    config.reasons += check_keys(config.content, family.keys)
    quantized = config.table("quantization_config").content
    method = quantized.get("quant_method")
    if method not in family.dequantized:
        config.only("quantization_config", [None], default=None)
    else:
        within = "quantization_config."
        config.reasons += check_keys(quantized, QUANTIZATION[method], within=within)
    model = None
    try:
        model = family.model(**family.read(config))
    except UserError as error:
        config.reasons += str(error).splitlines()
    except _OTHER_KINDS as error:  # for example a list instead of a number, or a depth of 0
        config.reject(f"values of other kinds than {family.architecture} has ({error!r})")
    if config.reasons or model is None:
        lines = "\n".join(f"  {reason}" for reason in config.reasons)
        raise UserError(f"{where}: these settings are not supported:\n{lines}")
    return family, model


def family_for(model: Model, preferred: str | None) -> tuple[Family, dict[str, Any]]:
    """Return the family of sizes, and their config.json.

    Args:
      model: the sizes.
      preferred: the model_type of the run's original files, if several match.

    Raises:
      UserError: there is none.
    """
    fitting = []
    # No published architecture has a sparse attention pattern.
    has_pattern = model.attention is not None and model.attention.pattern is not None
    for family in families():
        fits = isinstance(model, family.model) and not has_pattern
        content = family.write(model) if fits else None
        if content is not None:
            fitting.append((family, content))
    if not fitting:
        raise UserError(
            f"Train.model=@{type(model).__name__}() with these settings is not a known Hugging "
            f"Face architecture; there are {', '.join(f.architecture for f in families())}"
        )
    return next((one for one in fitting if one[0].model_type == preferred), fitting[0])
