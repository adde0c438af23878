"""Program with state in host memory (pinned_host)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.nn.precision import to_compute
from jaxtrain.parallel.gathering import HOST, with_slice
from jaxtrain.parallel.sharding import Layout, is_variable, reshard, shardings
from jaxtrain.training.finetune.tuning import Weights
from jaxtrain.training.guard import select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.offload.offload import Offload
from jaxtrain.training.offload.streaming import (
    is_matrix_of_layers,
    is_pinned,
    joined,
    on_device,
    over_layers,
    part,
    pinned,
    stacks,
)
from jaxtrain.training.optimizers.average import Evaluated
from jaxtrain.training.optimizers.rounding import apply_updates
from jaxtrain.training.step import Program, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnHost(Program):
    """The synchronous program; between steps, what `offload` says lies in pinned host memory.

    Its `optimizer` is `streaming.streamed` where that is the optimizer's state.

    Attributes:
      offload: what lies there.
    """

    offload: Offload

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """As of `Program`."""
        return super().init(key, None if params is None else on_device(params))

    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state; a state's counts stay on the devices."""
        of = super().state_shardings(state)
        if self.offload.parameters == "host":
            where = shardings(state.params, self.layout.moment, self.layout)
            of = dataclasses.replace(of, params=jax.tree.map(pinned, where))
        if self.offload.optimizer_state == "host":
            where = jax.tree.map(
                lambda x, sharding: pinned(sharding) if x.ndim else sharding,
                state.opt_state,
                of.opt_state,
            )
            of = dataclasses.replace(of, opt_state=where)
        return of

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """As of `Program`."""
        held = self._fetch(state)
        grads, metrics, statistics = super().gradients(held, batch)
        curvature = self._estimate_on_devices(held, batch)
        return self.update(state, grads, metrics, statistics, curvature)

    def estimate_curvature(self, state: TrainState, batch: Batch) -> Any:
        """As of `Program`."""
        return self._estimate_on_devices(self._fetch(state), batch)

    def _estimate_on_devices(self, held: TrainState, batch: Batch) -> Any:
        # Its result is on the devices too, and parameters that were fetched are not fetched again.
        offload = dataclasses.replace(self.offload, parameters="none", gradients="none")
        plain = dataclasses.replace(self, offload=offload)
        return super(OnHost, plain).estimate_curvature(held, batch)

    def gradients(
        self, state: TrainState, batch: Batch, counts: Sums | None = None
    ) -> tuple[nnx.State, Sums, nnx.State]:
        """As of `Program`."""
        return super().gradients(self._fetch(state), batch, counts)

    def with_respect_to(self, trained: nnx.State) -> nnx.State:
        """As of `Program`; for matrices of layers placeholders in host memory, which are never
        read, if their gradients go there."""
        if self.offload.gradients == "none":
            return super().with_respect_to(trained)

        def one(variable: nnx.Variable) -> nnx.Variable:
            if not is_matrix_of_layers(variable):
                return variable
            return variable.replace(jax.device_put(jnp.zeros_like(variable.get_value()), HOST))

        return jax.tree.map(one, trained, is_leaf=is_variable)

    def _with_gradient(self, weights: Weights, of: Any = None) -> nnx.State:
        if of is None or self.offload.gradients == "none":
            return super()._with_gradient(weights, of)
        trained, frozen = weights

        def one(weight: nnx.Variable, of: nnx.Variable) -> nnx.Variable:
            return with_slice(weight, of) if is_matrix_of_layers(weight) else of

        return self.tuning.join((jax.tree.map(one, trained, of, is_leaf=is_variable), frozen))

    def added(self, total: nnx.State, grads: nnx.State) -> nnx.State:
        """As of `Program`, one layer after the other where they are in host memory."""
        if self.offload.gradients == "none":
            return super().added(total, grads)

        def add(total: nnx.State, grads: nnx.State, _: Any) -> tuple[nnx.State, tuple[()]]:
            return super(OnHost, self).added(total, grads), ()

        parts = []
        for layers, names in stacks(total):
            mine, more = part(total, names), part(grads, names)
            if layers is None:
                parts.append(add(mine, more, None)[0])
            else:
                parts.append(over_layers(add, mine, more)[0])
        return joined(parts)

    def _of_batch(
        self, layout: Layout, batch: Batch, *arguments: Any
    ) -> tuple[nnx.State, Sums, nnx.State]:
        grads, sums, statistics = super()._of_batch(layout, batch, *arguments)
        return on_device(grads), sums, statistics

    def _fetch(self, state: TrainState) -> TrainState:
        """The state with a copy of the parameters to compute with on the devices."""
        if self.offload.parameters == "none":
            return state
        dtype = self.precision.compute

        def cast(_: tuple[()], params: nnx.State, layer: jax.Array) -> tuple[tuple[()], nnx.State]:
            del layer
            return (), to_compute(params, dtype)

        parts = []
        for layers, names in stacks(state.params):
            mine = part(state.params, names)
            if layers is None or dtype == self.precision.params:
                parts.append(to_compute(on_device(mine), dtype))
            else:
                parts.append(over_layers(cast, (), mine)[1])
        held = reshard(joined(parts), self.layout.parameter, self.layout)
        return dataclasses.replace(state, params=held)

    def moved(
        self, old: TrainState, grads: nnx.State, good: jax.Array | None, **more: Any
    ) -> tuple[nnx.State, Any]:
        """As of `Program`; where a step is not good what lies on a host is never written."""
        optimizer: Any = optax.with_extra_args_support(self.optimizer)
        # A rule that is not streamed wants them whole.
        streams = self.offload.optimizer_state == "host"
        params = old.params if streams else on_device(old.params)
        updates, opt_state = optimizer.update(
            grads, old.opt_state, params, layers=self.layer_order, good=good, **more
        )
        if not streams:
            opt_state = select(good, opt_state, old.opt_state)

        def add(params: nnx.State, updates: nnx.State, layer: Any) -> tuple[nnx.State, tuple[()]]:
            new = apply_updates(params, updates, old.step, layer)
            return select(good, new, params), ()

        if self.offload.parameters == "none":
            return add(old.params, updates, self.layer_order)[0], opt_state
        parts = []
        for layers, names in stacks(old.params):
            mine, theirs = part(old.params, names), part(updates, names)
            if layers is None:
                new = add(on_device(mine), theirs, None)[0]
                parts.append(jax.tree.map(_as, new, mine))
            else:
                parts.append(over_layers(add, mine, theirs)[0])
        return joined(parts), opt_state

    def at_rest(self, params: nnx.State) -> nnx.State:
        """The parameters as a state of this program has them between steps."""
        return params if self.offload.parameters == "host" else super().at_rest(params)

    # -- outside of a step -----------------------------------------------------------------------

    def consensus(self, state: TrainState) -> TrainState:
        """The state that evaluation and generation use, its parameters on the devices."""
        parts = jax.tree.map(
            lambda x: _copy_to_devices(x) if isinstance(x, Evaluated) else x,
            state.opt_state,
            is_leaf=lambda x: isinstance(x, Evaluated),
        )
        return super().consensus(dataclasses.replace(self.trained(state), opt_state=parts))

    def trained(self, state: TrainState) -> TrainState:
        """The state with the parameters on the devices, laid out as other programs have them."""
        if self.offload.parameters == "none":
            return state
        where = shardings(state.params, self.layout.parameter, self.layout)
        return dataclasses.replace(state, params=jax.device_put(state.params, where))

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """As of `Program`; what it makes anew is on the devices."""
        return super().with_weights(state, on_device(params), statistics)


def _copy_to_devices(tree: Any) -> Any:
    """Arrays of hosts in the memory of their devices, outside of a program."""
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, x.sharding.with_memory_kind("device")) if is_pinned(x.sharding) else x
        ),
        tree,
    )


def _as(x: jax.Array, like: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.typeof(like).memory_space)
