"""Runs of a shrunk configuration on one device and on meshes, each program compiled once."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from jaxtrain.analysis.verify import sample
from jaxtrain.analysis.verify.measures import Arrays, Step
from jaxtrain.analysis.verify.meshes import MeshSizes
from jaxtrain.analysis.verify.shrink import Small
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.parallel.compilation import options_of_run
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.parallel.sharding import Layout, is_variable, name_of
from jaxtrain.training import layouts
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import IN_DEVICE_MEMORY, ON_DEVICES
from jaxtrain.training.state import TrainState, with_shardings
from jaxtrain.training.step import Step as TrainStep
from jaxtrain.training.step import base_step

# -- float32 islands: operations that stay in float32 for every compute dtype ----------------------

# Primitives that distinguish an island from a cast or a copy, and their display names.
_KINDS = {
    "dot_general": "products", "ragged_dot_general": "products", "conv_general_dilated": "products",
    "reduce_sum": "sums", "exp": "exp", "log": "log", "rsqrt": "rsqrt", "logistic": "sigmoid",
    "tanh": "tanh", "erf": "erf", "cos": "cos", "sin": "sin",
}  # fmt: skip
_TRANSFORMED = re.compile(r"\w+\(|\)")  # in scope names under `jax.grad`: transpose(jvp(loss))


def float32_islands(program: ClosedJaxpr) -> dict[str, list[str]]:
    """Return the kinds of float32 operations by named scope, in the forward and backward passes.

    Args:
      program: the program, traced by `jax.make_jaxpr`.
    """
    found: dict[str, set[str]] = {}
    for scope, equation in _equations(program.jaxpr, ""):
        kind = _KINDS.get(equation.primitive.name)
        if scope and kind is not None and _reads_float32(equation):
            found.setdefault(scope, set()).add(kind)
    return {scope: sorted(kinds) for scope, kinds in sorted(found.items())}


def _equations(jaxpr: Jaxpr, outer: str) -> Iterator[tuple[str, JaxprEqn]]:
    for equation in jaxpr.eqns:
        parts = _TRANSFORMED.sub("", str(equation.source_info.name_stack)).split("/")
        # Scopes of matmuls are named after their einsum equations.
        own = [part for part in parts if part and "->" not in part]
        scope = "/".join([outer, *own] if outer else own)
        yield scope, equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner, scope)


def _reads_float32(equation: JaxprEqn) -> bool:
    avals: list[Any] = [operand.aval for operand in equation.invars]
    return any(hasattr(x, "dtype") and x.shape and x.dtype == jnp.float32 for x in avals)


# -- runs ------------------------------------------------------------------------------------------


class MeshRun:
    """Compiled program of a shrunk configuration on one mesh.

    Attributes:
      config: the configuration, with this mesh.
      layout: the layout of all arrays on the mesh.
      setup: the setup of the step; its optimizer also stores its input gradients.
      program: the synchronous step with one gradient evaluation.
      training: the step of the configured method: `program`, or another one.
    """

    def __init__(self, config: Config) -> None:
        sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
        self.config = config
        self.devices = int(np.prod(list(sizes.values())))
        try:
            preflight.check(config, device_count=self.devices, platform="cpu")
        except ValueError as error:
            raise AssertionError(f"the shrunk configuration cannot run: {error}") from error
        self.layout: Layout = layouts.layout(config, jax.devices()[: self.devices])
        training = compose(config, self.layout)
        setup = training.setup.replace(optimizer=keep_gradients(training.setup.optimizer))
        self.training: TrainStep = training.build(setup)
        self.setup = setup.replace(storage=IN_DEVICE_MEMORY)
        self.program: TrainStep = self.training
        if (
            config.exchange.method != "synchronous"
            or config.train.noise_scale_every
            or config.optimizer.sharpness_radius
        ):
            self.program = base_step(self.setup.replace(targets=ON_DEVICES))

    @functools.cached_property
    def train_step(self) -> CompiledStep:
        """The step of `training`, compiled like that of a run; it donates the caller's state."""
        train = self.config.train
        options, _ = options_of_run("cpu", "cpu", train.steps, lambda missing: None)
        step = CompiledStep(self.training, options)
        with self.layout.active():
            step.compile(train.data.abstract_batch(train.global_batch_size))
        return step

    @property
    def islands(self) -> dict[str, list[str]]:
        """Float32 operations of the gradient computation by scope, see `float32_islands`."""
        train = self.config.train
        batch = train.data.abstract_batch(train.global_batch_size)
        with self.layout.active():
            traced = jax.make_jaxpr(self.setup.gradients)(
                base_step(self.setup).abstract_state(),
                with_shardings(batch, self.setup.batch_shardings(batch)),
            )
        return float32_islands(traced)

    @functools.cached_property
    def created(self) -> TrainState:
        """Initial state of `training` on the host, created by its program on the devices."""
        return jax.device_get(self.training.create(self.config.train.seed))

    @functools.cached_property
    def initial(self) -> Arrays:
        """Initial parameters by name, in the model's order of layers."""
        return self.name_arrays(self._synchronous_state().params)

    def fresh(self) -> TrainState:
        """Return a copy of the initial state on the devices, which a step may donate."""
        return jax.device_put(self.created, self.training.shardings(self.created))

    def shard_batch(self, batch: Batch) -> Batch:
        """Shard a batch of numpy arrays over the mesh's devices."""
        return jax.device_put(batch, self.setup.batch_shardings(batch))

    def first_step(self, batch: Batch) -> Step:
        """Run the first step of the compiled train step; requires a synchronous program."""
        assert self.training is self.program, "another exchange keeps a gradient for each replica"
        placed = self.shard_batch(batch)
        state, metrics = jax.block_until_ready(self.train_step(self.fresh(), placed))
        return Step(
            loss=float(metrics["loss"]),
            gradients=self.name_arrays(state.opt_state[0]),
            statistics=self.name_arrays(state.statistics),
        )

    def gradients(self, batch: Batch, state: TrainState | None = None) -> Step:
        """Compute loss and gradients of the first step without the update.

        Args:
          batch: the batch, numpy.
          state: the initial state on the host of another program with the same structure; None
            creates one.
        """
        state = self._synchronous_state() if state is None else state
        state = jax.device_put(state, self.program.shardings(state))
        placed = self.shard_batch(batch)
        compiled = self.compile(jax.jit(self._take_gradient), state, placed)
        gradients, metrics, statistics = jax.block_until_ready(compiled(state, placed))
        return Step(
            float(metrics["loss"]), self.name_arrays(gradients), self.name_arrays(statistics)
        )

    def _take_gradient(self, state: TrainState, batch: Batch) -> tuple[Any, Any, Any]:
        found = self.program.gradient(state, batch)
        return found.grads, found.metrics, found.statistics

    def _synchronous_state(self) -> TrainState:
        if self.training is self.program:
            return self.created
        return jax.device_get(self.program.create(self.config.train.seed))

    def compile(self, function: Any, *arguments: Any) -> Callable[..., Any]:
        """Compile a jitted function for these arguments or shapes."""
        with self.layout.active():
            return function.lower(*arguments).compile()

    def name_arrays(self, tree: Any) -> Arrays:
        """Return the arrays by path, on the host, with layers in the model's order."""
        tree = jax.device_get(tree)
        if self.setup.stages is not None:
            tree = self.setup.stages.to_layers(tree)
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
        return {
            name_of(path): np.asarray(leaf.get_value() if is_variable(leaf) else leaf)
            for path, leaf in leaves
        }


