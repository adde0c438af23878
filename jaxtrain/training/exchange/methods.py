"""The transform of each exchange method, and that of asynchronous data parallelism itself.

A parameter server takes each worker's gradient when it comes; by then the parameters have moved on.
With staleness + 1 workers taking turns, each gradient is `staleness` steps old. Here all devices
take that step together, in one program with the same results, on any mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import reshard, shardings
from jaxtrain.training.exchange.compression import Compressed, Int8, Signs, TopK, compress_gradients
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.exchange.power_sgd import PowerSGD
from jaxtrain.training.exchange.replicas import Averaging, DiLoCo, Gossip, agree
from jaxtrain.training.exchange.streaming import stream_fragments
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import Gradient, TrainState
from jaxtrain.training.step import Step, Transform, transform


@transform
def delay_gradients(step: Step, staleness: int, compensation: float) -> Step:
    """Delay gradients: w(t+1) = w(t) + update of g(w(t - staleness)); early steps use the first
    parameters.

    The loss is that of the old parameters. `TrainState.exchange` has those of the last steps, the
    oldest first.

    Args:
      step: the synchronous one.
      staleness: age, in steps, of the parameters at which gradients are computed.
      compensation: lambda of the correction of a gradient, g g (w(t) - w(t -
        staleness)) times lambda, with the diagonal of its outer product as the Hessian
        (DC-ASGD, arXiv 1609.08326, equation 10).
    """
    layout = step.setup.layout

    def with_past(state: TrainState) -> TrainState:
        """Return the state with its parameters as the whole history."""
        past = tuple(jax.tree.map(jnp.copy, state.params) for _ in range(staleness))
        return state.replace(exchange=past)

    def state_shardings(state: TrainState) -> TrainState:
        past = tuple(shardings(one, layout.parameter, layout) for one in state.exchange)
        return step.shardings(state).replace(exchange=past)

    def compensate(g: jax.Array, now: jax.Array, then: jax.Array) -> jax.Array:
        way = now.astype(jnp.float32) - then.astype(jnp.float32)
        return g + compensation * g * g * way

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        past = (*state.exchange, state.params)
        found = step.gradient(state.replace(params=past[0], exchange=()), batch, counts)
        if compensation:
            trees = found.grads, state.params, past[0]
            grads = jax.tree.map(compensate, *(reshard(x, layout.moment, layout) for x in trees))
            found = found._replace(grads=grads)
        return found._replace(exchange=past[1:])

    def base_state(state: TrainState) -> TrainState:
        return state.replace(exchange=())

    def set_weights(state: TrainState, *weights: Any) -> TrainState:
        # Gradients at other parameters would be meaningless for these.
        return with_past(step.set_weights(base_state(state), *weights))

    return step._replace(
        init=lambda *arguments: with_past(step.init(*arguments)),
        shardings=state_shardings,
        gradient=gradient,
        current_state=lambda state: step.current_state(base_state(state)),
        eval_state=lambda state: step.eval_state(base_state(state)),
        set_weights=set_weights,
    )


def exchange_with(settings: Exchange) -> Transform:
    """Return the transform to replicas along `data` with the settings' exchange method."""
    match settings.method:
        case "synchronous":
            return lambda build: build
        case "local_sgd":
            return agree(Averaging(settings.period))
        case "diloco":
            rule = DiLoCo(settings.period, settings.outer_learning_rate, settings.outer_momentum)
            if settings.streams:
                return stream_fragments(rule, settings.fragments, settings.delay, settings.mixing)
            return agree(rule)
        case "gossip":
            return agree(Gossip(settings.graph))
        case "int8":
            return compress_gradients(Compressed(Int8()))
        case "top_k":
            return compress_gradients(Compressed(TopK(settings.keep)))
        case "sign_sgd":
            return compress_gradients(Compressed(Signs()))
        case "power_sgd":
            return compress_gradients(PowerSGD(settings.rank))
        case "asynchronous":
            return delay_gradients(settings.staleness, settings.compensation)
