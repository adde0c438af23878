"""Refuses a configuration that cannot run: every violation in one message, before any compile."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jaxtrain.context import refuse_context
from jaxtrain.errors import UserError, nearest_divisor, nearest_multiple
from jaxtrain.exchange.settings import refuse as refuse_exchange
from jaxtrain.experts import refuse_capacity
from jaxtrain.guard import refuse as refuse_guard
from jaxtrain.kernels import refuse as refuse_kernel
from jaxtrain.mesh import MESH_AXES, abstract_mesh, make_mesh
from jaxtrain.models import attends
from jaxtrain.moments import refuse_moments
from jaxtrain.narrow import refuse_matmul
from jaxtrain.optimizer import make_schedule
from jaxtrain.pipeline.schedules import cut_layers
from jaxtrain.pipeline.schedules import make_schedule as make_pipeline
from jaxtrain.program import kernel_request
from jaxtrain.settings import Config
from jaxtrain.sharding import Layout, is_variable, logical_axes, parts_of
from jaxtrain.tables import RULES, MeshAxes, refuse_tensor_layout


def check(
    config: Config,
    *,
    device_count: int,
    platform: str,
    kind: str | None = None,
    reads_data: bool = True,
) -> None:
    """Raises UserError with every reason why this configuration cannot run on these devices.

    Args:
      config: the configuration.
      device_count: devices over all processes.
      platform: 'cpu', 'gpu', `kernels.OLD_GPU` or 'tpu'.
      kind: the devices' `device_kind`; None where what they can do is not asked.
      reads_data: whether the tokenizer is at hand, and its vocabulary compared with the model's.
    """
    found = list(_mesh(config, device_count))
    if not found:
        layout = abstract_layout(config, device_count)
        found += _batch(config, layout)
        found += _sizes(config, layout)
        found += refuse_exchange(config.exchange, layout.mesh.shape)
        found += refuse_guard(config.guard, config.exchange.method)
        found += refuse_moments(config.optimizer.moments, config.exchange.method)
        found += _context(config, layout)
        found += _experts(config, layout)
        found += _stages(config, layout)
        found += _replicas(config, layout)
    found += refuse_matmul(config.precision.matmul, platform, kind, config.train.model)
    found += _model_and_data(config, platform, reads_data)
    found += _schedule(config)
    if found:
        raise UserError("\n".join(found))


def abstract_layout(config: Config, device_count: int) -> Layout:
    """The layout on a mesh of names and sizes alone."""
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
    num_kv_heads = getattr(config.train.model, "num_kv_heads", None)
    return Layout.of(mesh, config.sharding, num_kv_heads)


def _mesh(config: Config, device_count: int) -> Iterator[str]:
    try:
        sizes = config.mesh.sizes(device_count)
    except UserError as error:
        yield str(error)
        return
    usable = _usable_axes(config)
    for axis in MESH_AXES:
        if sizes[axis] > 1 and axis not in usable:
            yield (
                f"Mesh.{axis}={sizes[axis]}: {type(config.train.model).__name__} has nothing that "
                f"this axis could split; use Mesh.{axis}=1 and {' or '.join(usable)} instead"
            )
    if sizes["tensor"] == 1 and config.sharding.sequence_parallel:
        yield (
            "Sharding.sequence_parallel=True with Mesh.tensor=1: it splits the sequence over "
            "tensor; set Mesh.tensor above 1 or Sharding.sequence_parallel=False"
        )
    yield from refuse_tensor_layout(
        config.sharding.tensor_layout,
        depth=config.sharding.tensor_depth,
        sizes=sizes,
        sequence_parallel=config.sharding.sequence_parallel,
        experts="experts" in _logical_axes(config.train.model),
    )


def _usable_axes(config: Config) -> list[str]:
    """The mesh axes that the table gives to the batch or to a parameter of this model.

    A vocabulary alone is no reason to split: every device would compute all layers.
    """
    logical = _logical_axes(config.train.model) - {"vocab"}
    names = {name for axis in logical for name in parts_of(RULES[axis].parameter)}
    # The batch is split over expert too, but only for the sake of experts.
    names |= set(parts_of(RULES["batch"].activation)) - {"expert"}
    if attends(config.train.model):
        names.add("context")
    return [axis for axis in MESH_AXES if axis in names]


def _logical_axes(model: Any) -> set[str]:
    """What the dimensions of a model's parameters mean."""
    return {axis for _, variable in _parameters(model) for axis in logical_axes(variable)}


def _parameters(model: Any) -> list[tuple[Any, Any]]:
    """Path and abstract variable of every parameter."""
    shapes = nnx.state(nnx.eval_shape(lambda: model.build(jax.random.key(0))), nnx.Param)
    return jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_variable)


def _batch(config: Config, layout: Layout) -> Iterator[str]:
    train, devices = config.train, layout.batch_devices()
    parts = devices * train.accumulation
    times = f"Train.accumulation={train.accumulation}"
    if layout.mesh.shape["pipe"] > 1:
        parts *= config.pipeline.microbatches
        times += f" times Pipeline.microbatches={config.pipeline.microbatches}"
    if train.global_batch_size % parts:
        nearest = nearest_multiple(train.global_batch_size, parts)
        yield (
            f"Train.global_batch_size={train.global_batch_size} does not divide over the {devices} "
            f"devices that split the batch times {times}; the nearest multiple of {parts} is "
            f"{nearest}"
        )


