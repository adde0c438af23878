"""Expected collectives of one train step, for a configuration and a mesh.

It is arithmetic on the parameters' shapes and the layout's table alone: nothing is traced twice and
no device is needed, so that a search over meshes can price thousands of them.
"""

import math
import re
from collections.abc import Callable, Iterator

from jaxtrain.analysis.planning.textbook.activation_traffic import activation_traffic
from jaxtrain.analysis.planning.textbook.facts import Expected, Facts, split_over
from jaxtrain.analysis.planning.textbook.weight_traffic import weight_traffic
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.exchange.compression import BLOCK
from jaxtrain.training.exchange.exchange import neighbours
from jaxtrain.training.exchange.power_sgd import narrow
from jaxtrain.training.optimizers.rule import Kept
from jaxtrain.training.settings import Config


def expect_traffic(config: Config, layout: Layout) -> list[Expected]:
    """Return the expected collectives of a step by cause; vectors are included, scalars are not.

    For a pipeline this is the traffic of the busiest rank: what only the first or the last rank
    does (embedding, loss) is counted as if one rank did both.

    Args:
      config: the configuration.
      layout: on a mesh, or on an abstract one (`layouts.abstract_layout`).
    """
    facts = Facts(config, layout)
    activations = activation_traffic(facts.of_microbatches)
    found = [*weight_traffic(facts), *activations, *exchange_traffic(facts)]
    return [one for one in found if one.axis and one.count and one.bytes]


def branch_counts(config: Config, layout: Layout) -> Callable[[str], int | None]:
    """Return the run count of branches by op_name, for `collectives.collectives`.

    A stage's actions run once for each of its microbatches, a permute in the ticks that use its
    edge pattern.
    """
    facts = Facts(config, layout)
    if facts.size("pipe") == 1:
        return lambda op_name: None
    ticks = {name: count for way in facts.crossings().values() for name, count in way.items()}
    accumulation, chunks = config.train.accumulation, config.pipeline.virtual_stages

    def count(op_name: str) -> int | None:
        sent = re.search(r"send_(?:forward|backward)_(?:[a-z]+_)?\d+", op_name)
        if sent:
            return accumulation * ticks.get(sent.group(), 0)
        if "/stage/" not in op_name:
            return None
        once = re.search(r"embedding|loss|transpose\(jvp\(norm\)\)/reduce_sum", op_name)
        return facts.passes * (1 if once else chunks)

    return count


def exchange_traffic(facts: Facts) -> Iterator[Expected]:
    """Yield the collectives that replace the all-reduce of gradients over `data`, if any.

    If they do not run in every step, `Expected.every` is the interval.
    """
    if not facts.replicas_alone:
        return
    settings, k = facts.config.exchange, facts.size("data")
    match settings.method:
        case "local_sgd" | "diloco":
            yield from _means_of_replicas(facts)
        case "gossip":
            count = len(neighbours(settings.graph, k))
            for size in _shards(facts):
                yield Expected(
                    "collective-permute", "data", count, facts.master_bytes * size,
                    "replicas: parameters to neighbours", "n a neighbour",
                )  # fmt: skip
        case "int8":
            blocks = sum(math.ceil(size / BLOCK) for size in _shards(facts))
            blocks = math.ceil(blocks / k) * k
            for width, cause in ((BLOCK, "codes"), (4, "scales")):
                cause = f"replicas: {cause} of gradients"
                yield Expected("all-to-all", "data", 1, blocks * width, cause, "n (k-1)/k")
                yield Expected("all-gather", "data", 1, blocks * width // k, cause, "n (k-1)/k")
        case "sign_sgd":
            size = math.ceil(sum(_shards(facts)) / 4 / k) * k
            for kind, own in (("all-to-all", size), ("all-gather", size // k)):
                yield Expected(kind, "data", 1, own, "replicas: signs of gradients", "n/4 (k-1)/k")
        case "power_sgd":
            yield from _narrow_matrices(facts, settings.rank)
        case "top_k":
            kept = sum(
                max(1, math.ceil(settings.keep * math.ceil(size / k))) for size in _shards(facts)
            )
            for cause in ("values", "places"):
                cause = f"replicas: {cause} of the largest"
                yield Expected("all-to-all", "data", 1, 4 * kept * k, cause, "keep n (k-1)/k")
                yield Expected("all-gather", "data", 1, 4 * kept, cause, "keep n (k-1)/k")


def _narrow_matrices(facts: Facts, rank: int) -> Iterator[Expected]:
    """Yield the all-reduces of P and Q of each matrix, and of each vector itself."""
    for weight in facts.weights:
        narrowed, axes = narrow(weight.shape, weight.axes, rank), weight.axes
        parts: list[tuple[tuple[int, ...], tuple[str, ...]]] = [(weight.shape, axes)]
        if narrowed is not None:
            sides = ((*narrowed.stack, *narrowed.rows), (*narrowed.stack, *narrowed.columns))
            parts = [
                (
                    (*(weight.shape[i] for i in side), narrowed.rank),
                    (*(axes[i] for i in side), "rank"),
                )
                for side in sides
            ]
        for shape, names in parts:
            size = (facts.L if weight.is_layer else 1) * _shard(facts, shape, names)
            yield Expected(
                "all-reduce", "data", 1, 4 * size, "replicas: narrow matrices of gradients",
                "2 n (k-1)/k each",
            )  # fmt: skip


def _means_of_replicas(facts: Facts) -> Iterator[Expected]:
    """Yield the all-reduces of parameters, and of optimizer state if that is averaged too.

    At most one fragment of the parameters is sent per step: the same fraction of each array.
    """
    settings, optimizer = facts.config.exchange, facts.config.optimizer
    moments = settings.method == "local_sgd"
    what = "parameters and moments" if moments else "parameters"
    fragments = settings.fragments
    every = settings.period / fragments
    # The bytes of a row are those of a step in which it runs: name the interval.
    cause = f"replicas: {what}, every {every:g} steps" if every != 1 else f"replicas: {what}"
    for weight in facts.weights:
        own = Kept(weight.shape, weight.axes)
        kept = (own, *optimizer.keeps(weight.shape, weight.axes)) if moments else (own,)
        for array in kept:  # one by one, as compiled: three of equal size are not three layers
            size = (facts.L if weight.is_layer else 1) * _shard(facts, array.shape, array.axes)
            yield Expected(
                "all-reduce", "data", 1, 4 * math.ceil(size / fragments), cause,
                "2 n (k-1)/k each", every,
            )  # fmt: skip


def _shards(facts: Facts) -> list[int]:
    """Return the elements of each parameter on the device that updates it, all layers in one."""
    return [
        (facts.L if weight.is_layer else 1) * _shard(facts, weight.shape, weight.axes)
        for weight in facts.weights
    ]


def _shard(facts: Facts, shape: tuple[int, ...], axes: tuple[str, ...]) -> int:
    """Return the elements on one device of an array that is sharded like the optimizer state."""
    split = [axis for _, axis in split_over(facts.layout.moment(axes))]
    return math.prod(shape) // facts.devices(split)
