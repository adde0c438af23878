"""Misplaced parameters: replicated where they could be sharded, unexpected or uneven shardings."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.analysis.planning.textbook.facts import Facts, Weight, split_over
from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model
from jaxtrain.parallel.axis_rules import RULES_BY_LAYOUT
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Step

# Axes that shard parameters; along the others parameters are replicated.
_SHARING = ("fsdp", "depth", "row", "tensor")


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A parameter that is replicated along an axis but could be sharded over it.

    Attributes:
      name: path in the model; all layers of a stacked parameter together.
      axis: the mesh axis.
      bytes: its bytes on one device.
      saving: bytes that sharding would save on each device.
      way_out: what to change; "" if the table has no dimension that the axis could split.
    """

    name: str
    axis: str
    bytes: int
    saving: int
    way_out: str


def find_replicated(
    config: Config, layout: Layout, *, threshold: int = 1 << 20
) -> list[Replicated]:
    """Return parameters above `threshold` bytes per device that an axis could shard but does not.

    Biases and norm scales are small and replicated by design.
    """
    facts = Facts(config, layout)
    found = []
    for weight in facts.weights:
        parts = [axis for _, axis in split_over(layout.parameter(weight.axes))]
        layers = facts.L if weight.is_layer else 1
        held = layers * math.prod(weight.shape) * facts.master_bytes // facts.devices(parts)
        for axis in _SHARING:
            size = facts.size(axis)
            divides = any(n % size == 0 for n in weight.shape)
            if held > threshold and size > 1 and axis not in parts and divides:
                way_out = _way_out(facts, weight, axis)
                found.append(Replicated(weight.name, axis, held, held - held // size, way_out))
    return sorted(found, key=lambda one: (-one.saving, one.name, one.axis))


def _way_out(facts: Facts, weight: Weight, axis: str) -> str:
    layout, rules = facts.layout, RULES_BY_LAYOUT[facts.layout.tensor_layout]
    meant = dataclasses.replace(layout, zero=3, whole=frozenset()).parameter(weight.axes)
    if axis not in [name for _, name in split_over(meant)]:
        return ""
    if axis == "fsdp" and layout.zero < 3:
        return "Sharding.zero = 3"
    for name in weight.axes:
        if name in layout.whole and axis in str(rules[name].parameter):
            setting = facts.model.settings[name]
            over = layout.size(rules[name].parameter)
            model = type(facts.model).__name__
            return f"{model}.{setting} a multiple of {over}, or fewer devices along {axis}"
    return ""


@dataclasses.dataclass(frozen=True)
class Misplaced:
    """An array of the state whose sharding in a compiled step differs from the layout's.

    Attributes:
      name: path in the state.
      bytes: bytes of the whole array.
      way: "in" or "out".
      intended, actual: the shardings, as text.
    """

    name: str
    bytes: int
    way: str
    intended: str
    actual: str


def find_misplaced(program: Step, compiled: jax.stages.Compiled) -> list[Misplaced]:
    """Return the arguments and results of a compiled step with unexpected shardings.

    Args:
      program: its train step is `compiled`: (state, batch) -> (state, metrics).
      compiled: from `jit(...).lower(...).compile()`.
    """
    shapes = program.in_memory(program.shapes())
    intended = jax.tree.leaves(program.shardings(shapes))
    named = jax.tree_util.tree_leaves_with_path(shapes)
    found = []
    for way, state in (
        ("in", compiled.input_shardings[0][0]),
        ("out", compiled.output_shardings[0]),
    ):
        for (path, shape), meant, actual in zip(
            named, intended, jax.tree.leaves(state), strict=True
        ):
            if not actual.is_equivalent_to(meant, shape.ndim):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                size = shape.size * shape.dtype.itemsize
                found.append(Misplaced(name, size, way, _text(meant), _text(actual)))
    return found


def _text(sharding: Any) -> str:
    return str(getattr(sharding, "spec", sharding))


@dataclasses.dataclass(frozen=True)
class Padding:
    """A size that does not divide over the mesh axes of its table entry, and the next that does.

    Attributes:
      setting: "Llama.vocab_size".
      value, padded: its current value, and the next greater one that divides.
      over: devices that shard it.
      parameter: the first parameter with this size.
    """

    setting: str
    value: int
    padded: int
    over: int
    parameter: str

    @property
    def binding(self) -> str:
        """The binding to paste into a configuration."""
        return f"{self.setting} = {self.padded}"


def paddings(config: Config, layout: Layout) -> list[Padding]:
    """Propose a padding for each setting whose sizes do not divide, except the number of layers."""
    found: dict[str, Padding] = {}
    for one in _uneven(Facts(config, layout)):
        old = found.get(one.setting)
        if old is None or one.padded > old.padded:
            found[one.setting] = one
    return [found[name] for name in sorted(found)]


def _uneven(facts: Facts) -> Iterator[Padding]:
    model, layout = facts.model, facts.layout
    for weight in facts.weights:
        for spec in (layout.parameter(weight.axes), layout.moment(weight.axes)):
            for axis, size, part in zip(weight.axes, weight.shape, spec, strict=True):
                over, setting = layout.size(part), model.settings.get(axis)
                value = None if setting is None else vars(model)[setting]
                if setting is None or not value or size % over == 0:
                    continue
                padded = _next(model, setting, value, size, over)
                if padded is not None:
                    name = f"{type(model).__name__}.{setting}"
                    yield Padding(name, value, padded, over, weight.name)


def _next(model: Model, setting: str, value: int, size: int, over: int) -> int | None:
    """Return the next greater value of a setting that the model accepts and whose size divides.

    A size may be a multiple of its setting (the mlp of a GPT is 4 embed_dim).
    """
    for larger in range(value + 1, 2 * value + over + 1):
        if larger * size % (value * over):
            continue
        try:
            dataclasses.replace(model, **{setting: larger})
        except UserError:
            continue  # for example, head_dim would be odd
        return larger
    return None