def _sizes(config: Config, layout: Layout) -> Iterator[str]:
    model = config.train.model
    name, seen = type(model).__name__, set()
    for path, variable in _parameters(model):
        axes = logical_axes(variable)
        for spec in (layout.parameter(axes), layout.moment(axes)):
            for axis, size, part in zip(axes, variable.get_value().shape, spec, strict=True):
                cause = model.settings.get(axis, axis), size, part
                if axis == "layers" or size % layout.size(part) == 0 or cause in seen:
                    continue  # layers that do not divide are spread over the stages unevenly
                seen.add(cause)
                yield _does_not_divide(model, name, axis, size, part, layout, path)
    length = getattr(config.train.data, "sequence_length", None)
    tensor = layout.mesh.shape["tensor"]
    if length and layout.sequence_parallel and length % tensor:
        yield (
            f"TextData.sequence_length={length} does not divide over Mesh.tensor={tensor} "
            f"(Sharding.sequence_parallel); the nearest is {nearest_multiple(length, tensor)}"
        )


def _context(config: Config, layout: Layout) -> Iterator[str]:
    context, tensor = layout.mesh.shape["context"], layout.mesh.shape["tensor"]
    length = getattr(config.train.data, "sequence_length", None)
    model: Any = config.train.model
    chunk = config.loss.chunk_size
    if context == 1 or length is None:
        return
    yield from refuse_context(
        config.attention.context_parallel,
        context=context,
        length=length,
        tensor=tensor,
        num_heads=model.num_heads,
        kernel=config.attention.kernel,
        model=type(model).__name__,
    )
    parts = context * tensor
    if layout.sequence_parallel and length % tensor == 0 and length % parts:
        yield (
            f"TextData.sequence_length={length} does not divide over Mesh.context x Mesh.tensor="
            f"{parts} (Sharding.sequence_parallel); the nearest is "
            f"{nearest_multiple(length, parts)}"
        )
    if chunk is not None and length % chunk == 0 and chunk % context:
        fitting = [d for d in range(context, length + 1, context) if length % d == 0]
        nearest = min(fitting, key=lambda d: abs(d - chunk)) if fitting else None
        yield (
            f"Loss.chunk_size={chunk} does not divide over Mesh.context={context}; the nearest is "
            f"{nearest}"
        )


def _experts(config: Config, layout: Layout) -> Iterator[str]:
    model = config.train.model
    yield from refuse_capacity(
        getattr(model, "capacity_factor", None),
        context=layout.mesh.shape["context"],
        model=type(model).__name__,
    )


def _stages(config: Config, layout: Layout) -> Iterator[str]:
    pipeline, ranks = config.pipeline, layout.mesh.shape["pipe"]
    if ranks == 1:
        for field in dataclasses.fields(pipeline):
            value, default = getattr(pipeline, field.name), field.default
            if value != default:
                yield (
                    f"Pipeline.{field.name}={value!r} does nothing with Mesh.pipe=1; set Mesh.pipe "
                    f"above 1 or leave it at {default!r}"
                )
        return
    if layout.mesh.shape["context"] > 1 and config.attention.context_parallel == "ring":
        yield (
            f"Attention.context_parallel='ring' with Mesh.pipe={ranks}: a ring's permutes need all "
            "stages at once, and these do different things in one tick; use "
            "Attention.context_parallel='ulysses'"
        )
    try:
        make_pipeline(
            pipeline.schedule,
            ranks=ranks,
            microbatches=pipeline.microbatches,
            virtual_stages=pipeline.virtual_stages,
        )
        model: Any = config.train.model
        cut = cut_layers(model.num_layers, ranks * pipeline.virtual_stages)
    except UserError as error:
        yield str(error)
        return
    block = config.scan.layers_per_iteration
    if block and max(cut) % block:
        yield (
            f"Scan.layers_per_iteration={block} does not divide the {max(cut)} layers of the "
            f"longest stage; the nearest is {nearest_divisor(max(cut), block)} (0 unrolls all)"
        )


def _does_not_divide(
    model: Any, name: str, axis: str, size: int, part: MeshAxes, layout: Layout, path: Any
) -> str:
    over = layout.size(part)
    mesh_axes = " x ".join(_written(name, layout) for name in parts_of(part))
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    setting = model.settings.get(axis)
    if setting is None:
        return (
            f"{name}: {where} has {axis}={size}, which does not divide over {mesh_axes}={over}; "
            f"use a {mesh_axes} that divides {size}"
        )
    value = getattr(model, setting)
    of = "" if value == size else f" ({axis}={size} of {where})"
    fits = f"the nearest multiple is {nearest_multiple(value, over)}" if value == size else ""
    smaller = max(d for d in range(1, over + 1) if size % d == 0 and over % d == 0)
    way_out = "; ".join(part for part in (fits, f"or set {mesh_axes}={smaller}") if part)
    if layout.tensor_layout != "1d":
        tensor = math.prod(layout.mesh.shape.get(a, 1) for a in ("depth", "row", "tensor"))
        way_out += f" (Sharding.tensor_layout={layout.tensor_layout!r}, Mesh.tensor={tensor})"
    return f"{name}.{setting}={value}{of} does not divide over {mesh_axes}={over}; {way_out}"


