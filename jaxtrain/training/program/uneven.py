"""Global batches that do not divide over devices and microbatches: rejected or padded.

A filled batch has rows past its last that have zero weight: the last row again, with a loss mask
of 0 and of no document. Losses, gradients and router statistics are those of the rows before
them; the work on them is idle.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from jaxtrain.config.errors import UserError, nearest_divisor, nearest_multiple
from jaxtrain.data.batch import Batch
from jaxtrain.data.ordering.rows import without_weight
from jaxtrain.models.model import Model
from jaxtrain.nn.parameters import Statistic
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config, Train


def parts_of_batch(train: Train, layout: Layout, *, microbatches: int) -> int:
    """What the rows on the devices are a multiple of; `microbatches` of a pipeline."""
    piped = 1 if layout.mesh.shape["pipe"] == 1 else microbatches
    return layout.batch_devices() * train.accumulation * piped


def rows_held(config: Config, layout: Layout) -> int:
    """Rows of a batch's arrays: the global batch's, and those that fill it."""
    rows = config.train.global_batch_size
    parts = parts_of_batch(config.train, layout, microbatches=config.pipeline.microbatches)
    return -(-rows // parts) * parts if config.train.fill_batch else rows


def with_filling_rows(batch: Batch, config: Config, layout: Layout) -> Batch:
    """A batch of somebody's own, with the rows that `Train.fill_batch` says it gets, if any.

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
    places = np.arange(held)
    last = jax.tree.map(lambda leaf: leaf[np.minimum(places, rows - 1)], batch)
    return without_weight(last, places >= rows)


def filled(config: Config, layout: Layout) -> Config:
    """The configuration whose global batch is all rows that the devices work on."""
    train = dataclasses.replace(config.train, global_batch_size=rows_held(config, layout))
    return dataclasses.replace(config, train=train)


def notes(config: Config, layout: Layout) -> Iterator[str]:
    """A sentence where rows have zero weight."""
    rows, held = config.train.global_batch_size, rows_held(config, layout)
    if held > rows:
        yield (
            f"Train.global_batch_size={rows} is filled to {held} rows, a multiple of its "
            f"{layout.batch_devices()} devices and their microbatches: {held - rows} have "
            f"zero weight, {(held - rows) / held:.1%} of the work"
        )


def validate(
    settings: Train, layout: Layout | None, *, microbatches: int, exchange: str
) -> Iterator[str]:
    """A sentence where the batch does not divide and is not to be filled, or cannot be.

    Args:
      settings: the batch and its accumulation.
      layout: over how many devices the batch is split; None: that is not known.
      microbatches: of a pipeline.
      exchange: the method by which replicas agree.
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
    """Why rows without weight would change what is computed."""
    model = settings.model
    name = type(model).__name__
    if _has_statistics(model):
        yield f"would count rows that have zero weight in the running statistics of {name}"
    if model.experts is not None and settings.data.abstract_batch(1).segment_ids is None:
        yield (
            f"would count rows that have zero weight in the router's losses of {name}, which tell "
            "them by TextData.separate_documents=True"
        )
    if exchange != "synchronous":
        yield f"would give replicas of Exchange.method={exchange!r} unequal rows to average"
    if settings.noise_scale_every:
        yield (
            f"leaves microbatches of unequal rows, which "
            f"Train.noise_scale_every={settings.noise_scale_every} compares"
        )


@functools.lru_cache(maxsize=16)  # a search asks it of thousands of layouts of one model
def _has_statistics(model: Model) -> bool:
    module = nnx.eval_shape(lambda: model.build(jax.random.key(0)))
    return bool(jax.tree.leaves(nnx.state(module, Statistic)))
