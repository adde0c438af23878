"""Executed matmul FLOPs and activation bytes of one device in a train step.

FLOPs are counted on the traced step, with attention scores counted separately.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxtrain.analysis.planning.textbook.facts import Expected, Facts, weights_of
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
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.sparse import SCOPE
from jaxtrain.nn.layers import SHARED
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout, resolve_config, shapes_of
from jaxtrain.training.offload import Offload
from jaxtrain.training.optimizers.matrices import sides
from jaxtrain.training.pipeline.schedules import deal
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import IN_DEVICE_MEMORY
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import base_step

# Cost of attention's backward pass, in forward passes.
_SCORES_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class RowFlops:
    """Matmul FLOPs for one row of the batch, forward and backward.

    Attributes:
      executed: all of them, including recomputation and masked attention scores.
      scores: FLOPs of attention scores, including masked ones; part of `executed`.
      narrow: FLOPs of matmuls with 8-bit operands, excluding scores.
    """

    executed: int
    scores: int
    narrow: int


def row_flops(config: Config) -> RowFlops:
    """Return the matmul FLOPs of the traced step, cached by model and remat policy."""
    return _row_flops(of_one_row(config))


def of_one_row(config: Config) -> Config:
    """Return the configuration for one row on one device, on which a step's matmuls are traced."""
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
    """Return the jaxpr of the gradients of a configuration, usually from `of_one_row`.

    It is traced as on a TPU, where every matmul is visible: a CPU computes some convolutions as
    matmuls of patches, and a GPU's kernels are opaque.
    """
    layout = on_platform(abstract_layout(config, 1), "tpu", "planned")
    setup = compose(config, layout).setup.replace(storage=IN_DEVICE_MEMORY)
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        batch = config.train.data.abstract_batch(config.train.global_batch_size)
        batch = with_shardings(batch, setup.batch_shardings(batch))
        return jax.make_jaxpr(setup.gradients)(base_step(setup).abstract_state(), batch)


def stack_costs(config: Config) -> tuple[float, ...]:
    """Return the relative cost per pipeline stage of each stack of layers, in any unit, if a
    pipeline runs the stacks one after the other."""
    model = config.train.model
    if passes_of(model) == 1:
        return (1.0,)
    return stack_flops(model, example_shape(config.train.data.abstract_batch(1)))


def pad_layers(config: Config, devices: int) -> Config:
    """Return the configuration with its layers padded to all slots of the pipeline's stages.

    All ranks run in lockstep: the empty slots of shorter stages are computed and masked.
    """
    model, ranks = config.train.model, config.mesh.sizes(devices)["pipe"]
    if ranks == 1 or model.layers is None:
        return config
    stages = deal(shapes_of(model), ranks, config.pipeline.virtual_stages)
    if stages.valid.all():
        return config
    setting = model.settings["layers"]
    leading = vars(model)[setting] - model.layers  # which the first stage holds
    padded = dataclasses.replace(model, **{setting: leading + len(stages.valid)})
    return dataclasses.replace(config, train=dataclasses.replace(config.train, model=padded))


def executed_flops(config: Config, layout: Layout) -> float:
    """Return the matmul FLOPs that one device executes in a step, with a named attention kernel."""
    row = row_flops(pad_layers(config, layout.mesh.size))
    flops = float(row.executed)
    flops -= row.scores * (1 - score_fraction(config))
    if layout.mesh.shape["pipe"] > 1:
        flops += _recompute_fraction(config) * flops
    return flops * config.train.global_batch_size / layout.mesh.size


def work(config: Config, *, pipelined: bool, devices: int) -> tuple[float, float]:
    """Return the FLOPs of one device in matmuls other than attention scores, and in scores.

    Masked scores are left out if the kernel skips them. A kernel's backward pass recomputes the
    scores; for a sparse kernel (`by_pattern`) the trace includes that.
    """
    row, rows = row_flops(config), config.train.global_batch_size / devices
    passes, backward = (4, 3) if _by_pattern(config) else (3, _SCORES_BACKWARD)
    forward = row_flops(dataclasses.replace(config, remat=type(config.remat)())).scores / passes
    again = row.scores / forward - passes if forward else 0.0
    kernel = KERNELS[config.attention.kernel]
    if "attention" in config.remat.kept.names and not (kernel.plain or kernel.by_pattern):
        again = 0.0  # a kernel's backward pass needs only its saved results
    products = float(row.executed - row.scores)
    if pipelined:
        products += _recompute_fraction(config) * products
        again += config.pipeline.backward == "recompute"
    return products * rows, score_fraction(config) * forward * (1 + again + backward) * rows