def _written(axis: str, layout: Layout) -> str:
    """How the user writes the size of an axis of the mesh; the sides of a grid are q."""
    on_a_grid = layout.tensor_layout != "1d" and axis in ("depth", "row", "tensor")
    return "q" if on_a_grid else f"Mesh.{axis}"


def _replicas(config: Config, layout: Layout) -> Iterator[str]:
    """Comparing what no two devices hold."""
    every = config.corruption.compare_replicas_every
    if every and layout.mesh.size == 1:
        yield (
            f"Corruption.compare_replicas_every={every} on one device: nothing is held twice; "
            "use 0, or Corruption.replay_every"
        )


def _model_and_data(config: Config, platform: str, reads_data: bool) -> Iterator[str]:
    model, data, name = config.train.model, config.train.data, type(config.train.model).__name__
    batch = data.abstract_batch(config.train.global_batch_size)
    wants = "text" if model.objective == "next_token" else "images"
    gives = "text" if batch.inputs.ndim == 2 else "images"
    if wants != gives:
        yield (
            f"Train.model=@{name}() learns from {wants}, but Train.data=@{type(data).__name__}() "
            f"gives {gives}; use {'@TextData()' if wants == 'text' else '@ImageData()'}"
        )
    elif gives == "text":
        if reads_data:
            yield from _vocabulary(model, data)
        yield from _text(config, model, data, batch, platform)
    else:
        yield from _images(config, model, data, batch)


def _vocabulary(model: Any, data: Any) -> Iterator[str]:
    name = type(model).__name__
    vocab_size = data.vocab_size
    if vocab_size > model.vocab_size:
        yield (
            f"{name}.vocab_size={model.vocab_size} is smaller than the tokenizer's {vocab_size} "
            f"tokens (TextData.tokenizer={data.tokenizer!r}); use at least {vocab_size}"
        )


def _text(config: Config, model: Any, data: Any, batch: Any, platform: str) -> Iterator[str]:
    name, length = type(model).__name__, batch.inputs.shape[1]
    if length > model.context_length:
        yield (
            f"TextData.sequence_length={length} is longer than {name}.context_length="
            f"{model.context_length}; use at most {model.context_length}"
        )
    chunk = config.loss.chunk_size
    if chunk is not None and length % chunk:
        yield (
            f"Loss.chunk_size={chunk} does not divide TextData.sequence_length={length}; "
            f"the nearest is {nearest_divisor(length, chunk)}"
        )
    block = config.scan.layers_per_iteration
    if block and model.num_layers % block and config.mesh.pipe == 1:
        nearest = nearest_divisor(model.num_layers, block)
        yield (
            f"Scan.layers_per_iteration={block} does not divide {name}.num_layers="
            f"{model.num_layers}; the nearest is {nearest} (0 unrolls all)"
        )
    if not attends(model):
        yield from _without_effect(config, "Attention.kernel", "Attention.context_parallel")
    request, kernel = kernel_request(config, platform), config.attention.kernel
    # What 'auto' chooses can do what is asked.
    if kernel != "auto" and request is not None:
        yield from refuse_kernel(kernel, request)


def _images(config: Config, model: Any, data: Any, batch: Any) -> Iterator[str]:
    name, channels = type(model).__name__, batch.inputs.shape[-1]
    # Settings of a loop over equal layers, of attention and of a sequence: nothing here reads them.
    yield from _without_effect(
        config, "Remat.policy", "Scan.layers_per_iteration", "Attention.kernel",
        "Attention.context_parallel", "Loss.chunk_size", "Precision.matmul",
    )  # fmt: skip
    if channels != model.channels:
        yield (
            f"{name}.channels={model.channels}, but the images of {type(data).__name__} have "
            f"{channels}; set {name}.channels={channels}"
        )
    if data.num_classes > model.num_classes:
        yield (
            f"{name}.num_classes={model.num_classes} is smaller than the data's "
            f"{data.num_classes} classes; set {name}.num_classes={data.num_classes}"
        )


def _without_effect(config: Config, *unread: str) -> Iterator[str]:
    """Settings that the model does not read and that are not at their defaults."""
    for setting in unread:
        section, field = setting.split(".")
        settings = getattr(config, section.lower())
        value, default = getattr(settings, field), getattr(type(settings)(), field)
        if value != default:
            name = type(config.train.model).__name__
            yield f"{setting}={value!r} does nothing for {name}; leave it at {default!r}"


def _schedule(config: Config) -> Iterator[str]:
    try:
        make_schedule(config.schedule, config.optimizer.learning_rate, config.train.steps)
    except UserError as error:
        yield str(error)
