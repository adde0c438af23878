"""LoRA (arXiv 2106.09685): adapters of low rank beside frozen weights, which alone are trained."""

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.parameters import role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.nn.products.low_rank import LowRank
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.finetune.tuning import Tuning, Weights, named

DOWN, UP = "lora_a", "lora_b"  # A and B, under the name of their weight
# A weight of these dimensions besides embed is multiplied with in a transformer's layers.
_SIDES = {"mlp", "heads", "kv_heads", "head_dim", "qkv"}


@dataclasses.dataclass(frozen=True)
class LoRA(Tuning):
    """Trains adapters, and no parameter of the model.

    Attributes:
      targets: names of the weights that have one.
      rank: R.
      scale: of what an adapter adds.
    """

    targets: frozenset[str] = frozenset()
    rank: int = 0
    scale: float = 1.0

    def draw(self, shapes: nnx.State, key: jax.Array) -> nnx.State:
        """A uniform within 1 / sqrt(in), as `torch.nn.Linear` draws its weights, B zero: at first
        the model is what it was.

        Args:
          shapes: of the model's parameters, its layers in their order.
          key: of what is drawn; every weight's adapter draws its own.
        """
        found: dict[Any, Any] = {}
        for name, variable in named(shapes).items():
            if name not in self.targets:
                continue
            one = _Adapter.of(variable, self.rank)
            own = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
            limit = 1 / math.sqrt(one.fan_in)
            down = jax.random.uniform(own, one.down, jnp.float32, -limit, limit)
            path = tuple(name.split("/"))
            found[*path, DOWN] = nnx.Param(down, axes=one.down_axes, role=None)
            found[*path, UP] = nnx.Param(jnp.zeros(one.up), axes=one.up_axes, role=None)
        return nnx.from_flat_state(found)

    def begin(self, params: nnx.State, adapters: nnx.State) -> Weights:
        """Adapters are trained, parameters are not."""
        return adapters, params

    def join(self, weights: Weights) -> nnx.State:
        """The model's parameters, those with an adapter as `LowRank`."""
        adapters, params = weights
        pairs = named(adapters)
        found = {}
        for path, variable in nnx.to_flat_state(params):
            name = "/".join(map(str, path))
            if name in self.targets:
                down, up = pairs[f"{name}/{DOWN}"], pairs[f"{name}/{UP}"]
                variable = variable.replace(
                    LowRank(
                        variable.get_value(), down.get_value(), up.get_value(),
                        logical_axes(down), logical_axes(up), self.scale,
                    )
                )  # fmt: skip
            found[path] = variable
        return nnx.from_flat_state(found)

    def merged(self, weights: Weights) -> nnx.State:
        """W + scale A B, computed in float32."""
        adapters, params = weights
        pairs = named(adapters)
        found = {}
        for path, variable in nnx.to_flat_state(params):
            name = "/".join(map(str, path))
            if name in self.targets:
                down, up = (pairs[f"{name}/{one}"].get_value() for one in (DOWN, UP))
                variable = variable.replace(
                    self._merged(variable, down, up).astype(variable.get_value().dtype)
                )
            found[path] = variable
        return nnx.from_flat_state(found)

    def _merged(self, variable: Any, down: jax.Array, up: jax.Array) -> jax.Array:
        base = variable.get_value().astype(jnp.float32)
        letters = "abcdef"[: base.ndim]
        inside, outside = sides_of(logical_axes(variable))
        of_down = "".join(letters[i] for i in (0, *inside)) + "R"
        of_up = "".join("R" if i == inside[0] else letters[i] for i in range(base.ndim)
                        if i == inside[0] or i in (0, *outside))  # fmt: skip
        added = jnp.einsum(
            f"{of_down},{of_up}->{letters}",
            down.astype(jnp.float32),
            up.astype(jnp.float32),
            precision="highest",
        )
        return base + self.scale * added


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """The shapes and axes of A and B of a stacked weight, and how many numbers A sums over."""

    down: tuple[int, ...]
    up: tuple[int, ...]
    down_axes: tuple[str, ...]
    up_axes: tuple[str, ...]
    fan_in: int

    @classmethod
    def of(cls, variable: Any, rank: int) -> "_Adapter":
        shape, axes = variable.get_value().shape, logical_axes(variable)
        inside, outside = sides_of(axes)

        def taken(values: tuple[Any, ...], of_rank: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            down = tuple(values[i] for i in (0, *inside)) + (of_rank,)
            up = tuple(
                of_rank if i == inside[0] else values[i]
                for i in range(len(values))
                if i == inside[0] or i in (0, *outside)
            )
            return down, up

        sizes, names = taken(shape, rank), taken(axes, "rank")
        return cls(*sizes, *names, math.prod(shape[i] for i in inside))


def sides_of(axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a layer's weight that a product sums over, and the others: what reads the
    residual stream sums over embed, what writes to it over all else."""
    embed = axes.index("embed")
    others = tuple(i for i in range(1, len(axes)) if i != embed)
    return (others, (embed,)) if embed == len(axes) - 1 else ((embed,), others)


def can_adapt(variable: Any) -> bool:
    """Whether a parameter is a weight of a transformer's layers that every token meets."""
    axes = logical_axes(variable)
    is_weight = axes[:1] == ("layers",) and "embed" in axes and is_matrix(variable)
    return is_weight and role_of(variable) is None and set(axes[1:]) <= {"embed", *_SIDES}


def targets_of(wanted: tuple[str, ...], shapes: nnx.State) -> Iterator[tuple[str, list[str]]]:
    """What each of `Finetune.lora_targets` names: 'attention', 'mlp', or a pattern."""
    able = {name: logical_axes(v) for name, v in named(shapes).items() if can_adapt(v)}
    for one in wanted:
        if one == "attention":
            yield one, [n for n, axes in able.items() if {"heads", "kv_heads"} & set(axes)]
        elif one == "mlp":
            yield one, [n for n, axes in able.items() if "mlp" in axes]
        else:
            yield one, [n for n in able if fnmatch.fnmatchcase(n, one)]
