"""Frozen base weights for QLoRA, quantized to NF4 or int8 with `nn.matmul.quantized.quantize`."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jaxtrain.nn.matmul.quantized import (
    BLOCK,
    Kind,
    Quantized,
    arrays,
    dequantize,
    of_arrays,
    quantize,
)
from jaxtrain.nn.parameters import role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.sharding import Layout, by_name, logical_axes
from jaxtrain.training.finetune.tuning import Tuning, Weights

# Logical axes, besides embed, of weights in a transformer's layers.
_SIDES = {"mlp", "heads", "kv_heads", "head_dim", "qkv"}


@dataclasses.dataclass(frozen=True)
class SettingNames:
    """Names of the settings that select a format, a group size and 8 bits."""

    bits: str
    group: str
    eight_bits: str


SETTINGS = SettingNames(
    "Finetune.quantize_bits={!r}", "Finetune.quantize_group={}", "Finetune.quantize_bits='int8'"
)


@dataclasses.dataclass(frozen=True)
class QuantizedBase(Tuning):
    """Frozen, quantized parameters, without adapters.

    Attributes:
      quantized: names of the quantized weights.
      kind: the format.
      group: elements that share a scale in int4.
    """

    quantized: frozenset[str] = frozenset()
    kind: Kind = "nf4"
    group: int = BLOCK

    def begin(self, params: nnx.State, adapters: nnx.State) -> Weights:
        """Split the weights into trained adapters (from `draw`) and frozen, quantized parameters.

        Arguments are those of `Tuning.begin`.
        """
        found: dict[Any, Any] = {}
        for path, variable in nnx.to_flat_state(params):
            if "/".join(map(str, path)) not in self.quantized:
                found[path] = variable
                continue
            axes = logical_axes(variable)
            made = quantize(
                variable.get_value(), axes, sides_of(axes)[0], self.kind, group=self.group
            )
            for last, (value, names) in arrays(made).items():
                found[*path, last] = nnx.Param(value, axes=names, role="quantized")
        return adapters, nnx.from_flat_state(found)

    def as_declared(self, frozen: nnx.State) -> dict[Any, Any]:
        """Return the frozen parameters by path, quantized ones as `Quantized`."""
        found: dict[Any, Any] = {}
        siblings: dict[Any, dict[str, Any]] = {}
        for path, variable in nnx.to_flat_state(frozen):
            if role_of(variable) != "quantized":
                found[path] = variable
            else:
                siblings.setdefault(path[:-1], {})[str(path[-1])] = variable
        for path, parts in siblings.items():
            value = {name: (one.get_value(), logical_axes(one)) for name, one in parts.items()}
            axes = logical_axes(parts["codes"])
            summed = tuple(i - len(axes) for i in sides_of(axes)[0])
            made = of_arrays(value, summed, self.kind)
            found[path] = parts["codes"].replace(made, role=None)
        return found

    def join(self, weights: Weights) -> nnx.State:
        """Return the model's parameters, quantized ones as `Quantized`."""
        return nnx.from_flat_state(self.as_declared(weights[1]))

    def merge(self, weights: Weights) -> nnx.State:
        """Return the model's parameters, dequantized to the dtype of the others."""
        found = self.as_declared(weights[1])
        dtype = next(
            v.get_value().dtype for v in found.values() if not isinstance(v.get_value(), Quantized)
        )
        for path, variable in found.items():
            value = variable.get_value()
            if isinstance(value, Quantized):
                found[path] = variable.replace(dequantize(value).astype(dtype))
        return nnx.from_flat_state(found)


def sides_of(axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the contracted dimensions of a layer's weight, and its other dimensions.

    Weights that read the residual stream contract embed; those that write to it contract all
    others.
    """
    embed = axes.index("embed")
    others = tuple(i for i in range(1, len(axes)) if i != embed)
    return (others, (embed,)) if embed == len(axes) - 1 else ((embed,), others)


def can_adapt(variable: Any) -> bool:
    """Whether a parameter is a weight of the transformer's layers that is applied to
    every token.
    """
    axes = logical_axes(variable)
    is_weight = axes[:1] == ("layers",) and "embed" in axes and is_matrix(variable)
    return is_weight and role_of(variable) is None and set(axes[1:]) <= {"embed", *_SIDES}


def validate_blocks(
    shapes: nnx.State,
    layout: Layout | None,
    kind: Kind,
    group: int,
    *,
    says: SettingNames = SETTINGS,
) -> Iterator[str]:
    """Yield an error message with all weights whose nf4 blocks or int4 groups their sizes or the
    mesh would split.
    """
    cut: dict[tuple[int, str, int], list[str]] = {}
    fits = group
    for name, variable in by_name(shapes).items():
        if not can_adapt(variable):
            continue
        axes, shape = logical_axes(variable), variable.get_value().shape
        dim = sides_of(axes)[0][-1]
        parts = 1 if layout is None else layout.size(layout.parameter(axes)[dim])
        fits = math.gcd(fits, shape[dim] // parts)
        if shape[dim] % (group * parts):
            cut.setdefault((shape[dim], axes[dim], parts), []).append(name)
    if not cut:
        return
    found = ", and ".join(
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} {size} along {axis}"
        + (f" over {parts} devices" if parts > 1 else "")
        for (size, axis, parts), names in cut.items()
    )
    ways = [says.group.format(fits)] if kind == "int4" and fits % 2 == 0 else []
    ways += [says.eight_bits]
    ways += ["fewer devices along that axis"] if any(parts > 1 for _, _, parts in cut) else []
    yield (
        f"{says.bits.format(kind)}: {found}, which does not divide into blocks of {group}; use "
        f"{', or '.join(ways)}"
    )
