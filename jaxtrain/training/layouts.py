"""Layout of a configuration, and its attention kernel, on devices or an abstract mesh.

Batches are filled up to the layout.

A filled batch has rows past its last that have zero weight: the last row again, with a loss mask
of 0 and no document. Losses, gradients and router statistics are those of the other rows;
the work on them is wasted.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.config.errors import UserError, nearest_divisor, nearest_multiple
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import without_weight
from jaxtrain.models.model import Model, reads_pairs, reads_tokens
from jaxtrain.nn.attention.kernel_registry import Choice, Request, choose
from jaxtrain.nn.parameters import Statistic
from jaxtrain.parallel import dividing
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.mesh import Mesh, abstract_mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, is_variable, logical_axes
from jaxtrain.training.offload import Offload
from jaxtrain.training.settings import Config, Train
from jaxtrain.training.setup import parameter_shapes


def abstract_layout(config: Config, device_count: int) -> Layout:
    """Return the layout on an abstract mesh, without devices.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    return _layout_on(_abstract(config, shared_mesh(config, device_count), device_count), config)


def layout(config: Config, devices: Sequence[jax.Device] | None = None) -> Layout:
    """Return the layout on all devices, or on the given ones.

    Raises:
      UserError: the devices are in other slices than `Mesh.dcn` specifies.
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
    """Return the mesh with `fsdp` as large as all sizes allow, and the rest in `data`.

    With embed_dim 2048 on 48 devices there are 16 shards and 3 copies of each:
    exactly Mesh.data=3 and Mesh.fsdp=16. If nothing divides, or if `data` means more
    than copies (replicas of an exchange, slices), it is unchanged.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    own, sizes = config.mesh, config.mesh.sizes(device_count)
    means_more = config.exchange.method != "synchronous" or own.dcn.get("fsdp", 1) > 1
    if sizes["fsdp"] == 1 or config.sharding.zero == 0 or means_more:
        return own
    share = largest_fsdp(config, device_count)
    if share == 1:
        return own
    return dataclasses.replace(own, data=sizes["data"] * (sizes["fsdp"] // share), fsdp=share)


def largest_fsdp(config: Config, device_count: int) -> int:
    """Return the largest divisor of the written `fsdp` that divides all sizes; 1 if none does.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    plain = _layout_on(_abstract(config, config.mesh, device_count), config)
    return _largest_fsdp(plain, config.train.model)


def notes(config: Config, layout: Layout) -> list[str]:
    """Return notes on arrays that are replicated more than configured, on zero-weight rows, and
    on experts that multiply more rows than assigned.
    """
    sizes, model = config.mesh.sizes(layout.mesh.size), config.train.model
    found = [*dividing.notes(layout, sizes, model), *notes_of_filling(config, layout)]
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
        f"Precision.params={dtypes.params!r}: whole weights take as much memory as whole "
        "masters, and the shards come on top; Sharding.masters='whole' takes less"
    ]


@functools.lru_cache(maxsize=16)
def shapes_of(model: Model) -> nnx.State:
    """Return the shapes of a model's parameters; no array is made.

    Cached per model: a search needs them for thousands of layouts.
    """
    return parameter_shapes(model.build)


def _keeps_plainly(config: Config) -> bool:
    """Whether all state of a parameter has its shape and sharding.

    8-bit and 4-bit blocks, factored moments and preconditioners have sizes and layouts of
    their own, as adapters, what replicas exchange and what is in a host's memory.
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
    attention = config.train.model.attention
    num_kv_heads = None if attention is None else attention.num_kv_heads
    found = Layout.of(mesh, config.sharding, num_kv_heads)
    if found.mesh.shape["pipe"] > 1 or found.mesh.shape["tensor"] > 1:
        return _replicate_uneven(found, config.train.model)
    return found


@functools.lru_cache(maxsize=4096)
def _largest_fsdp(layout: Layout, model: Model) -> int:
    return dividing.largest_fsdp(layout, shapes_of(model))


@functools.lru_cache(maxsize=4096)
def _replicate_uneven(layout: Layout, model: Model) -> Layout:
    return dividing.replicate_uneven(layout, shapes_of(model))


def parts_of_batch(train: Train, layout: Layout, *, microbatches: int) -> int:
    """Return the number that the rows on the devices must be a multiple of.

    `microbatches` are those of a pipeline.
    """
    piped = 1 if layout.mesh.shape["pipe"] == 1 else microbatches
    return layout.batch_devices() * train.accumulation * piped


def rows_held(config: Config, layout: Layout) -> int:
    """Return the number of rows in a batch's arrays: the global batch's, and zero-weight rows."""
    rows = config.train.global_batch_size
    parts = parts_of_batch(config.train, layout, microbatches=config.pipeline.microbatches)
    return -(-rows // parts) * parts if config.train.fill_batch else rows


def with_filling_rows(batch: Batch, config: Config, layout: Layout) -> Batch:
    """Return a user-provided batch with the zero-weight rows that `Train.fill_batch` adds, if any.

    Raises:
      UserError: such rows would change what is computed.
    """
    sizes = {getattr(leaf, "shape", ())[:1] for leaf in jax.tree.leaves(batch)}
    if not config.train.fill_batch or len(sizes) != 1 or sizes <= {(), (0,)}:
        return batch  # its errors are reported like those of any other
    ((rows,),) = sizes
    train = dataclasses.replace(config.train, global_batch_size=rows)
    held = rows_held(dataclasses.replace(config, train=train), layout)
    if held == rows:
        return batch
    if reasons := list(_cannot_be_filled(train, config.exchange.method)):
        does_not = f"Batch.inputs has {rows} rows, which are not {held}"
        raise UserError(
            "\n".join(f"{does_not}, and Train.fill_batch=True {reason}" for reason in reasons)
        )
    slots = np.arange(held)
    last = jax.tree.map(lambda leaf: leaf[np.minimum(slots, rows - 1)], batch)
    return without_weight(last, slots >= rows)


def fill_batch(config: Config, layout: Layout) -> Config:
    """Return the configuration with zero-weight rows counted in its global batch."""
    train = dataclasses.replace(config.train, global_batch_size=rows_held(config, layout))
    return dataclasses.replace(config, train=train)


def notes_of_filling(config: Config, layout: Layout) -> Iterator[str]:
    """Yield a note if rows have zero weight."""
    rows, held = config.train.global_batch_size, rows_held(config, layout)
    if held > rows:
        yield (
            f"Train.global_batch_size={rows} is filled to {held} rows, a multiple of its "
            f"{layout.batch_devices()} devices and their microbatches: {held - rows} have "
            f"zero weight, {(held - rows) / held:.1%} of the work"
        )


def validate_batch(
    settings: Train, layout: Layout | None, *, microbatches: int, exchange: str
) -> Iterator[str]:
    """Yield an error message if the batch does not divide and cannot be filled.

    Args:
      settings: the batch and its accumulation.
      layout: determines how many devices split the batch; None: unknown.
      microbatches: of a pipeline.
      exchange: the exchange method.
    """
    batch, accumulation = settings.global_batch_size, settings.accumulation
    devices = 1 if layout is None else layout.batch_devices()
    times = f"Train.accumulation={accumulation}"
    if layout is None or layout.mesh.shape["pipe"] == 1:
        microbatches = 1
    else:
        times += f" times Pipeline.microbatches={microbatches}"
    parts = devices * accumulation * microbatches
    if batch % parts == 0:
        return
    over = f"the {devices} devices that split the batch times " if layout is not None else ""
    does_not = f"Train.global_batch_size={batch} does not divide over {over}{times}"
    nearest = f"the nearest multiple of {parts} is {nearest_multiple(batch, parts)}"
    if settings.fill_batch:
        for reason in _cannot_be_filled(settings, exchange):
            yield f"{does_not}, and Train.fill_batch=True {reason}; {nearest}"
        return
    rest, fits = devices * microbatches, ""
    if batch % rest == 0:
        fits = f", or set Train.accumulation={nearest_divisor(batch // rest, accumulation)}"
    yield f"{does_not}; {nearest}{fits}, or fill the batch: Train.fill_batch=True"


def _cannot_be_filled(settings: Train, exchange: str) -> Iterator[str]:
    """Yield the reasons why zero-weight rows would change the result."""
    model = settings.model
    name = type(model).__name__
    if has_statistics(model):
        yield f"would count zero-weight rows in the running statistics of {name}"
    if model.experts is not None and settings.data.abstract_batch(1).segment_ids is None:
        yield (
            f"would count zero-weight rows in the router's losses of {name}, which recognize "
            "them with TextData.separate_documents=True"
        )
    if exchange != "synchronous":
        yield f"would give replicas of Exchange.method={exchange!r} unequal rows to average"
    if settings.noise_scale_every:
        yield (
            f"leaves microbatches of unequal rows, which "
            f"Train.noise_scale_every={settings.noise_scale_every} compares"
        )


@functools.lru_cache(maxsize=16)  # a search calls it for thousands of layouts of one model
def has_statistics(model: Model) -> bool:
    """Return whether a model has running statistics, such as those of batch norm."""
    module = nnx.eval_shape(lambda: model.build(jax.random.key(0)))
    return bool(jax.tree.leaves(nnx.state(module, Statistic)))


def resolve_kernel(config: Config, platform: str) -> Choice | None:
    """Return the attention kernel of a configuration on a platform, with 'auto' resolved; None for
    a model without attention.

    Args:
      config: the configuration; a Mesh.context of -1 is treated as splitting sequences.
      platform: 'cpu', 'gpu', `devices.OLD_GPU` or 'tpu': of the target devices.
    """
    request = kernel_request(config, platform)
    if request is None:
        return None
    kernel = config.attention.kernel
    return choose(request) if kernel == "auto" else Choice(kernel, "as Attention.kernel says")


def kernel_request(config: Config, platform: str) -> Request | None:
    """Return the requirements of a configuration's model on an attention kernel; None without
    attention over text.

    For pairs it is the cross-attention: a kernel that supports that without a causal
    mask also supports self-attention.
    """
    model, batch = config.train.model, config.train.data.abstract_batch(1)
    attention = model.attention
    if not (reads_tokens(model) or reads_pairs(model)) or attention is None:
        return None
    length = batch.inputs.shape[1]
    return Request(
        platform=platform,
        dtype=config.precision.compute,
        causal=attention.causal,
        window=attention.window,
        segment_ids=batch.segment_ids is not None,
        cached=False,
        head_dim=attention.key_dim,
        T=length,
        S=length if batch.source is None else batch.source.shape[1],
        biased=attention.biased,
        capped=attention.softcap is not None,
        sinks=attention.sinks,
        pattern=attention.pattern,
        in_ring=config.mesh.context != 1 and config.attention.context_parallel == "ring",
    )


def resolve_config(config: Config, platform: str) -> Config:
    """Return the configuration with 'auto' replaced by the chosen kernel."""
    if config.attention.kernel != "auto":
        return config
    choice = resolve_kernel(config, platform)
    kernel: Any = "reference" if choice is None else choice.kernel
    return dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, kernel=kernel)
    )
