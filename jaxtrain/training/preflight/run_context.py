"""`RunContext`: facts of a run that preflight checks read; `Feature`: its requirements."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import kind_of
from jaxtrain.models.model import Model, has_stages
from jaxtrain.parallel.mesh import usable_axes
from jaxtrain.parallel.sharding import Layout, is_variable, logical_axes
from jaxtrain.training.finetune.finetune import Finetune, router_biases, tuning_of
from jaxtrain.training.layouts import abstract_layout, shapes_of
from jaxtrain.training.settings import Config


class NotApplicableError(Exception):
    """A check reads a fact that this run does not have, or that another check rejects."""


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Configuration and its target devices.

    Facts that the run does not have raise NotApplicableError when accessed, invalid ones the
    UserError.

    Attributes:
      config: the configuration.
      device_count: devices over all processes.
      platform: 'cpu', 'gpu', `kernel_registry.OLD_GPU` or 'tpu'; None is not known.
      kind: the devices' `device_kind`; None skips checks of their capabilities.
      reads_data: whether the tokenizer is available, so that its vocabulary is compared with the
        model's.
      trains: whether the run trains.
    """

    config: Config
    device_count: int
    platform: str | None = None
    kind: str | None = None
    reads_data: bool = True
    trains: bool = True

    @property
    def model(self) -> Model:
        """The model's settings."""
        return self.config.train.model

    @property
    def name(self) -> str:
        """The model's name."""
        return type(self.config.train.model).__name__

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout on a mesh of names and sizes alone."""
        return abstract_layout(self.config, self.device_count)

    @property
    def layout_if_any(self) -> Layout | None:
        """Layout as in `layout`; None if there is no such mesh."""
        with contextlib.suppress(UserError):
            return self.layout
        return None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of Mesh."""
        return self.config.mesh.sizes(self.device_count)

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis of the mesh; without a mesh, as it was
        written.
        """
        layout = self.layout_if_any
        return getattr(self.config.mesh, axis) if layout is None else layout.mesh.shape[axis]

    @functools.cached_property
    def shapes(self) -> nnx.State:
        """Shapes of the model's parameters; no array is made."""
        return shapes_of(self.model)

    @functools.cached_property
    def trained(self) -> nnx.State:
        """Trained parameters, adapters included."""
        return _count_trained(self.config.finetune, self.model)

    @functools.cached_property
    def logical(self) -> set[str]:
        """Logical axis names of all dimensions of the model's parameters."""
        variables = jax.tree.leaves(self.shapes, is_leaf=is_variable)
        return {axis for variable in variables for axis in logical_axes(variable)}

    @property
    def usable(self) -> list[str]:
        """The mesh axes that can split a dimension of the model."""
        usable = usable_axes(self.logical, attends=self.model.attention is not None)
        # Only token objectives support split sequences.
        lacks = set() if self.model.inputs == "tokens" else {"context"}
        lacks |= set() if has_stages(self.model) else {"pipe"}
        return [axis for axis in usable if axis not in lacks]

    @property
    def reasons(self) -> dict[str, str]:
        """Mesh axes not supported here that other models of this kind support, with the reasons."""
        if self.model.inputs != "pairs":
            return {}
        lengths = "reads a source and a target of different lengths"
        return {"context": f"{lengths}, and a ring cannot pass through both"}

    @property
    def capacity(self) -> float | None:
        """Capacity of the model's experts; None if they are dropless or there are none."""
        return None if self.model.experts is None else self.model.experts.capacity_factor

    @functools.cached_property
    def length(self) -> int:
        """Tokens of a sequence; raises NotApplicableError if the data are not sequences."""
        batch = self.config.train.data.abstract_batch(1)
        if kind_of(batch) != "tokens":
            raise NotApplicableError
        return batch.inputs.shape[1]


@functools.lru_cache(maxsize=16)  # a search needs thousands of layouts of one model
def _count_trained(finetune: Finetune, model: Model) -> nnx.State:
    try:
        tuning = tuning_of(finetune, model.build, router_biases(model))
    except UserError as error:
        raise NotApplicableError from error  # preflight reports it

    def begin(shapes: nnx.State) -> nnx.State:
        return tuning.begin(shapes, tuning.draw(shapes, jax.random.key(0)))[0]

    return jax.eval_shape(begin, shapes_of(model))


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


def messages_of_conflicts(features: Iterable[Feature], context: RunContext) -> Iterator[str]:
    """Yield an error message for each pair of incompatible features of a run."""
    found: dict[tuple[str | None, str | None], str] = {}
    for conflict in conflicts([feature for feature in features if is_on(feature, context)]):
        # Two rows of one setting: the first is reported.
        pair = conflict.needing.written(context), conflict.taking.written(context)
        found.setdefault(pair, conflict.message(context))
    yield from found.values()


def is_on(feature: Feature, context: RunContext) -> bool:
    """Whether a run has the feature."""
    try:
        return feature.written(context) is not None
    except (NotApplicableError, UserError):  # another check rejects the cause
        return False


def text_of(text: Text, context: RunContext) -> str:
    """Return a text that may depend on the run."""
    return text(context) if callable(text) else text
