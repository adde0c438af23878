"""The layout of a configuration: on devices, or on the names and sizes of a mesh alone."""

import contextlib
from collections.abc import Sequence

import jax

from jaxtrain.config.partial import NotRead
from jaxtrain.parallel.mesh import abstract_mesh, make_mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config


def abstract_layout(config: Config, device_count: int) -> Layout:
    """The layout on a mesh of names and sizes alone.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    mesh = abstract_mesh(
        config.mesh,
        device_count,
        tensor_layout=config.sharding.tensor_layout,
        tensor_depth=config.sharding.tensor_depth,
    )
    return _layout_on(mesh, config)


def layout(config: Config, devices: Sequence[jax.Device] | None = None) -> Layout:
    """The layout on all devices, or on these.

    Raises:
      UserError: the devices stand in other slices than `Mesh.dcn` says.
    """
    mesh = make_mesh(
        config.mesh,
        devices,
        tensor_layout=config.sharding.tensor_layout,
        tensor_depth=config.sharding.tensor_depth,
    )
    return _layout_on(mesh, config)


def _layout_on(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, config: Config) -> Layout:
    num_kv_heads = None
    with contextlib.suppress(NotRead):  # of a model that was refused: the rest is known
        attention = config.train.model.attention
        num_kv_heads = None if attention is None else attention.num_kv_heads
    return Layout.of(mesh, config.sharding, num_kv_heads)
