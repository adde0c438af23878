"""Closed forms of activation traffic: tensor, sequence, context, expert, pipeline parallelism.

Letters: B rows that a device computes at once, T its shard of the sequence, D embed, N query heads,
K kv heads, H head_dim, L layers on a device, k devices along the axis.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator

from jaxtrain.analysis.planning.textbook.facts import Expected, Facts, Weight
from jaxtrain.models.model import AttentionFacts, TokenModel, pair_model, patches_of, reads_pairs
from jaxtrain.nn.moe.dispatch import parts_of_exchange, slots_per_expert
from jaxtrain.training.pipeline.parts import crossing


def activation_traffic(facts: Facts) -> Iterator[Expected]:
    """Yield the collectives of activations and of their gradients."""
    if facts.size("pipe") > 1:
        yield from boundaries(facts)
    if not facts.is_text:
        return
    traffic = _Activations(facts)
    if facts.size("tensor") > 1:
        cube = facts.layout.tensor_layout == "3d"
        yield from traffic.cube() if cube else traffic.blocks()
        yield from traffic.ends()
        yield from traffic.loss()
        if facts.layout.tensor_layout != "1d":
            yield from traffic.norms()
        if facts.config.precision.matmul == "int8":
            yield from traffic.rows()
    if facts.size("context") > 1:
        ring = facts.config.attention.context_parallel == "ring"
        yield from traffic.ring() if ring else traffic.ulysses()
    if facts.size("expert") > 1:
        yield from traffic.experts()


# The parts of a layer, in order, and the logical axis that only their weights have.
_PARTS = {"attention": "heads", "mlp": "mlp", "experts": "experts"}


def _part(weight: Weight) -> str | None:
    """Return the part of a layer that a weight belongs to; experts have an mlp each."""
    axes = ["heads" if axis == "kv_heads" else axis for axis in weight.axes]
    return next((name for name in reversed(_PARTS) if _PARTS[name] in axes), None)


@dataclasses.dataclass(frozen=True)
class _Activations:
    facts: Facts

    @property
    def model(self) -> TokenModel:
        return self.facts.text_model

    @property
    def attention(self) -> AttentionFacts:
        assert self.model.attention is not None, "heads of a model without attention"
        return self.model.attention

    @property
    def forwards(self) -> int:
        """Forward passes of the layers for each backward pass."""
        facts = self.facts
        again = facts.size("pipe") > 1 and facts.config.pipeline.backward == "recompute"
        return 2 if again else 1

    @property
    def runs(self) -> int:
        """Layers per step: passes times layers."""
        return self.facts.passes * self.facts.L

    @property
    def splits_stream(self) -> bool:
        """Whether the residual stream is sharded over `tensor`: along the sequence, or (on a grid,
        arXiv 2104.05343) along embed."""
        return self.facts.layout.sequence_parallel or self.facts.layout.tensor_layout != "1d"

    def sums(self, cause: str, forward: int, backward: int, formula: str) -> Iterator[Expected]:
        """Yield the reductions of [B, T, D] over `tensor`: reduce-scatter and all-gather if the
        residual stream is sharded, else all-reduce."""
        facts = self.facts
        whole, k = facts.stream_bytes, facts.size("tensor")
        if not self.splits_stream:
            yield Expected("all-reduce", "tensor", forward + backward, whole, cause, formula)
            return
        yield Expected("reduce-scatter", "tensor", forward + backward, whole, cause, formula)
        yield Expected("all-gather", "tensor", forward + backward, whole // k, cause, formula)

    @functools.cached_property
    def parts(self) -> list[str]:
        """Parts of a layer that add to the stream, in order: each ends in a matmul to embed."""
        weights = [weight for weight in self.facts.weights if weight.is_layer]
        found = {_part(weight) for weight in weights if weight.axes[-1] == "embed"}
        return [name for name in _PARTS if name in found]

    # -- tensor ----------------------------------------------------------------------------------

    def sums_again(self, part: str) -> bool:
        """Return whether a part's last reduction runs again in the backward pass. It does not if
        its result is saved, or for the last part of a layer, since nothing reads the result."""
        return self.facts.repeats(f"{part}_out") and part != self.parts[-1]

    def in_parts(self, name: str) -> tuple[bool, bool]:
        """Return whether the input and the output of a part of a layer use collective matmuls.

        Latents are not heads, of which each device could compute its own. The input of shared
        experts is gathered anyway for the router.
        """
        if not self.facts.layout.collective_matmul or name == "experts":
            return False, False
        latent = any(axis == "latent" for weight in self.facts.weights for axis in weight.axes)
        return not (latent if name == "attention" else self.model.experts), True

    def rings(self, name: str) -> Iterator[Expected]:
        """Yield the traffic of a part of a layer with collective matmuls, t - 1 permutes each: the
        input, forward and for the weight gradient, and its gradient; the output, and its gradient.
        In the backward pass, the input permutes replace the gather of remat."""
        facts, k = self.facts, self.facts.size("tensor")
        part, cause = facts.stream_bytes // k, f"{name} output: parts of the sequence"
        into, out = self.in_parts(name)
        again = self.sums_again(name)
        rings = into * (self.forwards + 2) + out * (self.forwards + again + 1)
        formula = "10 (t-1) L B T D / t"
        yield Expected(
            "collective-permute", "tensor", rings * (k - 1) * self.runs, part, cause, formula
        )
        starts = facts.gathers_weights or not facts.config.remat.kept.keeps_all
        gathers = (not into) * (self.forwards + starts) + (not out)
        scatters = (not into) + (not out) * (self.forwards + again)
        for kind, count, size in (
            ("all-gather", gathers, part), ("reduce-scatter", scatters, facts.stream_bytes),
        ):  # fmt: skip
            if count:
                yield Expected(
                    kind, "tensor", count * self.runs, size, f"{name} output", "4 L B T D"
                )

    def blocks(self) -> Iterator[Expected]:
        """Yield the traffic of Megatron's f and g (arXiv 1909.08053, section 3)."""
        facts, experts = self.facts, self.model.experts
        in_parts = facts.layout.collective_matmul
        for name in self.parts:
            if in_parts:
                yield from self.rings(name)
                continue
            again = self.sums_again(name)
            forward = (self.forwards + again) * self.runs
            yield from self.sums(f"{name} output", forward, self.runs, "4 L B T D")
        if experts:
            if not self.splits_stream:
                # The transpose of a manual psum is a psum, though all devices have equal values.
                yield Expected(
                    "all-reduce", "tensor", self.runs, facts.stream_bytes,
                    "experts output: transpose of the sum", "B T D beyond the textbook",
                )  # fmt: skip
            gates = 4 * facts.B * facts.T * experts.per_token
            yield Expected("all-reduce", "tensor", self.runs, gates, "router: gates", "B T k")
        if (
            self.splits_stream
            and not in_parts
            and (facts.gathers_weights or not facts.config.remat.kept.keeps_all)
        ):
            # Other policies do not save gathered arrays. The backward pass starts from a device's
            # shard of the stream (arXiv 2205.05198, section 4.2.2), in each part of the layer
            # unless the reduction before it runs again and gathers it.
            starts = len(self.parts) - sum(map(self.sums_again, self.parts))
            yield Expected(
                "all-gather", "tensor", starts * self.runs,
                facts.stream_bytes // facts.size("tensor"), "recomputation: stream", "B T D",
            )  # fmt: skip

    def cube(self) -> Iterator[Expected]:
        """Yield the traffic of 3D matmuls, which gather the input along one side of the cube and
        scatter the output along another; `row` and `tensor` swap roles from matmul to matmul
        (arXiv 2105.14450)."""
        facts, model = self.facts, self.model
        q, tokens = facts.size("tensor"), facts.B * facts.T * facts.value_bytes
        D, blocks = model.embed_dim, {}
        rotary = all(weight.role != "position" for weight in facts.weights)
        yield Expected(
            "collective-permute", "row+tensor", (1 + rotary) * facts.passes, 4 * facts.B * facts.T,
            "segment ids and positions: side of the cube", "B T",
        )  # fmt: skip
        if "attention" in self.parts:
            N, K = (heads * q for heads in self.heads())
            keys, values = self.attention.key_dim, self.attention.value_dim
            blocks["attention"] = [N * keys, K * keys, K * values], N * values
        if "mlp" in self.parts:
            ups = [w.shape[-1] for w in facts.weights if w.axes == ("embed", "mlp")]
            blocks["mlp"] = ups, ups[0]
        for name, (into, out) in blocks.items():
            again = facts.recomputes or facts.gathers_weights
            last = 2 + self.sums_again(name)
            for axis, width, gathers, scatters in (
                ("row", D, 2 + again, last),
                ("tensor", out, 1 + again, 1),
            ):
                yield Expected(
                    "all-gather", axis, gathers * self.runs, tokens * width // q,
                    f"{name}: side of the cube", "L B T D / q^3 a product",
                )  # fmt: skip
                yield Expected(
                    "reduce-scatter", axis, scatters * self.runs, tokens * width,
                    f"{name}: side of the cube", "L B T D / q^2 a product",
                )  # fmt: skip
            for width in into:
                yield Expected(
                    "reduce-scatter", "tensor", (1 + facts.recomputes) * self.runs, tokens * width,
                    f"{name}: into the block", "L B T F / q^2",
                )  # fmt: skip
                yield Expected(
                    "all-gather", "tensor", self.runs, tokens * width // q,
                    f"{name}: into the block", "L B T F / q^3",
                )  # fmt: skip

    def rows(self) -> Iterator[Expected]:
        """Yield the max-reductions for the scales of int8 matmuls whose rows are sharded: one per
        token, and one per channel of the weight."""
        facts, cube = self.facts, self.facts.layout.tensor_layout == "3d"
        q, D, seen = facts.size("tensor") if cube else 1, self.model.embed_dim, set()
        tokens = facts.B * q * facts.T
        for weight in facts.weights:
            block = _part(weight)
            if block is None or not weight.is_layer or not weight.is_matrix:
                continue
            out = weight.axes[-1] == "embed"
            again = self.sums_again(block) if out else facts.recomputes
            forward, backward = (self.forwards + again) * self.runs, self.runs
            width = math.prod(weight.shape) // D
            if "kv_heads" in weight.axes:
                width = self.heads()[1] * facts.size("tensor") * self.attention.key_dim
            sums = [("row" if cube else "tensor", forward if out else backward, D, out)]
            if cube:
                sums.append(("tensor", backward if out else forward, width, not out))
            for axis, count, channels, is_forward in sums:
                # Matmuls of one activation share its max-reduction.
                if not is_forward or out or block not in seen:
                    yield Expected(
                        "all-reduce", axis, count, tokens * facts.value_bytes,
                        "int8: largest of each token", "B T a product",
                    )  # fmt: skip
                yield Expected(
                    "all-reduce", axis, count, channels // q * facts.value_bytes,
                    "int8: largest of each channel", "D a product",
                )  # fmt: skip
            seen |= set() if out else {block}

    def norms(self) -> Iterator[Expected]:
        """Yield the reductions of norms whose input is sharded along embed, forward and backward.

        A layer norm has two per token, and two vectors: mean and variance, bias and scale; an RMS
        norm has one.
        """
        facts = self.facts
        vectors = [weight.is_layer for weight in facts.weights if weight.role == "norm"]
        count = sum(self.runs if is_layer else facts.passes for is_layer in vectors)
        again = sum(vectors) * self.runs * facts.recomputes
        size = 4 * facts.B * facts.T
        yield Expected("all-reduce", "tensor", 2 * count + again, size, "norms", "B T a norm")

    def ends(self) -> Iterator[Expected]:
        """Yield the traffic of the vocabulary-parallel lookup and of the logits' gradient."""
        facts = self.facts
        passes, whole, k = facts.passes, facts.stream_bytes, facts.size("tensor")
        lookups = self.forwards * passes
        split = self.splits_stream
        kind = "reduce-scatter" if split else "all-reduce"
        yield Expected(kind, "tensor", lookups, whole, "embedding", "B T D")
        yield Expected(kind, "tensor", passes, whole, "loss: gradient of the stream", "B T D")
        if split:
            yield Expected("all-gather", "tensor", passes, whole // k, "embedding", "B T D")
            yield Expected("all-gather", "tensor", passes, whole // k, "loss: stream", "B T D")

    def loss(self) -> Iterator[Expected]:
        """Yield the reductions of three values per token: the max logit (in the compute dtype, like
        the logits), the sum of exponentials, the target's logit."""
        facts, chunks = self.facts, self.facts.chunks
        tokens = facts.B * facts.T // chunks
        times = facts.passes * chunks
        yield Expected(
            "all-reduce", "tensor", times, tokens * facts.value_bytes, "loss: greatest logit", "B T"
        )
        yield Expected(
            "all-reduce", "tensor", 2 * times, 4 * tokens, "loss: sums over the vocabulary", "2 B T"
        )

    # -- context ---------------------------------------------------------------------------------

    def heads(self) -> tuple[int, int]:
        """Return the query heads and kv heads of a device, before any exchange."""
        t = self.facts.size("tensor")
        K = math.lcm(self.attention.num_kv_heads, t) // t
        return self.attention.num_heads // t, K

    def ring(self) -> Iterator[Expected]:
        """Yield the traffic of ring attention: keys and values circulate forward and backward,
        followed by float32 gradients (arXiv 2310.01889).

        The first step of a recomputed pass is the same as in the backward pass. The first step of
        the segment ids is the same in every layer of one compiled loop. The compiler runs each of
        them once, the second unless the backward pass of the layer has a copy to the host. Pipeline
        stages have it in each of their actions. Traffic of ranks without a microbatch in a tick is
        not counted: it is in the bubble.
        """
        facts, steps = self.facts, self.facts.size("context") - 1
        width = self.attention.key_dim + self.attention.value_dim
        numbers = facts.B * facts.T * self.heads()[1] * width
        again = facts.repeats("attention")
        forwards = self.forwards + again
        yield Expected(
            "collective-permute", "context",
            ((forwards + 1) * steps - again) * self.runs, numbers * facts.value_bytes,
            "ring of keys and values", "2 (k-1) 2 B T K H",
        )  # fmt: skip
        yield Expected(
            "collective-permute", "context", steps * self.runs, 4 * numbers,
            "ring of their gradients", "(k-1) 2 B T K H in float32",
        )  # fmt: skip
        actions = 2 * facts.config.pipeline.virtual_stages if facts.size("pipe") > 1 else 1
        segments = (forwards + 1) * (steps - 1) * self.runs + actions * facts.passes
        segments += self.runs * facts.config.remat.offloads
        if self.attention.layers_differ:
            segments = (forwards + 1) * steps * self.runs
        yield Expected(
            "collective-permute", "context", segments, 4 * facts.B * facts.T,
            "segment ids", "2 (k-1) B T",
        )  # fmt: skip

    def ulysses(self) -> Iterator[Expected]:
        """Yield the all-to-alls to whole sequences and back, also backward (arXiv 2309.14509)."""
        facts, c = self.facts, self.facts.size("context")
        N, K = self.heads()
        bytes_per_width = facts.B * facts.T * facts.value_bytes
        keys, values = self.attention.key_dim, self.attention.value_dim
        forwards = self.forwards + facts.recomputes
        again = forwards - 1  # in every layer; the first pass has one for all layers
        there = N * keys + K * (c // math.gcd(K, c)) * (keys + values)
        for numbers, cause, formula in (
            (there, "queries, keys and values", "2 B T (N + 2 K) H"),
            (N * values, "attention output", "2 B T N H"),
        ):
            yield Expected(
                "all-to-all", "context", (forwards + 1) * self.runs, bytes_per_width * numbers,
                f"{cause}: heads for places", formula,
            )  # fmt: skip
        yield Expected(
            "all-gather", "context", facts.passes * (1 + again * facts.L),
            4 * facts.B * facts.T, "segment ids", "B T",
        )  # fmt: skip

    # -- experts and stages ----------------------------------------------------------------------

    def experts(self) -> Iterator[Expected]:
        """Yield the all-to-alls of tokens to their experts and back, forward and backward
        (arXiv 2006.16668)."""
        facts, experts = self.facts, self.model.experts
        assert experts is not None, "an axis that no model without experts may use"
        k, ranks = experts.per_token, facts.size("expert")
        one_scale = facts.config.precision.matmul == "float8"
        if experts.capacity_factor is None:
            own = facts.B * facts.T  # tokens; rows that each of them sends:
            rows, formula = ranks * k, "4 R B T k D"
            parts = parts_of_exchange(ranks, ranks * own * k // experts.count, one_scale=one_scale)
        else:
            own = slots_per_expert(experts.capacity_factor, facts.T, k, experts.count)
            rows, formula = experts.count * facts.B, "4 E B C D"
            parts = parts_of_exchange(ranks, ranks * facts.B * own, one_scale=one_scale)
        forwards = self.forwards + facts.recomputes
        # The return is not repeated in the recomputation: nothing reads it.
        exchanges = forwards + self.forwards + 2
        sizes = collections.Counter((own + later) // parts for later in range(parts))
        for size, times in sizes.items():
            yield Expected(
                "all-to-all", "expert", times * exchanges * self.runs,
                size * rows * self.model.embed_dim * facts.value_bytes,
                "tokens to experts and back", formula,
            )  # fmt: skip
            yield Expected(
                "all-to-all", "expert", times * (forwards + 1) * self.runs, 4 * size * rows,
                "router: gates of the tokens sent", formula.removesuffix(" D"),
            )  # fmt: skip
        if experts.capacity_factor is None:
            yield Expected(
                "all-to-all", "expert", parts * forwards * self.runs, 4 * experts.count,
                "rows for each expert", "E",
            )  # fmt: skip


def boundaries(facts: Facts) -> Iterator[Expected]:
    """Yield the permutes between pipeline stages: a microbatch forward, its gradient backward
    (arXiv 1811.06965). A run is a tick with any traffic.

    The encoded source is passed on from stage to stage of the decoder, together with the target.
    """
    for name, first in facts.travels.items():
        payload = stream_bytes(facts, name)
        for way in ("forward", "backward"):
            ticks = facts.crossings()[crossing(way, name, first)]
            count = sum(ticks.values()) * facts.config.train.accumulation
            what = "" if name == "stream" else f" of the {name}"
            yield Expected(
                "collective-permute", "pipe", count, payload, f"pipeline boundary{what}, {way}",
                "B T D each microbatch",
            )  # fmt: skip


def stream_bytes(facts: Facts, name: str) -> int:
    """Return the bytes of one of the arrays that stages send to each other, on one device."""
    batch, model = facts.config.train.data.abstract_batch(1), facts.model
    patches = patches_of(model)
    if patches is not None:
        return facts.B * math.prod(patches) * facts.value_bytes
    of = batch.source if name == "source" and batch.source is not None else batch.inputs
    width = pair_model(model).embed_dim if reads_pairs(model) else facts.text_model.embed_dim
    size = facts.B * of.shape[1] // facts.size("context") * width * facts.value_bytes
    return size // facts.size("tensor") if facts.layout.sequence_parallel else size
