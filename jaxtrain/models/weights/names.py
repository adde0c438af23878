"""Name map between a published model's tensors and our parameters, in both directions.

A `Name` is one line of it. `"LDNH->(NH)D"` means that our parameter [L, D, N, H] is a tensor
[N H, D] for each L: letters in brackets are one dimension there, of size 1 if empty,
and a letter that is missing there is written in the tensor's name, `"layers.{L}.q_proj.weight"`, as
a number or as one of the words that follow it, `"{P:query|key|value}.weight"`. Letters in brackets
on our side are one dimension here, `"(SUC)D->DCSU"`, and the line has their sizes. Reading it from
the right converts theirs to ours, from the left ours to theirs, so that one is the inverse of the
other. Several parameters that are one tensor there have a line each, in order, with
their rows, or their turn along its last dimension.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

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
