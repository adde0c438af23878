"""Arguments and results of a train step, in bytes on one device: the state and the batch."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax

from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.gathering import is_pinned
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout, is_variable, logical_axes
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout, rows_held
from jaxtrain.training.offload import Offload
from jaxtrain.training.offload.on_disk import BLOCKS_ALIVE, largest_block
from jaxtrain.training.offload.streaming import is_matrix_of_layers
from jaxtrain.training.settings import Config
from jaxtrain.training.state import with_shardings


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Bytes on one device of a step's arguments, which are also its results.

    Attributes:
      params: the master parameters, trained or frozen.
      optimizer: the optimizer state, and the state of an exchange.
      other: the batch, counters, running statistics.
      host: state in the memory of the device's host, not part of the others.
      streamed: the most of host and disk state that is on the device at once, for the update.
      disk: state in files on the device's host, not in memory.
      read: bytes of `host` that a step reads, counting each read of an array.
    """

    params: int
    optimizer: int
    other: int
    host: int = 0
    streamed: int = 0
    disk: int = 0
    read: int = 0

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return self.params + self.optimizer + self.other


def argument_bytes(config: Config, layout: Layout) -> Arguments:
    """Return the state and the batch on one device: a compiled step's arguments, up to tile
    padding."""
    held = _arguments(shapes_of_state(without_layout(config, layout)), layout, config.offload)
    batch = config.train.data.abstract_batch(rows_held(config, layout))
    given = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch))
    return dataclasses.replace(held, other=held.other + given // layout.batch_devices())


def _value(leaf: Any) -> Any:
    return leaf.get_value() if is_variable(leaf) else leaf


def without_layout(config: Config, layout: Layout) -> Config:
    """Return the configuration without what a state's shapes are independent of: a cache key."""
    sizes = layout.mesh.shape  # an axis of -1 is resolved
    mesh = Mesh(pipe=sizes["pipe"], data=sizes["data"], fsdp=1)
    if config.exchange.method == "synchronous":
        mesh = dataclasses.replace(mesh, data=1)
    return dataclasses.replace(
        config,
        mesh=mesh,
        train=dataclasses.replace(config.train, accumulation=1),
        sharding=type(config.sharding)(),
        offload=Offload(),
        remat=type(config.remat)(),
        attention=Attention(kernel="reference"),
        loss=type(config.loss)(),
        pipeline=dataclasses.replace(
            config.pipeline,
            schedule="interleaved" if config.pipeline.virtual_stages > 1 else "gpipe",
            microbatches=mesh.pipe,
        ),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class StateShapes:
    """Shapes of a state that many layouts share; the object itself is the cache key.

    Attributes:
      config: from `without_layout`.
      shapes: the state's shapes.
    """

    config: Config
    shapes: Any

    @functools.cached_property
    def weights(self) -> list[Any]:
        """The parameters as named variables, with stages padded as in a pipeline."""
        return jax.tree.leaves(self.shapes.weights, is_leaf=is_variable)

    @functools.cached_property
    def trained(self) -> list[Any]:
        """The parameters that have a gradient."""
        return jax.tree.leaves(self.shapes.params, is_leaf=is_variable)


@functools.lru_cache(maxsize=64)
def shapes_of_state(config: Config) -> StateShapes:
    """Return the shapes of a configuration's state, whose mesh is that of `without_layout`."""
    layout = abstract_layout(config, config.mesh.pipe * config.mesh.data)
    return StateShapes(config, compose(config, layout).shapes())


# Reads of parameters in host memory: for the compute copy, the sum of squares, and the update.
_READS = {"params": 3}


@functools.lru_cache(maxsize=4096)
def _arguments(state: StateShapes, layout: Layout, offload: Offload) -> Arguments:
    """Return the arguments of a step without its batch."""
    shapes = state.shapes
    program = compose(dataclasses.replace(state.config, offload=offload), layout)
    placed = program.shardings(shapes)
    held = {"params": 0, "opt_state": 0, "exchange": 0}
    host, disk, read, together = 0, 0, 0, dict[int, int]()
    for (path, leaf), where in zip(
        jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_variable),
        jax.tree.leaves(placed, is_leaf=is_variable),
        strict=True,
    ):
        shape, sharding = map(_value, (leaf, where))
        size = math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
        in_files = offload.optimizer_state == "disk" and path[0].name == "opt_state"
        if in_files and len(shape.shape):
            disk += size
        elif is_pinned(sharding):
            host += size
            read += size * _READS.get(path[0].name, 1)
            stacked = is_variable(leaf) and logical_axes(leaf)[:1] == ("layers",)
            count = shape.shape[0] if stacked else 1
            together[count] = together.get(count, 0) + size // count
        else:
            held[path[0].name] = held.get(path[0].name, 0) + size
    params = held.pop("params") + held.pop("frozen", 0)
    optimizer = held.pop("opt_state") + held.pop("exchange")
    streamed = max(together.values(), default=0)
    if disk:
        # Blocks in flight: each is in host memory too.
        whole = with_shardings(shapes, placed)
        blocks = BLOCKS_ALIVE * largest_block(whole.params, whole.opt_state)
        streamed, host = streamed + blocks // 2, host + blocks  # `_streaming` counts it twice
    return Arguments(params, optimizer, sum(held.values()), host, streamed, disk, read)


# Which parameters to count, and by which sharding.
_Which = Literal["weights", "cast", "trained", "layers' matrices"]
_Way = Literal["gradient", "weight", "parameter"]


@functools.lru_cache(maxsize=16384)
def elements(
    state: StateShapes, layout: Layout, way: _Way, which: _Which, layers: bool | None
) -> int:
    """Return the elements of parameters on one device in a sharding; only in or outside the
    layers."""
    spec = {"gradient": layout.gradient, "weight": layout.weight, "parameter": layout.parameter}
    total = 0
    for variable in state.weights if which in ("weights", "cast") else state.trained:
        axes = logical_axes(variable)
        if which == "layers' matrices" and not is_matrix_of_layers(variable):
            continue
        if which == "cast" and role_of(variable) == "quantized":
            continue
        if layers is None or layers == ("layers" in axes):
            shape = variable.get_value().shape
            total += math.prod(layout.sharding_of(spec[way](axes)).shard_shape(shape))
    return total
