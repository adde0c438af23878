"""FLOPs of matmuls and bytes read and written, for what one device executes in a step.

FLOPs are counted on the traced step, those of attention's scores for themselves.
"""

import dataclasses
import functools
import math

import jax
from jax.extend.core import ClosedJaxpr

from jaxtrain.analysis.planning.textbook.facts import weights_of
from jaxtrain.analysis.planning.textbook.flops import count_flops, products_of, shape_of
from jaxtrain.analysis.planning.textbook.profile import on_platform
from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import (
    Model,
    passes_of,
    reads_pairs,
    reads_tokens,
    stack_flops,
    tokens_per_position,
)
from jaxtrain.nn.attention.kernels import KERNELS
from jaxtrain.nn.attention.sparse import SCOPE
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout, shapes_of
from jaxtrain.training.offload.offload import Offload
from jaxtrain.training.optimizers.matrices import sides
from jaxtrain.training.pipeline.stages import deal
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import IN_DEVICE_MEMORY
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import base_step

# Forward passes that attention's backward pass takes.
_SCORES_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class RowFlops:
    """FLOPs of the products for one row of the batch, forward and backward.

    Attributes:
      executed: with recomputation; attention scores in full.
      scores: the attention scores among them, in full.
      narrow: those with operands of 8 bits, none of them scores.
    """

    executed: int
    scores: int
    narrow: int


def row_flops(config: Config) -> RowFlops:
    """Counted on the traced step, once for each model and remat policy."""
    return _row_flops(of_one_row(config))


def of_one_row(config: Config) -> Config:
    """The configuration on one device, with one row: what a step's products are traced from."""
    train = dataclasses.replace(config.train, global_batch_size=1, accumulation=1)
    return dataclasses.replace(
        config,
        train=train,
        mesh=Mesh(fsdp=1),
        sharding=type(config.sharding)(),
        exchange=type(config.exchange)(),
        offload=Offload(),
        pipeline=type(config.pipeline)(),
        attention=dataclasses.replace(
            config.attention, kernel="sparse" if _by_pattern(config) else "reference"
        ),
    )


def _by_pattern(config: Config) -> bool:
    return KERNELS[config.attention.kernel].by_pattern


@functools.lru_cache(maxsize=256)
def _row_flops(config: Config) -> RowFlops:
    counted = count_flops(trace_gradients(config), lambda scope: "BKGTS" in scope or SCOPE in scope)
    return RowFlops(counted.matmul, counted.chosen, counted.narrow)


@functools.lru_cache(maxsize=4)
def trace_gradients(config: Config) -> ClosedJaxpr:
    """The gradients of a configuration `of_one_row`, or of as many as it says.

    As on a TPU, where every product is one: a CPU takes some convolutions as products of patches,
    and a GPU's kernels are opaque.
    """
    layout = on_platform(abstract_layout(config, 1), "tpu", "planned")
    setup = compose(config, layout).setup.replace(storage=IN_DEVICE_MEMORY)
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        batch = config.train.data.abstract_batch(config.train.global_batch_size)
        batch = with_shardings(batch, setup.batch_shardings(batch))
        return jax.make_jaxpr(setup.gradients)(base_step(setup).abstract_state(), batch)


def stack_costs(config: Config) -> tuple[float, ...]:
    """What a stage costs of each stack of layers, in any unit, where a pipeline runs one after the
    other."""
    model = config.train.model
    if passes_of(model) == 1:
        return (1.0,)
    return stack_flops(model, example_shape(config.train.data.abstract_batch(1)))


def pad_layers(config: Config, devices: int) -> Config:
    """The configuration with as many layers as a pipeline's stages have slots.

    All ranks go in lockstep, and the empty slots of shorter stages are computed and masked.
    """
    model, ranks = config.train.model, config.mesh.sizes(devices)["pipe"]
    if ranks == 1 or model.layers is None:
        return config
    stages = deal(shapes_of(model), ranks, config.pipeline.virtual_stages)
    if stages.valid.all():
        return config
    setting = model.settings["layers"]
    leading = vars(model)[setting] - model.layers  # which stand on the first stage
    padded = dataclasses.replace(model, **{setting: leading + len(stages.valid)})
    return dataclasses.replace(config, train=dataclasses.replace(config.train, model=padded))


def executed_flops(config: Config, layout: Layout) -> float:
    """FLOPs of products that one device executes in a step, with a kernel that is named."""
    row = row_flops(pad_layers(config, layout.mesh.size))
    flops = float(row.executed)
    flops -= row.scores * (1 - score_fraction(config))
    if layout.mesh.shape["pipe"] > 1:
        flops += _recompute_fraction(config) * flops
    return flops * config.train.global_batch_size / layout.mesh.size


