"""Activations that a layer or a model saves for its backward pass, from the residuals of JAX.

This is independent of the model: `jax.vjp` of the trained layer itself is traced from shapes, and
its residuals are counted with their sharding. It supports any model, kernel and remat policy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Var

from jaxtrain.data.batch import Batch
from jaxtrain.nn.attention.blocked import trace_as_one_block
from jaxtrain.nn.attention.kernel_registry import KERNELS, TILE
from jaxtrain.nn.precision import to_compute
from jaxtrain.nn.remat import RESIDUAL, Policy, Remat, name_activation, remat
from jaxtrain.nn.transformer.language_model import Transformer
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout, resolve_config
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.offload import Offload
from jaxtrain.training.pipeline.backward import Backward
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup, parameter_shapes
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import base_step, train_all

# Named scopes of a layer; residuals outside of them belong to the residual stream.
KINDS = ("attention", "mlp", "experts", "router", "lstm")
STREAM = "residual stream"


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """Bytes of one row of a batch on a device, in one layer.

    Attributes:
      kept: residuals of the backward pass on the device, by the scope that created them.
      offloaded: residuals in the memory of the device's host.
      products: results of matmuls with weights, into which elementwise operations are fused.
      widest: the largest of these by scope, such as the MLP's, whose gradients are live together.
      stream: the residual stream between layers.
      hidden: the same, gathered along the sequence over tensor (sequence parallelism).
    """

    kept: tuple[tuple[str, int], ...]
    offloaded: int
    products: int
    widest: int
    stream: int
    hidden: int

    @property
    def kept_bytes(self) -> int:
        """Total residual bytes on the device."""
        return sum(size for _, size in self.kept)


def on_platform(layout: Layout, platform: str, device_kind: str) -> Layout:
    """Return an abstract layout with a device kind, so that kernels can select by platform."""
    mesh = layout.mesh
    assert isinstance(mesh, jax.sharding.AbstractMesh)
    device = jax.sharding.AbstractDevice(device_kind, 1, platform)
    return dataclasses.replace(layout, mesh=mesh.update(abstract_device=device))


def shard_bytes(aval: Any) -> int:
    """Return the bytes of one device's shard of an abstract array."""
    shape = aval.sharding.shard_shape(aval.shape) if aval.sharding is not None else aval.shape
    return math.prod(shape) * aval.dtype.itemsize


def is_on_host(aval: Any) -> bool:
    """Return whether an abstract array is in host memory."""
    return aval.memory_space == jax.memory.Space.Host


def layer_profile(config: Config, layout: Layout, platform: str) -> LayerProfile:
    """Return the profile of a layer of this configuration on this layout.

    It depends on few of the settings, and each combination of them is traced once.
    """
    plain, platform = _of_a_layer(config, layout, platform)
    products = _residuals_of(plain, platform, Remat(policy="dots"))
    found = _residuals_of(plain, platform, config.remat)
    kinds = dict(products.kept)
    if config.train.model.experts is not None:
        # 'dots' excludes expert matmuls, which are batched.
        of_experts = _residuals_of(plain, platform, Remat(policy="elementwise")).kept
        kinds["experts"] = dict(of_experts).get("experts", 0)
    total, widest = sum(kinds.values()), max(kinds.values())
    return LayerProfile(
        found.kept, found.offloaded, total, widest, products.stream, products.hidden
    )


def least_profile(config: Config, layout: Layout, platform: str) -> tuple[int, int]:
    """Return lower bounds of a layer's residuals on the device, and of the simultaneous results in
    its backward pass, in bytes per row.

    They are those without `context`, divided evenly, which is the most that it can shard an array.
    Ring attention keeps no scores, so for a kernel that does the bounds are 0.
    """
    config, sizes = resolve_config(config, platform), layout.mesh.shape
    plain = KERNELS[config.attention.kernel].plain and sizes["context"] > 1
    if plain or config.sharding.tensor_layout != "1d":
        return 0, 0
    # Without a capacity, more ranks have more slots.
    expert = _expert_ranks(config, sizes["expert"]) if _has_capacity(config) else 1
    mesh = Mesh(fsdp=2, expert=expert, tensor=sizes["tensor"])
    alone = dataclasses.replace(config, mesh=mesh)
    ranks = 2 * expert * sizes["tensor"]
    found = layer_profile(alone, abstract_layout(alone, ranks), platform)
    results = found.widest + found.products * config.remat.kept.repeats_products
    return found.kept_bytes // sizes["context"], results // sizes["context"]


