"""Expected collectives of one train step, for a configuration and a mesh.

It is arithmetic on the parameters' shapes and the layout's table alone: nothing is traced twice and
no device is needed, so that a search over meshes can price thousands of them.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator

from jaxtrain.analysis.planning.textbook.activation_traffic import activation_traffic
from jaxtrain.analysis.planning.textbook.facts import Expected, Facts, Weight, split_over
from jaxtrain.models.model import passes_of, tokens_per_position
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.exchange.compression import BLOCK
from jaxtrain.training.exchange.exchange import neighbours
from jaxtrain.training.exchange.power_sgd import narrow
from jaxtrain.training.optimizers.rule import Kept
from jaxtrain.training.settings import Config

# -- all-gathers of parameters, reduce-scatters of gradients ---------------------------------------
# Letters: N parameters of one weight on a device while it is computed with, k devices.


def weight_traffic(facts: Facts) -> Iterator[Expected]:
    """Yield the collectives of every parameter, its gradient and its update."""
    within = facts.of_microbatches
    for weight in facts.weights:
        one, inside = _Weight(facts, weight), _Weight(within, weight)
        if within is not facts:
            yield from one.gather_once()
        yield from inside.gathers()
        if weight.name not in facts.frozen:
            yield from inside.gradients()
            yield from one.update()


@dataclasses.dataclass(frozen=True)
class _Weight:
    facts: Facts
    weight: Weight

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def elements(self) -> int:
        """Elements of one layer's weight on a device, as used in compute."""
        spec = self.facts.layout.weight(self.weight.axes)
        return math.prod(self.weight.shape) // self.facts.devices([a for _, a in split_over(spec)])

    @property
    def value_bytes(self) -> int:
        return self.facts.value_bytes if self.weight.is_matrix else self.facts.master_bytes

    @property
    def layers(self) -> int:
        return self.facts.L if self.weight.is_layer else 1

    def extra(self, spec_of) -> list[str]:  # noqa: ANN001 - one of the layout's methods
        """Return the mesh axes that shard it there but not in compute, outermost first."""
        computed = {axis for _, axis in split_over(self.facts.layout.weight(self.weight.axes))}
        kept = [axis for _, axis in split_over(spec_of(self.weight.axes))]
        return [axis for axis in kept if axis not in computed and self.facts.size(axis) > 1]

    # -- gathers ----------------------------------------------------------------------------------

    def gathers(self) -> Iterator[Expected]:
        facts = self.facts
        axes = self.extra(facts.layout.parameter)
        within = [axis for axis in axes if axis != "pipe"]
        if "pipe" in axes:
            # All-gather over pipe once for all microbatches, before fsdp gathers it for each.
            held = self.elements // facts.devices(axes) * self.value_bytes
            times = facts.config.train.accumulation
            yield Expected(
                "all-gather", "pipe", times, held, f"parameters: {self.name}", "N (p-1)/p"
            )
        if within:
            held = self.elements // facts.devices(within) * self.value_bytes
            yield Expected(
                "all-gather", facts.axis_name(within),
                self.uses() * facts.passes * self.layers, held,
                f"parameters: {self.name}", "N (k-1)/k a pass",
            )  # fmt: skip

    def gather_once(self) -> Iterator[Expected]:
        """Yield the gathers once per step of `accumulate='local'` and `masters='sharded'`."""
        facts = self.facts
        axes = self.extra(facts.layout.parameter)
        if "fsdp" not in axes:
            return
        held = self.elements // facts.devices(axes) * self.value_bytes
        cause = f"parameters: {self.name}"
        if "pipe" in axes:  # shards move first, as before the update
            yield Expected("collective-permute", facts.axis_name(axes), 1, held, cause, "N / k")
        yield Expected("all-gather", "fsdp", self.layers, held, cause, "N (k-1)/k a step")

    def uses(self) -> int:
        """Return how often a pass gathers one weight."""
        facts = self.facts
        pipelined = facts.size("pipe") > 1
        if self.weight.is_layer:
            # Forward, and again for the backward pass; a pipeline stage that recomputes from its
            # input runs forward once more.
            once_more = pipelined and facts.config.pipeline.backward == "recompute"
            return 1 + once_more + self.is_gathered_again
        if not pipelined:
            return 1  # no loop, no recomputation: one gather serves lookups and logits
        # Stage 0 repeats the embedding lookup (or patch embedding) if it recomputes.
        again = facts.config.pipeline.backward == "recompute"
        return (1 + again) * self.lookups + self.makes_logits

    @property
    def lookups(self) -> int:
        """How often a pass reads a weight before the layers: the embedding once for each stack."""
        if self.weight.role == "embedding":
            return passes_of(self.facts.model)
        return int(self.weight.role != "output")

    @property
    def is_gathered_again(self) -> bool:
        """Whether the backward pass gathers a layer's weight again instead of saving it."""
        facts = self.facts
        if facts.config.remat.policy != "none":
            return True
        # Derived forms of a gathered weight are saved: a router's float32 copy, repeated heads.
        router = self.weight.role == "router" and facts.value_bytes < 4
        return facts.gathers_weights and not router and not self.copies

    @property
    def copies(self) -> int:
        """Replicas of kv heads on each device, if heads do not divide over `tensor`; else 0."""
        axes = self.weight.axes
        if "kv_heads" not in axes or "kv_heads" not in self.facts.layout.whole:
            return 0
        split = dataclasses.replace(self.facts.layout, whole=frozenset())
        t = split.size(split.weight(("kv_heads",))[0])
        return math.lcm(self.weight.shape[axes.index("kv_heads")], t) // t

    @property
    def late(self) -> int:
        """Devices along tensor that shard it in compute but not at rest: a vocabulary that does not
        divide and is padded until it does; else 1."""
        if not {"vocab"} & set(self.weight.axes) & self.facts.layout.whole:
            return 1
        split = dataclasses.replace(self.facts.layout, whole=frozenset())
        return split.size(split.weight(("vocab",))[0])

    @property
    def is_tied(self) -> bool:
        """Whether it is both the embedding and the output matrix."""
        return self.weight.role == "embedding" and self.facts.is_tied

    @property
    def makes_logits(self) -> bool:
        return self.weight.role == "output" or self.is_tied

    # -- gradients --------------------------------------------------------------------------------

    def gradients(self) -> Iterator[Expected]:
        yield from self.every_pass()
        yield from self.once()
        yield from self.over_pipe()

    def every_pass(self) -> Iterator[Expected]:
        """Yield the reductions in the backward pass of every microbatch."""
        facts = self.facts
        axes = [axis for axis in self.reduce_axes() if axis not in facts.summed_once]
        times = facts.passes * self.layers
        if facts.size("pipe") > 1:  # the first stage's and the last stage's parts are separate
            times *= max(self.lookups, 1) + self.is_tied
        size = self.elements * facts.gradient_bytes(self.weight)
        if self.copies:  # only the heads that the device uses
            heads = self.weight.shape[self.weight.axes.index("kv_heads")]
            size = size // heads * self.copies
        if self.late > 1:
            rows = self.weight.shape[self.weight.axes.index("vocab")]
            size = size // rows * -(-rows // self.late)
            # The gradients of lookup and logits of a tied embedding are padded separately.
            times *= 1 + (self.is_tied and facts.size("pipe") == 1)
        elif self.is_tied and facts.size("pipe") == 1:
            heads = tokens_per_position(facts.config.train.model)
            times *= 1 + facts.reduces_head_first * heads
        cause = f"gradients: {self.name}"
        scattered = [a for a in self.extra(self.scatters_to()) if a in axes and a != "pipe"]
        rest = [axis for axis in axes if axis not in scattered]
        if scattered:
            yield Expected(
                "reduce-scatter", facts.axis_name(scattered), times, size, cause, "N (k-1)/k"
            )
        if facts.axis_name(rest):
            size //= facts.devices(scattered)
            yield Expected("all-reduce", facts.axis_name(rest), times, size, cause, "2 N (k-1)/k")
        if self.copies and facts.layout.tensor_layout == "1d":
            yield Expected("all-gather", "tensor", times, size, f"{cause}, copies of heads", "N")
        if self.late > 1:
            yield Expected(
                "all-gather", "tensor", times, size, f"{cause}, padded rows", "N (t-1)/t"
            )
        kept = {axis for _, axis in split_over(facts.layout.parameter(self.weight.axes))}
        computed = [axis for _, axis in split_over(facts.layout.weight(self.weight.axes))]
        whole_at_rest = [axis for axis in computed if axis not in kept]
        if whole_at_rest:  # vectors on a grid: each device has the gradient of its shard of embed
            size = self.elements * facts.master_bytes
            yield Expected(
                "all-gather", facts.axis_name(whole_at_rest), times, size, cause, "N (k-1)/k"
            )

    def once(self) -> Iterator[Expected]:
        """Yield the reductions of the accumulators after the last microbatch."""
        facts, axes = self.facts, self.weight.axes
        over = [axis for axis in self.reduce_axes() if axis in facts.summed_once]
        if not over:
            return
        held = [axis for _, axis in split_over(facts.layout.gradient(axes))]
        size = math.prod(self.weight.shape) // facts.devices(held)
        size *= facts.reduced_bytes(self.weight)
        cause = f"gradients: {self.name}"
        updated = [axis for _, axis in split_over(facts.layout.moment(axes))]
        scattered = [axis for axis in over if axis in updated]
        rest = [axis for axis in over if axis not in scattered]
        if scattered:
            yield Expected(
                "reduce-scatter", facts.axis_name(scattered), self.layers, size, cause,
                "N (k-1)/k a step",
            )  # fmt: skip
            size //= facts.devices(scattered)
        if rest:
            yield Expected(
                "all-reduce", facts.axis_name(rest), self.layers, size, cause, "2 N (k-1)/k a step"
            )

    def scatters_to(self):  # noqa: ANN201 - one of the layout's methods
        """Return the sharding of a gradient after the reduction in a pass.

        In ZeRO 1 with a non-synchronous exchange, loops (over layers or microbatches) carry
        unsharded gradients: only gradients outside every loop get the sharding of the update.
        """
        facts = self.facts
        looped = self.weight.is_layer or facts.passes > 1
        return facts.layout.gradient if looped else facts.layout.moment

    def reduce_axes(self) -> list[str]:
        """Return the mesh axes along which devices have other tokens or partial sums."""
        facts, axes = self.facts, self.weight.axes
        layout = facts.layout
        used = {axis for _, axis in split_over(layout.weight(axes))}
        over = [*facts.batch_axes, "context"]
        if facts.replicas_alone:
            over.remove("data")
        if layout.sequence_parallel and axes == ("vector",):
            over.append("tensor")
        return [axis for axis in over if axis not in used and facts.size(axis) > 1]

    def over_pipe(self) -> Iterator[Expected]:
        """Yield the reduction over stages of gradients of weights outside the layers."""
        facts = self.facts
        if facts.size("pipe") == 1 or self.weight.is_layer:
            return
        axes = self.extra(facts.layout.parameter)
        within = self.extra(facts.layout.gradient)
        size = facts.sum_bytes * self.elements
        size //= facts.devices([a for a in within if a != "pipe"])
        kind = "reduce-scatter" if "pipe" in axes else "all-reduce"
        formula = "N (p-1)/p" if "pipe" in axes else "2 N (p-1)/p"
        times = facts.config.train.accumulation
        yield Expected(kind, "pipe", times, size, f"gradients: {self.name}", formula)

    # -- the update -------------------------------------------------------------------------------

    def update(self) -> Iterator[Expected]:
        """Yield the gathers of updated shards: ZeRO 1 and 2 with unsharded masters."""
        facts, layout = self.facts, self.facts.layout
        split: Collection[str] = self.extra(layout.moment)
        axes = [axis for axis in split if axis not in self.extra(layout.parameter)]
        held, cause = self.elements // facts.devices(split), f"update: {self.name}"
        size = held * facts.master_bytes
        if axes:
            yield Expected(
                "all-gather", facts.axis_name(axes), self.layers, size, cause, "N (k-1)/k"
            )
        if not {"pipe", "fsdp"} <= set(split):
            return
        # (fsdp, pipe) shards are not contained in (pipe) shards: permutes before and after the
        # update.
        if axes:
            yield Expected("collective-permute", facts.axis_name(split), 2, size, cause, "N / k")
        if "fsdp" in facts.of_microbatches.summed_once:  # the accumulator's shards too, before it
            cause = f"gradients: {self.name}"
            size = 4 * held  # float32, whatever the accumulator's dtype
            yield Expected("collective-permute", facts.axis_name(split), 1, size, cause, "N / k")


# -- all of a step ---------------------------------------------------------------------------------


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
