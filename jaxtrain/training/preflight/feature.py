"""`Feature`: a feature of a run, its requirements on the step, and its conflicts with others."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxtrain.config.errors import UserError
from jaxtrain.training.preflight.run_context import NotApplicableError, RunContext

Text = str | Callable[[RunContext], str]


class Feature(NamedTuple):
    """Feature of a run, with its requirements and conflicts.

    Attributes:
      name: for the documentation.
      written: the setting that enables it, as the user writes it, such as "Mesh.pipe=2"; None
        where it is off.
      off: the setting that disables it.
      needs: property of the step -> why it is needed, "" if the other's reason suffices; or (why,
        another fix than `off`).
      takes: property of the step -> why other features lose it, "" if the other's reason
        says it.
    """

    name: str
    written: Callable[[RunContext], str | None]
    off: Text
    needs: Mapping[str, str | tuple[str, str]] = {}
    takes: Mapping[str, Text] = {}


class Conflict(NamedTuple):
    """Two features that cannot be combined.

    Attributes:
      needing: the feature that lacks a property.
      taking: the feature that removes it.
      property: its name.
    """

    needing: Feature
    taking: Feature
    property: str

    def message(self, context: RunContext) -> str:
        """Return the error message: the two settings, why they conflict, and both fixes."""
        need = self.needing.needs[self.property]
        why, way_out = (
            need if isinstance(need, tuple) else (need, text_of(self.needing.off, context))
        )
        why = why or text_of(self.taking.takes[self.property], context)
        ways = dict.fromkeys((text_of(self.taking.off, context), way_out))
        needing, other = self.needing.written(context), self.taking.written(context)
        return f"{needing} with {other}: {why}; use {' or '.join(ways)}"


def conflicts(features: list[Feature]) -> Iterator[Conflict]:
    """Yield each pair of incompatible features once, with one of its reasons."""
    for feature in features:
        for other in features:
            lacking = [name for name in feature.needs if name in other.takes]
            if lacking and other is not feature:
                yield Conflict(feature, other, lacking[0])


def is_on(feature: Feature, context: RunContext) -> bool:
    """Whether a run has the feature."""
    try:
        return feature.written(context) is not None
    except (NotApplicableError, UserError):  # another check rejects the cause
        return False


def text_of(text: Text, context: RunContext) -> str:
    """Return a text that may depend on the run."""
    return text(context) if callable(text) else text