def score_fraction(config: Config) -> float:
    """Return the fraction of query-key pairs whose scores the attention kernel computes.

    A kernel that skips the pairs masked by causality or a window skips them in blocks. Of partially
    masked blocks only the unmasked part is counted.
    """
    model = config.train.model
    if model.attention is None or not KERNELS[config.attention.kernel].skips_hidden:
        return 1.0
    shape = example_shape(config.train.data.abstract_batch(1))
    if reads_pairs(model):  # the source attends to all of itself, the target to all of the source
        S, T = shape
        return (S * S + T * T / 2 + S * T) / (S * S + T * T + S * T)
    if reads_tokens(model):
        return model.attention.visible_share(shape[0])
    return 1.0  # the patches of an image attend to each other


def _recompute_fraction(config: Config) -> float:
    """Return the fraction of all FLOPs that pipeline stages recompute in their backward pass."""
    if config.pipeline.backward != "recompute":
        return 0.0
    return 1 / 4 if config.remat.kept.repeats_products else 1 / 3


@functools.lru_cache(maxsize=64)
def _numbers_of_a_row(config: Config) -> int:
    """Return the elements that matmuls read and write per row, without the shared weights."""

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
    """Return the elements that matmuls read and write per token in a forward pass: as wide as the
    residual stream, others, and logits."""
    stream = split = vocabulary = 0
    for weight in weights_of(model):
        sizes = dict(zip(weight.axes, weight.shape, strict=True))
        if "vocab" in sizes:
            vocabulary = sizes["vocab"]
            continue
        if not weight.is_matrix or "vocab_embed" in sizes:
            continue  # embedding tables
        stack, rows, columns = sides(weight.axes)
        times, matrices = (model.layers or 1) if weight.is_layer else 1, weight.shape[: len(stack)]
        if "experts" in sizes and model.experts is not None:
            times, matrices = times * model.experts.per_token, ()
        # Stacked matrices read the same input.
        for dims, count in ((rows, 1), (columns, math.prod(matrices))):
            elements = times * count * math.prod(weight.shape[dim] for dim in dims)
            if "embed" in {weight.axes[dim] for dim in dims}:
                stream += elements
            else:
                split += elements
    return stream, split, tokens_per_position(model) * vocabulary


def activation_bytes(config: Config, *, pipelined: bool, devices: int) -> float:
    """Return the bytes of activations that matmuls read and write in a step, over all devices.

    Each weight has an input and an output, with two bytes per element: one forward pass, two for
    the gradients, and the recomputation. Logits are float32, for each predicted token. For images,
    vectors and pairs, elements are counted on the traced step's matmuls. With tensor parallelism,
    every device of the axis reads the activations as wide as the residual stream, unless the
    sequence is also sharded. A kernel that materializes the scores reads or writes them in each
    attention matmul: two bytes for its 2 H FLOPs.
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


# -- traffic over `tensor` between layers of different shapes, such as in convolutional networks ---
# Each device computes a shard of the outputs of each layer, as in Krizhevsky 2014, "One weird trick
# for parallelizing convolutional neural networks" (arXiv 1404.5997), for fully connected layers.
# The layer's input is all-gathered before it, and the gradient of its input is all-reduced after
# it. The compiler may gather an input once for several branches, or use a reduce-scatter.


def between_layers(config: Config, layout: Layout) -> Iterator[Expected]:
    """Return the gathers and sums of a step; none for a single stack of layers, see `traffic`.

    Args:
      config: the configuration.
      layout: on a mesh, or on an abstract one.
    """
    facts = Facts(config, layout).of_microbatches
    k = facts.size("tensor")
    if k == 1 or facts.model.layers is not None:
        return
    # The first layer's input is the batch: it is not sharded and has no gradient.
    for size, is_split in _inputs(of_one_row(resolve_config(config, "cpu")))[1:]:
        whole = facts.B * size * facts.value_bytes
        if is_split:
            yield Expected(
                "all-gather", "tensor", facts.passes, whole // k, "inputs of layers", "B I (k-1)/k"
            )
        yield Expected(
            "all-reduce", "tensor", facts.passes, whole, "gradients of inputs", "2 B I (k-1)/k"
        )


@functools.lru_cache(maxsize=16)
def _inputs(config: Config) -> tuple[tuple[int, bool], ...]:
    """Return the input size of each layer with sharded outputs, in order, and whether the input is
    sharded too."""
    forward = (one for one in products_of(trace_gradients(config)) if "transpose(" not in one.scope)
    found = []
    for product in (one.equation for one in forward):
        inputs, outputs = _channels(product)
        if not outputs % SHARED:
            found.append((math.prod(shape_of(product.invars[0])), not inputs % SHARED))
    return tuple(found)


def _channels(product: JaxprEqn) -> tuple[int, int]:
    """Return the input and output channels of a convolution or matmul."""
    numbers = product.params["dimension_numbers"]
    left, result = shape_of(product.invars[0]), shape_of(product.outvars[0])
    if product.primitive.name == "conv_general_dilated":
        return left[numbers.lhs_spec[1]], result[numbers.out_spec[1]]
    (contracted, _), _ = numbers
    return math.prod(left[axis] for axis in contracted), result[-1]
