"""What an update rule says of itself, and the rules that there are: one file each beside this."""

import abc
import functools
import importlib
import math
import pkgutil
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import optax

import jaxtrain.training.optimizers
from jaxtrain.config.errors import UserError
from jaxtrain.training.optimizers.moments import Moments


class Kept(NamedTuple):
    """An array that a rule keeps for a parameter.

    Attributes:
      shape: of the array.
      axes: what its dimensions mean, by which it is sharded as a parameter of such axes would be
        from ZeRO 1 on. A mean over a dimension has lost that dimension's name, and nothing else.
      exact: whether it stays float32 whatever `Optimizer.moments` says.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    exact: bool = False

    def bytes(self, moments: Moments) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * (2 if moments == "bfloat16" and not self.exact else 4)


class Rule(abc.ABC):
    """An update rule: a frozen dataclass of the settings that are its own.

    Attributes:
      name: what `Optimizer.name` calls it.
      averages: whether it averages the parameters by itself.
    """

    name: ClassVar[str]
    averages: ClassVar[bool] = False

    @abc.abstractmethod
    def chain(
        self, rate: optax.Schedule, *, weight_decay: float, moments: Moments
    ) -> list[optax.GradientTransformation]:
        """From clipped gradients to what is added to the parameters.

        Args:
          rate: updates already taken -> learning rate.
          weight_decay: as `Optimizer.weight_decay`.
          moments: the dtype that `keeps` are kept in.
        """

    @abc.abstractmethod
    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        """The arrays kept for a parameter of this shape, whose dimensions mean `axes`."""


@functools.cache
def rules() -> Mapping[str, type[Rule]]:
    """Every rule in this package by its name."""
    package = jaxtrain.training.optimizers
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    named = [cls for cls in _below(Rule) if "name" in vars(cls)]
    return {cls.name: cls for cls in sorted(named, key=lambda cls: cls.name)}


def _below(cls: type[Rule]) -> Iterator[type[Rule]]:
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)


def refuse_rate(rule: Rule, *fields: str) -> None:
    """Raises UserError for those of a rule's decay rates that are none."""
    for name in fields:
        value = vars(rule)[name]
        if not 0 <= value < 1:
            raise UserError(f"{type(rule).__name__}.{name}={value}; use 0 to below 1")
