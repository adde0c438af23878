"""EMA: exponential moving average of the parameters, in the optimizer state."""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


class Evaluated(abc.ABC):
    """A part of an optimizer's state that evaluation and generation take other parameters from."""

    @abc.abstractmethod
    def eval_params(self, params: Any) -> Any:
        """What they use in place of the parameters, float32; laid out as the optimizer's state."""

    @abc.abstractmethod
    def restart(self, params: Any) -> "Evaluated":
        """The same part where the parameters are set to others: these are what is evaluated.

        Args:
          params: the new parameters, laid out as the optimizer's state.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average(Evaluated):
    """The state of `keep_average`.

    Attributes:
      count: int32 scalar, updates averaged over.
      params: the average, float32, in the form of the parameters; before the first update they
        themselves.
    """

    count: jax.Array
    params: Any

    def eval_params(self, params: Any) -> Any:
        """The average."""
        del params
        return self.params

    def restart(self, params: Any) -> "Average":
        """An average over no update yet."""
        return Average(jnp.zeros_like(self.count), copy_float32(params))


def keep_average(decay: float) -> optax.GradientTransformation:
    """Passes updates on, and averages the parameters that they lead to: the chain's last part.

    After t updates the average is sum_i decay^(t-i) p_i / sum_i decay^(t-i) over i = 1..t: Polyak
    averaging with exponential weights, debiased as Adam's moments are (arXiv 1412.6980, section 3),
    so that the first parameters, which nobody trained, have no part in it.

    Args:
      decay: above 0, below 1.
    """

    def init(params: Any) -> Any:
        return Average(jnp.zeros((), jnp.int32), _float32(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None, "the average is over parameters"
        # Not as the parameters are kept, which in bfloat16 are rounded: that is these on average.
        after = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, updates)
        # (1 - decay) / (1 - decay^t), the weight of p_t: 1 for the first. Written with expm1,
        # because decay^t is next to 1 and float32 has seven digits.
        count = state.count + 1
        weight = (1 - decay) / -jnp.expm1(count * math.log(decay))
        average = jax.tree.map(lambda old, new: old + weight * (new - old), state.params, after)
        return updates, Average(count, average)

    return optax.GradientTransformation(init, update)


def averaged_params(opt_state: optax.OptState, params: Any) -> Any | None:
    """The parameters that evaluation takes from an optimizer's state, float32; None: from none."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, Evaluated))
    return next((p.eval_params(params) for p in parts if isinstance(p, Evaluated)), None)


def restart_averages(opt_state: optax.OptState, params: Any) -> Any:
    """An optimizer's state where the parameters are set to others; its moments are kept.

    Args:
      opt_state: the state.
      params: the new parameters, laid out as the state is.
    """

    def one(part: Any) -> Any:
        return part.restart(params) if isinstance(part, Evaluated) else part

    return jax.tree.map(one, opt_state, is_leaf=lambda part: isinstance(part, Evaluated))


def _float32(params):  # noqa: ANN001, ANN202
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def copy_float32(params):  # noqa: ANN001, ANN201
    """Float32 copies: a step takes its state's buffers away, and may not be given one twice."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
