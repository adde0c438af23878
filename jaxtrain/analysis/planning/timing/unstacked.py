"""Traffic over `tensor` between layers of different shapes, such as in convolutional networks.

Each device computes a shard of the outputs of each layer, as in Krizhevsky 2014, "One weird trick
for parallelizing convolutional neural networks" (arXiv 1404.5997), for fully connected layers. The
layer's input is all-gathered before it, and the gradient of its input is all-reduced after it. The
compiler may gather an input once for several branches, or use a reduce-scatter.
"""

import functools
import math
from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from jaxtrain.analysis.planning.textbook.facts import Expected, Facts
from jaxtrain.analysis.planning.textbook.flops import products_of, shape_of
from jaxtrain.analysis.planning.timing.executed import of_one_row, trace_gradients
from jaxtrain.nn.layers import SHARED
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.layouts import resolve_config
from jaxtrain.training.settings import Config


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