def work(config: Config, *, pipelined: bool, devices: int) -> tuple[float, float]:
    """FLOPs that one device executes in products beside attention's scores, and in the scores.

    Those that the mask hides are left out where the kernel skips them. In the backward pass a
    kernel makes them again, which is traced where it goes by a pattern.
    """
    row, rows = row_flops(config), config.train.global_batch_size / devices
    passes, backward = (4, 3) if _by_pattern(config) else (3, _SCORES_BACKWARD)
    forward = row_flops(dataclasses.replace(config, remat=type(config.remat)())).scores / passes
    again = row.scores / forward - passes if forward else 0.0
    kernel = KERNELS[config.attention.kernel]
    if "attention" in config.remat.kept.names and not (kernel.plain or kernel.by_pattern):
        again = 0.0  # a kernel's results are all that its backward pass asks for
    products = float(row.executed - row.scores)
    if pipelined:
        products += _recompute_fraction(config) * products
        again += config.pipeline.backward == "recompute"
    return products * rows, score_fraction(config) * forward * (1 + again + backward) * rows


def score_fraction(config: Config) -> float:
    """The part of all pairs of a query and a key whose scores the attention kernel computes.

    A kernel that skips what a causal mask or a window hides does so in blocks; the blocks that are
    hidden in part are not counted whole.
    """
    model = config.train.model
    if model.attention is None or not KERNELS[config.attention.kernel].skips_hidden:
        return 1.0
    shape = example_shape(config.train.data.abstract_batch(1))
    if reads_pairs(model):  # the source sees all of itself, the target all of the source
        S, T = shape
        return (S * S + T * T / 2 + S * T) / (S * S + T * T + S * T)
    if reads_tokens(model):
        return model.attention.visible_share(shape[0])
    return 1.0  # patches of an image see all others


def _recompute_fraction(config: Config) -> float:
    """What a pipeline's stages do once more in their backward pass, as a part of all FLOPs."""
    if config.pipeline.backward != "recompute":
        return 0.0
    return 1 / 4 if config.remat.kept.repeats_products else 1 / 3


@functools.lru_cache(maxsize=64)
def _numbers_of_a_row(config: Config) -> int:
    """What products read and write more for a row more: weights are read for all rows together."""

    def numbers(rows: int) -> int:
        train = dataclasses.replace(config.train, global_batch_size=rows)
        program = trace_gradients(dataclasses.replace(config, train=train))
        return sum(
            product.times * math.prod(shape_of(array))
            for product in products_of(program)
            for array in (*product.equation.invars[:2], *product.equation.outvars)
        )

    return numbers(2) - numbers(1)


def _elements_of_a_token(model: Model) -> tuple[int, int, int]:
    """Elements that a token's products read and write in a forward pass: as wide as the stream,
    others, and logits."""
    stream = split = vocabulary = 0
    for weight in weights_of(model):
        sizes = dict(zip(weight.axes, weight.shape, strict=True))
        if "vocab" in sizes:
            vocabulary = sizes["vocab"]
            continue
        if not weight.is_matrix or "vocab_embed" in sizes:
            continue  # tables that are looked up
        stack, rows, columns = sides(weight.axes)
        times, matrices = (model.layers or 1) if weight.is_layer else 1, weight.shape[: len(stack)]
        if "experts" in sizes and model.experts is not None:
            times, matrices = times * model.experts.per_token, ()
        # Matrices that are stacked read the same input.
        for dims, count in ((rows, 1), (columns, math.prod(matrices))):
            elements = times * count * math.prod(weight.shape[dim] for dim in dims)
            if "embed" in {weight.axes[dim] for dim in dims}:
                stream += elements
            else:
                split += elements
    return stream, split, tokens_per_position(model) * vocabulary


def activation_bytes(config: Config, *, pipelined: bool, devices: int) -> float:
    """Bytes of activations that the products of a step read and write, over all devices.

    Each weight has an input and an output, of two bytes per element: a forward pass, two for the
    gradients, and what is recomputed; logits in float32, of each token that is predicted. Of
    images, vectors and pairs they are those of the traced step's products. With tensor parallelism
    what is as wide as the stream is read by every device of the axis, unless the sequence is split
    too. A kernel that keeps the scores reads or writes them in each of attention's products: two
    bytes for the 2 H FLOPs of one.
    """
    if config.train.model.inputs != "tokens":
        return 2.0 * config.train.global_batch_size * _numbers_of_a_row(of_one_row(config))
    shape = config.train.data.abstract_batch(1).inputs.shape
    stream, split, vocabulary = _elements_of_a_token(config.train.model)
    copies = 1 if config.sharding.sequence_parallel else config.mesh.sizes(devices)["tensor"]
    row = row_flops(config)
    plain = row_flops(dataclasses.replace(config, remat=type(config.remat)()))
    passes = 3 * (row.executed - row.scores) / max(plain.executed - plain.scores, 1)
    passes += pipelined and config.pipeline.backward == "recompute"
    rows = config.train.global_batch_size
    wide = 2 * passes * (copies * stream + split)
    attention, kept = config.train.model.attention, 0.0
    kernel = KERNELS[config.attention.kernel]
    if attention is not None and (kernel.plain or kernel.by_pattern):
        again = plain.scores / 3 if pipelined and config.pipeline.backward == "recompute" else 0
        kept = 2 * (row.scores + again) / (attention.key_dim + attention.value_dim)
    return rows * (shape[1] * (wide + 12 * vocabulary) + kept)
