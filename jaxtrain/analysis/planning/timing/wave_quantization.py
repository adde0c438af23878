"""Wave quantization: slowdown of GPU matmuls whose last wave of tiles is not full.

A GPU computes a matmul [m, n] in tiles, one at a time on each of its multiprocessors. All of them
wait for the last wave, even if it has few tiles (NVIDIA, "Matrix Multiplication Background User's
Guide", sections on tile and wave quantization). It is emptier with few rows per microbatch or thin
tensor-parallel shards.
"""

import math

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.facts import Facts, Weight
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.optimizers.matrices import sides
from jaxtrain.training.settings import Config

# cuBLAS's largest tiles, which reach the rates of `efficiency_factors.BARE_MATMUL`.
_TILES = ((256, 128), (128, 256))
# The smallest part of a split contraction (split-K) for one multiprocessor.
_SPLIT = 512


def quantization(config: Config, layout: Layout, target: Target) -> float:
    """Return the time of the layers' matmuls relative to full waves, at least 1.

    1 on a TPU, which has no waves, and for models that are not stacks of layers over tokens.

    The forward pass, input gradient and weight gradient are three matmuls with equal FLOPs.
    """
    facts, processor = Facts(config, layout).of_microbatches, target.chip.processor
    if processor is None or not facts.is_text:
        return 1.0
    ideal = taken = 0.0
    for weight in facts.weights:
        if not (weight.is_matrix and weight.is_layer) or len(weight.shape) < 2:
            continue
        alike, rows, (inputs, outputs) = _product(facts, weight)
        forwards = 1 + facts.recomputes
        for count, m, n, k in (
            (forwards, rows, outputs, inputs),
            (1, rows, inputs, outputs),
            (1, inputs, outputs, rows),
        ):
            flops = count * alike * rows * inputs * outputs
            ideal += flops
            taken += flops * waves(m, n, k, alike, processor.cores)
    return taken / ideal if ideal else 1.0


def waves(m: int, n: int, k: int, alike: int, cores: int) -> float:
    """Return the waves of `alike` matmuls [m, k] x [k, n] in one launch over those of full tiles.

    If there are fewer tiles than multiprocessors, the contraction is split between them (split-K).
    """

    def over(tile: tuple[int, int]) -> float:
        tiles = alike * math.ceil(m / tile[0]) * math.ceil(n / tile[1])
        fractional = alike * m * n / (tile[0] * tile[1])
        if tiles < cores:
            tiles, fractional = (
                x * min(cores // tiles, max(k // _SPLIT, 1)) for x in (tiles, fractional)
            )
        return math.ceil(tiles / cores) * cores / fractional

    return min(map(over, _TILES))


def _product(facts: Facts, weight: Weight) -> tuple[int, int, tuple[int, int]]:
    """Return the matmuls in one launch on a device (its experts), the rows of each, and the two
    dimensions of its weight."""
    placed = facts.layout.sharding_of(facts.layout.weight(weight.axes))
    shape = placed.shard_shape(weight.shape)
    stack, rows, columns = sides(weight.axes)
    alike = math.prod(shape[dim] for dim in stack)
    tokens, experts = facts.B * facts.T, facts.model.experts
    if experts is not None and "experts" in weight.axes:
        tokens = max(tokens * experts.per_token // alike, 1)
    return alike, tokens, (
        math.prod(shape[dim] for dim in rows), math.prod(shape[dim] for dim in columns)
    )  # fmt: skip
