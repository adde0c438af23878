"""Layout of a configuration: on devices, or on an abstract mesh."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jaxtrain.config.partial import NotRead
from jaxtrain.models.model import Model
from jaxtrain.parallel import dividing
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.mesh import Mesh, abstract_mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, is_variable, logical_axes
from jaxtrain.training.offload.offload import Offload
from jaxtrain.training.program import uneven
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import parameter_shapes


def abstract_layout(config: Config, device_count: int) -> Layout:
    """The layout on a mesh of names and sizes alone.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    return _layout_on(_abstract(config, shared_mesh(config, device_count), device_count), config)


def layout(config: Config, devices: Sequence[jax.Device] | None = None) -> Layout:
    """The layout on all devices, or on these.

    Raises:
      UserError: the devices stand in other slices than `Mesh.dcn` says.
    """
    devices = jax.devices() if devices is None else devices
    mesh = make_mesh(
        shared_mesh(config, len(devices)),
        devices,
        tensor_layout=config.sharding.tensor_layout,
        tensor_depth=config.sharding.tensor_depth,
    )
    found = _layout_on(mesh, config)
    if platform_of(mesh) == "tpu" and _keeps_plainly(config):
        return dividing.in_tiles(found, shapes_of(config.train.model))
    return found


def shared_mesh(config: Config, device_count: int) -> Mesh:
    """The mesh with as many devices along `fsdp` as all sizes divide by, the rest in `data`.

    Shards are shared by 16 of 48 devices where embed_dim is 2048, and there are 3 copies of each:
    exactly what Mesh.data=3 and Mesh.fsdp=16 are. Where nothing divides, or where `data` means more
    than copies (replicas of an exchange, slices), it stays as it is.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    own, sizes = config.mesh, config.mesh.sizes(device_count)
    means_more = config.exchange.method != "synchronous" or own.dcn.get("fsdp", 1) > 1
    if sizes["fsdp"] == 1 or config.sharding.zero == 0 or means_more:
        return own
    with contextlib.suppress(NotRead):  # of a model that was rejected: the rest is known
        plain = _layout_on(_abstract(config, own, device_count), config)
        share = dividing.largest_fsdp(plain, shapes_of(config.train.model))
        if share > 1:
            rest = sizes["fsdp"] // share
            return dataclasses.replace(own, data=sizes["data"] * rest, fsdp=share)
    return own


def notes(config: Config, layout: Layout) -> list[str]:
    """A sentence for everything that lies on more devices than the configuration says, where rows
    of the batch have zero weight, and where experts multiply more rows than their own."""
    sizes, model = config.mesh.sizes(layout.mesh.size), config.train.model
    found = [*dividing.notes(layout, sizes, model), *uneven.notes(config, layout)]
    found += _notes_of_masters(config, layout)
    experts = model.experts
    if experts is not None and experts.capacity_factor is None:
        platform, name = platform_of(layout.mesh), type(model).__name__
        from jaxtrain.nn.matmul import grouped

        found += grouped.notes(platform, experts=experts.count, model=name)
    return found


def _notes_of_masters(config: Config, layout: Layout) -> list[str]:
    dtypes = config.precision
    if layout.masters == "whole" or dtypes.compute != dtypes.params:
        return []
    return [
        f"Sharding.masters='sharded' with Precision.compute={dtypes.compute!r} and "
        f"Precision.params={dtypes.params!r}: whole weights take as much as whole masters would, "
        "and the shards come on top; Sharding.masters='whole' takes less"
    ]


@functools.lru_cache(maxsize=16)
def shapes_of(model: Model) -> nnx.State:
    """A model's parameters, of which no array is made.

    Made once of a model: a search asks for thousands of layouts of one.
    """
    return parameter_shapes(model.build)


def _keeps_plainly(config: Config) -> bool:
    """Whether all that is kept of a parameter is of its own shape, on the devices of its shards.

    Blocks of eight or four bits, factored moments and preconditioners are of sizes and layouts of
    their own, as adapters, what replicas tell each other and what lies in a host's memory.
    """
    if config.finetune.lora_rank is not None or config.exchange.method != "synchronous":
        return False
    if config.offload != Offload():
        return False
    for variable in jax.tree.leaves(shapes_of(config.train.model), is_leaf=is_variable):
        shape, axes = variable.get_value().shape, logical_axes(variable)
        kept = config.optimizer.keeps(shape, axes)
        if any((one.shape, one.axes) != (shape, axes) for one in kept):
            return False
    return True


def _abstract(config: Config, mesh: Mesh, device_count: int) -> jax.sharding.AbstractMesh:
    return abstract_mesh(
        mesh,
        device_count,
        tensor_layout=config.sharding.tensor_layout,
        tensor_depth=config.sharding.tensor_depth,
    )


def _layout_on(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, config: Config) -> Layout:
    num_kv_heads = None
    with contextlib.suppress(NotRead):  # of a model that was rejected: the rest is known
        attention = config.train.model.attention
        num_kv_heads = None if attention is None else attention.num_kv_heads
    found = Layout.of(mesh, config.sharding, num_kv_heads)
    with contextlib.suppress(NotRead):
        if found.mesh.shape["pipe"] > 1 or found.mesh.shape["tensor"] > 1:
            return dividing.replicate_uneven(found, shapes_of(config.train.model))
    return found
