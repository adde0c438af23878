"""Layer-by-layer transfer of arrays between host and device memory.

A loop over layers reads a slice of every array, computes, and writes the slices back where they
came from, so that a device holds one layer's slices at a time, and a host
no second copy. Within a layer the compiler begins to read all arrays at once and writes each as
soon as it is done, in both directions of the link at the same time. Letter: L layers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.parallel.sharding import by_name, logical_axes
from jaxtrain.training.finetune.tuning import join, part
from jaxtrain.training.guard import select

DEVICE = jax.memory.Space.Device

# (slices kept, slices given, layer) -> (slices to keep, what is made).
OfLayer = Callable[[Any, Any, jax.Array], tuple[Any, Any]]


def on_device(tree):  # noqa: ANN001, ANN201 - any pytree of arrays, the same out
    """Move each array into device memory, inside a compiled program."""
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE), tree)


def over_layers(function: OfLayer, kept: Any, given: Any) -> tuple[Any, Any]:
    """Apply `function` to each layer in turn.

    Args:
      function: its arguments are slices [1, ...] on the devices, and the layer, int32 [1].
      kept: arrays [L, ...] that it changes, each written back in place.
      given: arrays [L, ...] that it reads, in any memory; scalars are the same for all layers.

    Returns:
      The updated arrays, and new outputs [L, ...] on the devices.
    """
    homes = jax.tree.map(lambda x: jax.typeof(x).memory_space, kept)
    kept, given = (jax.tree.map(_join_if_small, tree) for tree in (kept, given))
    count = next(x.shape[0] for x in jax.tree.leaves((kept, given)) if x.ndim)

    def one(kept: Any, layer: jax.Array) -> tuple[Any, Any]:
        def read(x: jax.Array) -> jax.Array:
            if x.ndim == 0:
                return x
            return jax.device_put(jax.lax.dynamic_slice_in_dim(x, layer, 1), DEVICE)

        def write(x: jax.Array, new: jax.Array) -> jax.Array:
            new = jax.device_put(new, jax.typeof(x).memory_space)
            return jax.lax.dynamic_update_slice_in_dim(x, new, layer, 0)

        slices, read_only = jax.tree.map(read, (kept, given))
        new, made = function(slices, read_only, layer[None])
        return jax.tree.map(write, kept, new), jax.tree.map(lambda x: x[0], made)

    kept, made = jax.lax.scan(one, kept, jnp.arange(count))
    return jax.tree.map(jax.device_put, kept, homes), made


def _join_if_small(x: jax.Array) -> jax.Array:
    """Vectors of all layers are moved at once: a slice would be a row of a memory tile."""
    return jax.device_put(x, DEVICE) if x.ndim < 3 else x


def stacks(params: nnx.State) -> list[tuple[int | None, frozenset[str]]]:
    """Return the names of parameters that are updated together: by stack of layers, and the rest.

    Returns:
      L and names, where each name is one of L layers; None and the names of those of no layer.
    """
    found: dict[int | None, list[str]] = {}
    for name, variable in by_name(params).items():
        stacked = logical_axes(variable)[:1] == ("layers",)
        count = variable.get_value().shape[0] if stacked else None
        found.setdefault(count, []).append(name)
    return [(count, frozenset(names)) for count, names in found.items()]


def is_matrix_of_layers(variable: nnx.Variable) -> bool:
    """Whether a parameter is a stack of matrices, one per layer."""
    return logical_axes(variable)[:1] == ("layers",) and variable.get_value().ndim > 2


def stream_update(
    first: Iterable[optax.GradientTransformation], rest: Iterable[optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.chain` of both, with state in host memory streamed through the devices.

    Args:
      first: transformation of all gradients together, such as clipping by norm; stateless.
      rest: transformation of each parameter, and each of its layers, separately.
    """
    first, rest = tuple(first), tuple(rest)
    before: Any = optax.chain(*first) if first else None
    after: Any = optax.chain(*rest)

    def init(params: Any) -> Any:
        return (*(before.init(params) if first else ()), *after.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, *, good: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Update as in optax; if `good` is false the state is unchanged."""
        none = ()
        if first:
            updates, none = before.update(updates, state[: len(first)], on_device(params), **extra)
        found = [
            _update(after, names, layers, updates, state[len(first) :], params, good, extra)
            for layers, names in stacks(params)
        ]
        return join([one for one, _ in found]), (*none, *join([one for _, one in found]))

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    rule: Any,
    names: frozenset[str],
    layers: int | None,
    updates: Any,
    state: Any,
    params: Any,
    good: jax.Array | None,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """Return the rule's update of the parameters of these names, and its new state for them."""
    updates, state, params, extra = (part(x, names) for x in (updates, state, params, extra))
    arrays, structure = jax.tree.flatten(state)
    large = [x.ndim > 0 for x in arrays]
    counts = [x for x in arrays if x.ndim == 0]

    def rebuild(kept: list[jax.Array], counts: list[jax.Array]) -> Any:
        of_kept, of_counts = iter(kept), iter(counts)
        return structure.unflatten([next(of_kept if one else of_counts) for one in large])

    def one(kept: Any, given: Any, layer: jax.Array | None) -> tuple[Any, Any]:
        updates, held = kept
        params, extra = given
        if layer is not None:
            extra = {**extra, "layers": layer}
        updates, new = rule.update(updates, rebuild(held, counts), params, **extra)
        new = jax.tree.leaves(new)
        held = select(good, [x for x in new if x.ndim], held)
        made = select(good, [x for x in new if not x.ndim], counts)
        return (updates, held), [x[None] for x in made]

    held = [x for x in arrays if x.ndim]
    given = params, _without_layers(extra)
    if layers is None:
        homes = [jax.typeof(x).memory_space for x in held]
        (updates, held), made = one((updates, on_device(held)), on_device(given), None)
        held = [jax.device_put(x, home) for x, home in zip(held, homes, strict=True)]
    else:
        (updates, held), made = over_layers(one, (updates, held), given)
    return updates, rebuild(held, [x[-1] for x in made])


def _without_layers(extra: dict[str, Any]) -> dict[str, Any]:
    """`layers` is a pipeline's layer order, which streamed state never has."""
    assert extra.get("layers") is None, "a pipeline's state is not streamed"
    return {name: value for name, value in extra.items() if name != "layers"}
