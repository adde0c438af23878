"""Parameter groups: learning rates and weight decay by name or role (norms and biases: none)."""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import did_you_mean
from jaxtrain.nn.parameters import role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.sharding import by_name, is_variable, logical_axes, name_of

LAYERS = "layers"
_OF_LAYERS = re.compile(r"(.+)\[(\d*):(\d*)\]")


class Part(NamedTuple):
    """A parsed pattern: parameters by name; of stacked ones, the layers from `first` to before
    `last`.
    """

    pattern: str
    first: int = 0
    last: float = math.inf

    @property
    def is_whole(self) -> bool:
        """Whether it includes all layers."""
        return self.first == 0 and self.last == math.inf


def part_of(written: str) -> Part:
    """Return the parsed form of a pattern such as 'layers/*' or 'layers/*[0:4]'."""
    found = _OF_LAYERS.fullmatch(written)
    if found is None:
        return Part(written)
    pattern, first, last = found.groups()
    return Part(pattern, int(first or 0), float(last) if last else math.inf)


def fits(pattern: str, name: str, param: Any) -> bool:
    """Whether a pattern, a role or a name such as 'layers/*_norm_*', matches a parameter."""
    return role_of(param) == pattern or fnmatch.fnmatchcase(name, pattern)


def has_layers(param: Any) -> bool:
    """Whether a parameter has a dimension of layers."""
    return LAYERS in logical_axes(param)


def factors_of(groups: Mapping[str, float], name: str, param: Any) -> list[tuple[Part, float]]:
    """Return the matching parts of a parameter with their values; the first that has a layer
    counts.

    None follow a part that includes all layers.
    """
    found = []
    for written, value in groups.items():
        part = part_of(written)
        if fits(part.pattern, name, param) and (part.is_whole or has_layers(param)):
            found.append((part, value))
            if part.is_whole:
                break
    return found


def by_layer(
    parts: Sequence[tuple[Part, float]], otherwise: jax.Array, layers: Sequence[int] | None
) -> jax.Array:
    """Return the value of each layer of a stacked parameter, from the parts of `factors_of`.

    Args:
      parts: with their values.
      otherwise: value of other layers, [slots].
      layers: as in `moments.keep_moments`.
    """
    number = jnp.arange(otherwise.shape[0]) if layers is None else jnp.asarray(layers)
    found = otherwise
    for part, value in reversed(parts):
        found = jnp.where((number >= part.first) & (number < part.last), value, found)
    return found


def value_of(groups: Mapping[str, float], name: str, param: Any) -> float | None:
    """Return the value of the first pattern that matches a parameter, or None if none does."""
    return next((value for pattern, value in groups.items() if fits(pattern, name, param)), None)


@dataclasses.dataclass(frozen=True)
class Decay:
    """Weight decay of each parameter.

    Attributes:
      of_matrices: of matrices outside of groups; norm scales and biases do not decay.
      groups: pattern -> weight decay of matching parameters.
    """

    of_matrices: float
    groups: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of(self, name: str, param: Any) -> float:
        """Return the weight decay of one parameter."""
        own = value_of(self.groups, name, param)
        return own if own is not None else self.of_matrices if is_matrix(param) else 0.0


def each_named(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to the name of each parameter, the parameter, and its leaves in
    other trees.
    """

    def one(path: Any, param: Any, *found: Any) -> Any:
        return function(name_of(path), param, *found)

    return jax.tree_util.tree_map_with_path(one, tree, *others, is_leaf=is_variable)


def add_decay(decay: Decay) -> optax.GradientTransformation:
    """Add weight decay to the updates, each parameter at its own rate."""

    def one(name: str, param: Any, update: Any) -> Any:
        part = decay.of(name, param)
        return update.replace(update.get_value() + part * _float32(param)) if part else update

    return optax.stateless(lambda updates, params: each_named(one, params, updates))


def scale_groups(factors: Mapping[str, float]) -> optax.GradientTransformationExtraArgs:
    """Scale each parameter's update by the factor of its group, 1 outside of groups.

    Its `layers` are those of `moments.keep_moments`.
    """

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        layers: Sequence[int] | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del extra

        def one(name: str, param: Any, update: Any) -> Any:
            parts = factors_of(factors, name, param)
            if not parts:
                return update
            if all(part.is_whole for part, _ in parts):
                return update.replace(parts[0][1] * update.get_value())
            array, dim = update.get_value(), logical_axes(param).index(LAYERS)
            factor = by_layer(parts, jnp.ones(array.shape[dim], array.dtype), layers)
            return update.replace(array * factor.reshape(-1, *[1] * (array.ndim - dim - 1)))

        return each_named(one, params, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def add_penalties(l1: float, l2: float) -> optax.GradientTransformation:
    """Add the gradient of l1 |w| + l2 w^2 / 2, summed over matrices, so that the loss need not have
    it.
    """

    def one(_: str, param: Any, gradient: Any) -> Any:
        if not is_matrix(param):
            return gradient
        w = _float32(param)
        return gradient.replace(gradient.get_value() + l1 * jnp.sign(w) + l2 * w)

    return optax.stateless(lambda updates, params: each_named(one, params, updates))


def validate(setting: str, groups: Mapping[str, float], params: Any) -> Iterator[str]:
    """Yield an error message for each pattern that matches no parameter.

    Args:
      setting: the setting of the groups.
      groups: pattern -> value.
      params: the parameters; shapes suffice.
    """
    named = by_name(params)
    roles = {role for role in map(role_of, named.values()) if role is not None}
    for written in groups:
        part = part_of(written)
        found = [param for name, param in named.items() if fits(part.pattern, name, param)]
        if not found:
            yield (
                f"{setting}: no trained parameter has the name or role "
                f"{part.pattern!r}{did_you_mean(part.pattern, [*roles, *named])}"
            )
        elif not part.is_whole:
            depths = {one.get_value().shape[logical_axes(one).index(LAYERS)]
                      for one in found if has_layers(one)}  # fmt: skip
            if not any(part.first < min(part.last, depth) for depth in depths):
                has = f"which have {max(depths)}" if depths else "which have none"
                yield f"{setting}: {written!r} matches no layer of these parameters, {has}"


def _float32(param: Any) -> jax.Array:
    return param.get_value().astype(jnp.float32)
