"""Closed forms of activation traffic: tensor, sequence, context, expert, pipeline parallelism.

Letters: B the rows that a device computes with at once, T its part of the sequence, D embed,
N query heads, K kv heads, H head_dim, L layers on a device, k devices along the axis.
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
    """Collectives of the activations and of their gradients."""
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


# The parts of a layer, in its order, and the logical axis that only their weights have.
_PARTS = {"attention": "heads", "mlp": "mlp", "experts": "experts"}


def _part(weight: Weight) -> str | None:
    """The part of a layer that a weight belongs to; experts have an mlp each."""
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
        """How often the layers' forward pass runs for one backward pass."""
        facts = self.facts
        again = facts.size("pipe") > 1 and facts.config.pipeline.backward == "recompute"
        return 2 if again else 1

    @property
    def runs(self) -> int:
        """Layers a step."""
        return self.facts.passes * self.facts.L

    @property
    def splits_stream(self) -> bool:
        """Whether the stream between blocks is split over `tensor`: along the sequence, or (on a
        grid, arXiv 2104.05343) along embed."""
        return self.facts.layout.sequence_parallel or self.facts.layout.tensor_layout != "1d"

    def sums(self, cause: str, forward: int, backward: int, formula: str) -> Iterator[Expected]:
        """Sums over `tensor` of [B, T, D], scattered and gathered where the stream is split."""
        facts = self.facts
        whole, k = facts.stream_bytes, facts.size("tensor")
        if not self.splits_stream:
            yield Expected("all-reduce", "tensor", forward + backward, whole, cause, formula)
            return
        yield Expected("reduce-scatter", "tensor", forward + backward, whole, cause, formula)
        yield Expected("all-gather", "tensor", forward + backward, whole // k, cause, formula)

    @functools.cached_property
    def parts(self) -> list[str]:
        """What adds to the stream in a layer, in order: each ends in a product back to embed."""
        weights = [weight for weight in self.facts.weights if weight.is_layer]
        found = {_part(weight) for weight in weights if weight.axes[-1] == "embed"}
        return [name for name in _PARTS if name in found]

    # -- tensor ----------------------------------------------------------------------------------

    def sums_again(self, part: str) -> bool:
        """Whether a part's last sum runs again for the backward pass. It does not where it is kept,
        and the recomputation stops before the last of a layer: nothing reads it."""
        return self.facts.repeats(f"{part}_out") and part != self.parts[-1]

    def in_parts(self, name: str) -> tuple[bool, bool]:
        """Whether what goes into a part of a layer is sent around `tensor`, and its last sum.

        Latents are no heads, that each device could make its own of; what shared experts read is
        gathered for the router too.
        """
        if not self.facts.layout.collective_matmul or name == "experts":
            return False, False
        latent = any(axis == "latent" for weight in self.facts.weights for axis in weight.axes)
        return not (latent if name == "attention" else self.model.experts), True

    def rings(self, name: str) -> Iterator[Expected]:
        """The traffic of a part of a layer where its sequence is sent around in parts, t - 1 times:
        what goes in, forward and for the gradient of the weights, and its gradient; the sum, and
        the gradient of it. What goes in again for the backward pass is what remat would gather."""
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
        """Megatron's f and g (arXiv 1909.08053, section 3)."""
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
                # A hand-written sum has a sum as its transpose, though all devices have the same.
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
            # No other policy keeps what a gather gives. The backward pass starts from the part of
            # the stream that a device keeps (arXiv 2205.05198, section 4.2.2): in each part of the
            # layer, but where the sum before it runs again and gathers it.
            starts = len(self.parts) - sum(map(self.sums_again, self.parts))
            yield Expected(
                "all-gather", "tensor", starts * self.runs,
                facts.stream_bytes // facts.size("tensor"), "recomputation: stream", "B T D",
            )  # fmt: skip

    def cube(self) -> Iterator[Expected]:
        """A product gathers what goes in along one side of the cube and scatters its sum along
        another; `row` and `tensor` swap roles from matmul to matmul (arXiv 2105.14450)."""
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
        """The largest numbers of rows that are split, by which int8 products are scaled: of every
        token, and of every channel of the weight."""
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
                # Products of one activation find its largest numbers once.
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
        """A norm of a stream that is split along embed: its sums of a token, both ways.

        A layer norm has two, and two vectors: mean and variance, bias and scale; an RMS norm one.
        """
        facts = self.facts
        vectors = [weight.is_layer for weight in facts.weights if weight.role == "norm"]
        count = sum(self.runs if is_layer else facts.passes for is_layer in vectors)
        again = sum(vectors) * self.runs * facts.recomputes
        size = 4 * facts.B * facts.T
        yield Expected("all-reduce", "tensor", 2 * count + again, size, "norms", "B T a norm")

    def ends(self) -> Iterator[Expected]:
        """The vocabulary-parallel lookup, and the gradient that leaves the logits."""
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
        """Three numbers per token: the greatest logit (in the compute dtype, of which it is one),
        the sum of exponentials, the target's logit."""
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
        """Query heads and kv heads of a device, before anything is exchanged."""
        t = self.facts.size("tensor")
        K = math.lcm(self.attention.num_kv_heads, t) // t
        return self.attention.num_heads // t, K

    def ring(self) -> Iterator[Expected]:
        """Keys and values go round forward and backward; float32 gradients follow them
        (arXiv 2310.01889).

        The first step of a recomputed round is that of the backward pass too, and the first step of
        the segment ids is the same in every layer that is compiled once: the compiler does either
        once, the second not where a copy to the host stands in the backward pass's layer. Stages of
        a pipeline have it in each of their actions. What ranks without a microbatch send in a tick
        of the others is not counted: it lies in the bubble.
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
        """One exchange to whole sequences, one back; the same backward (arXiv 2309.14509)."""
        facts, c = self.facts, self.facts.size("context")
        N, K = self.heads()
        bytes_per_width = facts.B * facts.T * facts.value_bytes
        keys, values = self.attention.key_dim, self.attention.value_dim
        forwards = self.forwards + facts.recomputes
        again = forwards - 1  # in every layer; the first time is once for all
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
        """Tokens go to their experts and come back, forward and backward (arXiv 2006.16668)."""
        facts, experts = self.facts, self.model.experts
        assert experts is not None, "an axis that no model without experts may use"
        k, ranks = experts.per_token, facts.size("expert")
        one_scale = facts.config.precision.matmul == "float8"
        if experts.capacity_factor is None:
            own = facts.B * facts.T  # tokens; the rows that each of them sends:
            rows, formula = ranks * k, "4 R B T k D"
            parts = parts_of_exchange(ranks, ranks * own * k // experts.count, one_scale=one_scale)
        else:
            own = slots_per_expert(experts.capacity_factor, facts.T, k, experts.count)
            rows, formula = experts.count * facts.B, "4 E B C D"
            parts = parts_of_exchange(ranks, ranks * facts.B * own, one_scale=one_scale)
        forwards = self.forwards + facts.recomputes
        # What comes back is not sent again for the backward pass: nothing reads it.
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
    """A microbatch crosses a boundary of stages forward, its gradient backward
    (arXiv 1811.06965). A run is a tick in which anything crosses.

    What was read of a source resumes from stage to stage of the decoder, beside the target.
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
    """Of a part of what goes from stage to stage, on one device."""
    batch, model = facts.config.train.data.abstract_batch(1), facts.model
    patches = patches_of(model)
    if patches is not None:
        return facts.B * math.prod(patches) * facts.value_bytes
    of = batch.source if name == "source" and batch.source is not None else batch.inputs
    width = pair_model(model).embed_dim if reads_pairs(model) else facts.text_model.embed_dim
    size = facts.B * of.shape[1] // facts.size("context") * width * facts.value_bytes
    return size // facts.size("tensor") if facts.layout.sequence_parallel else size