def _has_capacity(config: Config) -> bool:
    experts = config.train.model.experts
    return experts is not None and experts.capacity_factor is not None


def _expert_ranks(config: Config, ranks: int) -> int:
    """Return the fewest ranks along `expert` with the same bytes per row: with a capacity the slots
    per row are the same for any number of ranks from two on."""
    if not _has_capacity(config):
        return ranks
    return next((d for d in range(2, ranks + 1) if ranks % d == 0), 1)


def layer_stash(config: Config, layout: Layout, platform: str) -> int:
    """Return the bytes per row that one layer holds on a device for its weight gradients, in a
    schedule that computes them later than its input gradient."""
    plain, platform = _of_a_layer(config, layout, platform)
    return _stash(plain, platform, config.remat, config.pipeline.backward == "residuals")


def _of_a_layer(config: Config, layout: Layout, platform: str) -> tuple[Config, str]:
    """Return the configuration without settings that one layer is independent of, and the platform
    for its trace."""
    config = resolve_config(config, platform)
    sizes = layout.mesh.shape
    mesh = Mesh(
        # Weights are gathered, which distinguishes them from the residuals.
        fsdp=2,
        expert=_expert_ranks(config, sizes["expert"]),
        context=sizes["context"],
        tensor=config.mesh.sizes(layout.mesh.size)["tensor"],
    )
    plain = dataclasses.replace(
        config,
        mesh=mesh,
        train=dataclasses.replace(config.train, accumulation=1),
        sharding=dataclasses.replace(config.sharding, zero=3, accumulate="shard", masters="whole"),
        exchange=type(config.exchange)(),
        offload=type(config.offload)(),
        pipeline=type(config.pipeline)(),
        remat=type(config.remat)(),
        loss=type(config.loss)(),
    )
    if plain.attention.kernel == "cudnn":
        plain, platform = _with_flash_kernel_that_traces(plain), "tpu"
    return plain, platform