class Bench:
    """Programs and results that several proofs share, each computed on first use.

    Attributes:
      small: the shrunk configuration.
      data: the dataset.
      batch: the batch of the first step, numpy.
    """

    def __init__(self, small: Small) -> None:
        self.small = small
        objective = small.config.train.task
        drawn = sample.dataset(small.config)
        self.data: Dataset = objective.dataset(drawn, small.config.train.model)
        self.batch: Batch = sample.first_batch(small.config, self.data)

    @functools.cached_property
    def one_device(self) -> MeshRun:
        """The shrunk configuration on one device."""
        return MeshRun(self.small.config)

    @functools.cached_property
    def one_device_step(self) -> Step:
        """First step on one device, with the gradient accumulation of the user's configuration."""
        return self.one_device.gradients(self.batch)

    @functools.cached_property
    def whole_step(self) -> Step:
        """First step on one device with the same batch, without gradient accumulation."""
        if self.small.config.train.accumulation == 1:
            return self.one_device_step
        return self.with_accumulation(1, self.batch)

    def with_accumulation(self, count: int, batch: Batch) -> Step:
        """Run the first step on one device with `count` microbatches (gradient accumulation)."""
        train = dataclasses.replace(self.small.config.train, accumulation=count)
        mesh = MeshRun(dataclasses.replace(self.small.config, train=train))
        return mesh.gradients(batch, self.one_device.created)

    @functools.cached_property
    def meshes(self) -> list[MeshRun]:
        """The shrunk configuration on each of its meshes."""
        return [MeshRun(self.small.on(sizes)) for sizes in self.small.meshes]

    @functools.cached_property
    def within_stages(self) -> MeshRun:
        """The first mesh without pipeline parallelism: the mesh of one stage."""
        config = self.meshes[0].config
        if config.mesh.pipe == 1:
            return self.meshes[0]
        sizes: MeshSizes = {**self.small.meshes[0], "pipe": 1}
        return MeshRun(self.small.on(sizes))


def keep_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer so that the first part of its state is its input gradients."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params),
        lambda updates, state, params=None: (updates, updates),
    )
    return optax.chain(keep, optimizer)
