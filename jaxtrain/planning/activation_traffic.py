"""What a step moves of activations: between layers' parts, places of a sequence, experts, stages.

Letters: B the rows that a device computes with at one time, T its part of the sequence, D embed,
N query heads, K kv heads, H head_dim, L layers on a device, k devices along the axis.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxtrain.experts import slots_per_expert
from jaxtrain.planning.facts import Expected, Facts


def activation_traffic(facts: Facts) -> Iterator[Expected]:
    """Collectives of the activations and of their gradients."""
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
    if facts.size("pipe") > 1:
        yield from traffic.boundaries()


@dataclasses.dataclass(frozen=True)
class _Activations:
    facts: Facts

    @property
    def model(self) -> Any:
        return self.facts.model

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

    # -- tensor -----------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Expected]:
        """Megatron's f and g (arXiv 1909.08053, section 3)."""
        facts = self.facts
        experts = hasattr(self.model, "num_experts")
        for name in ("attention", "experts" if experts else "mlp"):
            # The recomputation stops before the last sum of a layer: nothing reads it.
            again = facts.recomputes and name == "attention"
            forward = (self.forwards + again) * self.runs
            yield from self.sums(f"{name} output", forward, self.runs, "4 L B T D")
        if experts:
            if not self.splits_stream:
                # A hand-written sum has a sum as its transpose, though all devices have the same.
                yield Expected(
                    "all-reduce", "tensor", self.runs, facts.stream_bytes,
                    "experts output: transpose of the sum", "B T D beyond the textbook",
                )  # fmt: skip
            gates = 4 * facts.B * facts.T * self.model.experts_per_token
            yield Expected("all-reduce", "tensor", self.runs, gates, "router: gates", "B T k")
        if self.splits_stream and (facts.recomputes or facts.gathers_weights):
            # What is computed again starts from the part of the stream that a device keeps.
            yield Expected(
                "all-gather", "tensor", (1 if facts.recomputes else 2) * self.runs,
                facts.stream_bytes // facts.size("tensor"), "recomputation: stream", "B T D",
            )  # fmt: skip

    def cube(self) -> Iterator[Expected]:
        """A product gathers what goes in along one side of the cube and scatters its sum along
        another; `row` and `tensor` change places from product to product (arXiv 2105.14450)."""
        facts, model = self.facts, self.model
        q, tokens = facts.size("tensor"), facts.B * facts.T * facts.value_bytes
        N, K = self.heads()
        N, K, D = N * q * model.head_dim, K * q * model.head_dim, model.embed_dim
        ups = [w.shape[-1] for w in facts.weights if w.axes == ("embed", "mlp")]
        rotary = all(weight.name != "position_embedding" for weight in facts.weights)
        yield Expected(
            "collective-permute", "row+tensor", (1 + rotary) * facts.passes, 4 * facts.B * facts.T,
            "segment ids and positions: side of the cube", "B T",
        )  # fmt: skip
        blocks = {"attention": ([N, K, K], N), "mlp": (ups, ups[0])}
        for name, (into, out) in blocks.items():
            again = facts.recomputes or facts.gathers_weights
            last = 2 + (facts.recomputes and name == "attention")  # as in `blocks`
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
            split = {"heads", "kv_heads", "mlp"} & set(weight.axes)
            if not split or not weight.is_layer or not weight.is_matrix:
                continue
            out = weight.axes[-1] == "embed"
            block = "mlp" if "mlp" in split else "attention"
            again = facts.recomputes and not (out and block == "mlp")  # as in `blocks`
            forward, backward = (self.forwards + again) * self.runs, self.runs
            width = math.prod(weight.shape) // D
            if "kv_heads" in split:
                width = self.heads()[1] * facts.size("tensor") * self.model.head_dim
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
        """A norm of a stream that is split along embed: its sums of a token, both ways."""
        facts = self.facts
        biased = any(weight.name == "norm_bias" for weight in facts.weights)
        count = (2 if biased else 1) * (2 * self.runs + facts.passes)
        again = (2 if biased else 1) * 2 * self.runs * facts.recomputes
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
        """Three numbers a token: the greatest logit (in the compute dtype, of which it is one), the
        sum of exponentials, the target's logit."""
        facts, chunks = self.facts, self.facts.chunks
        tokens = facts.B * facts.T // chunks
        times = facts.passes * chunks
        yield Expected(
            "all-reduce", "tensor", times, tokens * facts.value_bytes, "loss: greatest logit", "B T"
        )
        yield Expected(
            "all-reduce", "tensor", 2 * times, 4 * tokens, "loss: sums over the vocabulary", "2 B T"
        )

    # -- context ----------------------------------------------------------------------------------

    def heads(self) -> tuple[int, int]:
        """Query heads and kv heads of a device, before anything is exchanged."""
        t = self.facts.size("tensor")
        K = math.lcm(self.model.num_kv_heads, t) // t
        return self.model.num_heads // t, K

    def ring(self) -> Iterator[Expected]:
        """Keys and values go round forward and backward; float32 gradients follow them
        (arXiv 2310.01889).

        The first step of a recomputed round is that of the backward pass too, and the first step of
        the segment ids is the same in every layer: the compiler does either once.
        """
        facts, steps = self.facts, self.facts.size("context") - 1
        numbers = 2 * facts.B * facts.T * self.heads()[1] * self.model.head_dim
        forwards = self.forwards + facts.recomputes
        yield Expected(
            "collective-permute", "context",
            ((forwards + 1) * steps - facts.recomputes) * self.runs, numbers * facts.value_bytes,
            "ring of keys and values", "2 (k-1) 2 B T K H",
        )  # fmt: skip
        yield Expected(
            "collective-permute", "context", steps * self.runs, 4 * numbers,
            "ring of their gradients", "(k-1) 2 B T K H in float32",
        )  # fmt: skip
        yield Expected(
            "collective-permute", "context",
            (forwards + 1) * (steps - 1) * self.runs + facts.passes, 4 * facts.B * facts.T,
            "segment ids", "2 (k-1) B T",
        )  # fmt: skip

    def ulysses(self) -> Iterator[Expected]:
        """One exchange to whole sequences, one back; the same backward (arXiv 2309.14509)."""
        facts, c = self.facts, self.facts.size("context")
        N, K = self.heads()
        place = facts.B * facts.T * self.model.head_dim * facts.value_bytes
        forwards = self.forwards + facts.recomputes
        there = N + 2 * K * (c // math.gcd(K, c))
        for heads, cause, formula in (
            (there, "queries, keys and values", "2 B T (N + 2 K) H"),
            (N, "attention output", "2 B T N H"),
        ):
            yield Expected(
                "all-to-all", "context", (forwards + 1) * self.runs, place * heads,
                f"{cause}: heads for places", formula,
            )  # fmt: skip
        yield Expected(
            "all-gather", "context", facts.passes * (1 + facts.recomputes * facts.L),
            4 * facts.B * facts.T, "segment ids", "B T",
        )  # fmt: skip

    # -- experts and stages -----------------------------------------------------------------------

    def experts(self) -> Iterator[Expected]:
        """Tokens go to their experts and come back, forward and backward (arXiv 2006.16668)."""
        facts, model = self.facts, self.model
        k, ranks = model.experts_per_token, facts.size("expert")
        if model.capacity_factor is None:
            rows, formula = ranks * facts.B * facts.T * k, "4 R B T k D"
        else:
            slots = slots_per_expert(model.capacity_factor, facts.T, k, model.num_experts)
            rows, formula = model.num_experts * facts.B * slots, "4 E B C D"
        forwards = self.forwards + facts.recomputes
        yield Expected(
            "all-to-all", "expert", (2 * forwards + 2) * self.runs,
            rows * model.embed_dim * facts.value_bytes, "tokens to experts and back", formula,
        )  # fmt: skip
        if model.capacity_factor is None:
            yield Expected(
                "all-to-all", "expert", forwards * self.runs, 4 * model.num_experts,
                "rows for each expert", "E",
            )  # fmt: skip

    def boundaries(self) -> Iterator[Expected]:
        """A microbatch crosses a boundary of stages forward, its gradient backward
        (arXiv 1811.06965). A run is a tick in which anything crosses."""
        facts = self.facts
        payload = facts.stream_bytes
        if facts.layout.sequence_parallel:
            payload //= facts.size("tensor")
        for way, patterns in facts.crossings().items():
            count = sum(patterns.values()) * facts.config.train.accumulation
            yield Expected(
                "collective-permute", "pipe", count, payload, f"pipeline boundary, {way}",
                "B T D each microbatch",
            )  # fmt: skip