def _with_flash_kernel_that_traces(config: Config) -> Config:
    """Replace cuDNN's attention, which JAX traces only if cuDNN is installed, by the TPU's kernel.

    It has the same residuals: queries, keys, values, output and a float32 per query. It requires
    whole tiles, so the length is rounded up.
    """
    data: Any = config.train.data
    length = -(-data.sequence_length // TILE) * TILE
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, kernel="tpu"),
        train=dataclasses.replace(
            config.train, data=dataclasses.replace(data, sequence_length=length)
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Kept:
    kept: tuple[tuple[str, int], ...]
    offloaded: int
    stream: int
    hidden: int


@functools.lru_cache(maxsize=256)
def _stash(config: Config, platform: str, settings: Remat, keep_residuals: bool) -> int:
    layout, one = _first_layer(config, platform)
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current(), trace_as_one_block():

        def stage(layer: Any, x: jax.Array, context: Any) -> Any:
            def run(layer: Any, x: jax.Array) -> Any:
                return one.run(layer, x, *context)

            return remat(run, settings.kept, prevent_cse=False)(layer, x)

        context = one.positions, one.mask
        backward = Backward(stage, one.weights, one.x, context, keep_residuals=keep_residuals)
        return sum(map(shard_bytes, backward.halves(one.weights, one.x, context).stash))


@functools.lru_cache(maxsize=1024)
def _residuals_of(config: Config, platform: str, settings: Remat) -> _Kept:
    layout, one = _first_layer(config, platform)
    return _residuals(layout, one, settings.kept)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The first layer of a program, as shapes, under its layout.

    Attributes:
      weights: the layer's weights, in the compute dtype.
      x: its input.
      positions: positions of the tokens.
      mask: the attention mask.
      finished: the final hidden states that the head reads.
      run: (weights, x, positions, mask) -> its output and auxiliary losses.
    """

    weights: Any
    x: Any
    positions: Any
    mask: Any
    finished: Any
    run: Callable[[Any, jax.Array, Any, Any], Any]


@functools.lru_cache(maxsize=256)
def _first_layer(config: Config, platform: str) -> tuple[Layout, _Layer]:
    """Return the first layer with one row per device, and its layout, for all remat policies."""
    mesh = config.mesh
    devices = mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    layout = on_platform(abstract_layout(config, devices), platform, "planned")
    setup = compose(config, layout).setup
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        return layout, _layer_of(setup, config, layout.batch_devices())


def _layer_of(setup: Setup, config: Config, rows: int) -> _Layer:
    """Return the first layer of a setup; call it under the layout."""
    execution, objective = setup.execution, setup.objective
    assert isinstance(objective, TokenObjective), "a loop over equal layers has tokens go through"
    shapes, whole = parameter_shapes(setup.build), train_all(setup)
    shapes = jax.eval_shape(lambda p: to_compute(p, setup.precision.compute), shapes)
    weights = with_shardings(shapes, whole.shardings(whole.shapes()).params)
    batch = config.train.data.abstract_batch(rows)
    batch = with_shardings(batch, setup.batch_shardings(batch))
    graph = nnx.split(parameter_model(setup), nnx.Param, ...)[0]

    def into_layer(weights: Any, batch: Any) -> Any:
        model: Transformer = nnx.merge(graph, weights)
        batch = objective.arrange(batch, execution)
        assert batch.positions is not None, "a batch of text has positions"
        x = model.embed(batch.inputs, batch.positions)
        layer = jax.tree.map(lambda leaf: leaf[0], model.layers)
        return layer, x, batch.positions, objective.mask(batch), model.finish(x)

    layer, x, positions, mask, finished = jax.eval_shape(into_layer, weights, batch)
    model, of_first = parameter_model(setup), execution.of_layer(0)

    def run(layer: Any, x: jax.Array, positions: Any, mask: Any) -> Any:
        y, _, auxiliary = model.run_layer(
            layer, name_activation(x, RESIDUAL), positions, mask, of_first
        )
        return y, auxiliary

    return _Layer(layer, x, positions, mask, finished, run)


def _residuals(layout: Layout, one: _Layer, policy: Policy) -> _Kept:
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current(), trace_as_one_block():

        def forward(layer: Any, x: jax.Array, positions: jax.Array, mask: Any) -> Any:
            def run(layer: Any, x: jax.Array) -> Any:
                return one.run(layer, x, positions, mask)

            return jax.tree.leaves(jax.vjp(remat(run, policy, prevent_cse=False), layer, x)[1])

        closed = jax.make_jaxpr(forward)(one.weights, one.x, one.positions, one.mask)
    # A layer's weights are part of the arguments, also if reshaped; positions and masks are shared
    # by all layers. Count only the residual stream and what depends on it.
    of_stream = {closed.jaxpr.invars[len(jax.tree.leaves(one.weights))]}
    for equation in closed.jaxpr.eqns:
        if any(isinstance(var, Var) and var in of_stream for var in equation.invars):
            of_stream |= {*equation.outvars}
    sizes: dict[str, int] = {}
    offloaded = 0
    for var in dict.fromkeys(v for v in closed.jaxpr.outvars if isinstance(v, Var)):
        aval: Any = var.aval
        if is_on_host(aval):
            offloaded += shard_bytes(aval)
        elif var in of_stream and aval.ndim > 1:
            kind = _kind(closed.jaxpr, var)
            sizes[kind] = sizes.get(kind, 0) + shard_bytes(aval)
    return _Kept(
        tuple(sorted(sizes.items())), offloaded, shard_bytes(one.x), shard_bytes(one.finished)
    )


def parameter_model(setup: Setup) -> Any:
    """Return the model with shapes instead of arrays."""
    return nnx.eval_shape(lambda: setup.build(jax.random.key(0)))


def _kind(jaxpr: Any, var: Var) -> str:
    """Return the named scope of the equation that creates a variable, including inside calls."""
    for equation in jaxpr.eqns:
        if var in equation.outvars:
            found = [kind for kind in KINDS if kind in str(equation.source_info.name_stack)]
            if found:
                return found[-1]
            inner = equation.params.get("jaxpr")
            inner = getattr(inner, "jaxpr", inner)
            if inner is not None and len(inner.outvars) == len(equation.outvars):
                made = inner.outvars[equation.outvars.index(var)]
                return _kind(inner, made) if isinstance(made, Var) else STREAM
    return STREAM


# -- of a whole model ------------------------------------------------------------------------------
# For models without a loop over equal layers; `profile` is for the others.


def of_forward(config: Config) -> Config:
    """Return the configuration without settings that a forward pass on a given layout is
    independent of, except the rows: a cache key for many layouts."""
    return dataclasses.replace(
        config,
        mesh=Mesh(fsdp=1),
        train=dataclasses.replace(config.train, accumulation=1),
        sharding=type(config.sharding)(),
        offload=Offload(),
        pipeline=Pipeline(),
    )


def of_weights(layout: Layout) -> Layout:
    """Return an equivalent layout for the forward pass: ZeRO stages 1 and 2 shard what it does not
    read, and up to stage 2 fsdp shards only the batch, like data."""
    if layout.splits_parameters:
        return layout
    sizes = dict(layout.mesh.shape)
    sizes |= {"data": 1, "fsdp": sizes["data"] * sizes["fsdp"]}
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    mesh = layout.mesh.update(axis_sizes=tuple(sizes.values()))
    return dataclasses.replace(layout, mesh=mesh, zero=0)


def residual_bytes_of_rows(config: Config, layout: Layout, rows: int) -> tuple[int, int]:
    """Return `residual_bytes` for any number of rows, by linear extrapolation of two traces."""
    devices = layout.batch_devices()
    one, two = (residual_bytes(config, layout, times * devices) for times in (1, 2))
    first, host = (a + (rows // devices - 1) * (b - a) for a, b in zip(one, two, strict=True))
    return first, host


@functools.lru_cache(maxsize=4096)
def residual_bytes(config: Config, layout: Layout, rows: int) -> tuple[int, int]:
    """Return the bytes that `rows` save for the backward pass, on a device and on its host."""
    setup = compose(config, layout).setup
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        state = base_step(setup).abstract_state()
        batch = config.train.data.abstract_batch(rows)
        batch = with_shardings(batch, setup.batch_shardings(batch))

        def forward(weights: Any, statistics: Any, batch: Batch) -> Any:
            trained, frozen = to_compute(weights, setup.precision.compute)

            def loss(trained: Any) -> Any:
                whole = setup.tuning.join((trained, frozen))
                sums, statistics_ = setup.sums(whole, statistics, batch, train=True)
                return sums["loss"], statistics_

            return jax.tree.leaves(jax.vjp(loss, trained, has_aux=True)[1])

        closed: Any = jax.make_jaxpr(forward)(state.weights, state.statistics, batch)
    found = [var.aval for var in _of_examples(closed.jaxpr, len(jax.tree.leaves(batch)))]
    on_host = sum(shard_bytes(x) for x in found if is_on_host(x))
    return sum(map(shard_bytes, found)) - on_host, on_host


# Results that a compiler recomputes in the fusion that reads them: a mask from its operands, and
# constants.
_MADE_AGAIN = frozenset({"broadcast_in_dim", "eq", "ge", "gt", "iota", "le", "lt", "ne"})


def _of_examples(jaxpr: Any, count: int) -> list[Any]:
    """Return the outputs, without duplicates, that depend on the last `count` inputs but are not
    inputs themselves: weights are part of the arguments, also if reshaped."""
    depends, made_again = set(jaxpr.invars[len(jaxpr.invars) - count :]), set()
    inputs = set(depends)
    for equation in jaxpr.eqns:
        if any(isinstance(var, Var) and var in depends for var in equation.invars):
            depends |= {*equation.outvars}
        if equation.primitive.name in _MADE_AGAIN:
            made_again |= {*equation.outvars}
    outputs = dict.fromkeys(var for var in jaxpr.outvars if isinstance(var, Var))
    return [var for var in outputs if var in depends - inputs - made_again]
