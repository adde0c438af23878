"""Loss-free load balancing of experts: biases of routers.

They are held among the parameters that are not trained, so that no optimizer, no clipping and no
norm of gradients sees them, and are moved by the load after each step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.model import Model
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import by_name
from jaxtrain.training.finetune.tuning import TEACHER
from jaxtrain.training.pipeline.stages import is_layer


def speed_of(model: Model) -> float | None:
    """By how much a step moves the biases of a model's routers; None: it has none."""
    return None if model.experts is None else model.experts.bias_speed


def biases(model: Model) -> frozenset[str]:
    """The names of the biases of a model's routers."""
    return frozenset() if speed_of(model) is None else biases_of(model.build)


def biases_of(build: Callable[[jax.Array], nnx.Module]) -> frozenset[str]:
    """The same, of any module; no array is made."""
    shapes = nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), nnx.Param)
    return frozenset(name for name, one in by_name(shapes).items() if role_of(one) == "balance")


def update_biases(
    frozen: nnx.State, load_LE: jax.Array | None, speed: float | None, order: list[int] | None
) -> nnx.State:
    """What is not trained, after a step: the biases moved, all else, a teacher too, as it was.

    Args:
      frozen: what is not trained.
      load_LE: of the experts of each layer in the whole batch, those outside of the stack last;
        None: no router has biases.
      speed: as of `speed_of`.
      order: the layer at each place of stacked arrays, -1 for padding; None: the model's.
    """
    if load_LE is None or not speed:
        return frozen
    found: dict[Any, Any] = dict(nnx.to_flat_state(frozen))
    own = [p for p, one in found.items() if role_of(one) == "balance" and p[0] != TEACHER]
    alone = [path for path in own if not is_layer(found[path])]
    stacked = load_LE.shape[0] - len(alone)
    places = np.arange(stacked) if order is None else np.maximum(order, 0)
    for path in own:
        bias = found[path].get_value()
        load = load_LE[stacked + alone.index(path) if path in alone else places]
        load = jax.sharding.reshard(load, jax.typeof(bias).sharding.spec)
        found[path] = found[path].replace(update_bias(bias, load.astype(jnp.float32), speed))
    return nnx.from_flat_state(found)


def update_bias(bias_LE: jax.Array, load_LE: jax.Array, speed: float) -> jax.Array:
    """The biases after a step: each moved by `speed` against its expert's load error.

    Source: arXiv 2408.15664, algorithm 1.

    Args:
      bias_LE: of the experts of each layer.
      load_LE: tokens that went to them in the whole batch, or what is proportional to that.
      speed: its update rate u; 1e-3 there.
    """
    error_LE = load_LE.mean(-1, keepdims=True) - load_LE
    return bias_LE + speed * jnp.sign(error_LE)
