"""Gradient compression: int8 blocks and top-k with error feedback, votes of signs.

All replicas have the same parameters; only the gradients that they exchange are
compressed. What a message drops or rounds away stays with its replica and is added to its next
gradient (error feedback, arXiv 1901.09847): the sum of all messages up to a step is the sum of the
true gradients minus the residual at that step. Letters: k replicas, M blocks, N block length.
"""

import dataclasses
import itertools
import math
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import Layout, on_each_device, reshard
from jaxtrain.training.exchange.per_replica import (
    on_each_replica,
    replica_shardings,
    replicas_of,
    rows_of_replicas,
    to_replicas,
)
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform

BLOCK = 256  # entries that share a scale: 4 bytes on 256 make the messages 1.6% longer
Arrays = list[jax.Array]
# Two-bit codes: 0, 1 and -1, and one for NaN, so that a gradient which
# overflowed is detected by the guard and by dynamic loss scaling.
_IN_A_BYTE, _NOT_FINITE = 4, 3


class Codec(Protocol):
    """Encoding of the messages that a device sends to the others along `data`.

    Attributes:
      keeps_rest: whether the residual of a message is added to the next.
    """

    keeps_rest: ClassVar[bool]

    def exchange(self, pending: Arrays) -> tuple[Arrays, Arrays]:
        """Return the sum of all replicas' messages, the same on each, and the residual still to be
        sent: [] if the codec keeps none.

        Called on every device with its own shards, inside `jax.shard_map`; the result of an array
        does not depend on the other arrays, so that devices along other mesh axes that hold the
        same array keep equal values.

        Args:
          pending: float32 gradients plus earlier residuals.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Int8:
    """int8 codec with a float32 scale per block: a reduce-scatter and a gather of such messages.

    For n numbers per device sends 2n(k-1)/k bytes (and 4/256 of that for scales), a quarter of what
    an all-reduce of float32 sends. Rounding is to nearest: error feedback compensates for its bias.
    """

    keeps_rest: ClassVar[bool] = True

    def exchange(self, pending: Arrays) -> tuple[Arrays, Arrays]:
        """Exchange as in `Codec`. The owner of a part rounds the sum again and keeps the rounding
        error.
        """
        k = jax.lax.axis_size("data")
        flat = _to_blocks(pending)
        blocks_kMN = jnp.pad(flat, ((0, -len(flat) % k), (0, 0))).reshape(k, -1, BLOCK)
        codes_kMN, scales_kM = quantize(blocks_kMN)
        left_kMN = blocks_kMN - dequantize(codes_kMN, scales_kM)
        # Rank r receives the r-th part of all ranks.
        codes_kMN = jax.lax.all_to_all(codes_kMN, "data", 0, 0)
        scales_kM = jax.lax.all_to_all(scales_kM, "data", 0, 0)
        sum_MN = dequantize(codes_kMN, scales_kM).sum(0)
        codes_MN, scales_M = quantize(sum_MN)
        lost_MN = sum_MN - dequantize(codes_MN, scales_M)
        mine = jnp.arange(k) == jax.lax.axis_index("data")
        left_kMN += jnp.where(mine[:, None, None], lost_MN, 0.0)
        codes_kMN = jax.lax.all_gather(codes_MN, "data")
        scales_kM = jax.lax.all_gather(scales_M, "data")
        sent_kMN = dequantize(codes_kMN, scales_kM)
        return _from_blocks(sent_kMN, pending), _from_blocks(left_kMN, pending)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Top-k: the entries with the largest magnitudes, sent to the owners of their parts and back.

    Each replica owns 1/k of every array. An owner adds what it receives for its part to its
    own uncompressed values, and sends the largest entries of the sum to all. It keeps the residual,
    as every replica keeps the entries it did not send: compressed in both directions, with a
    residual for each (DoubleSqueeze, arXiv 1905.05957, its server shared out). A device sends 16 c
    (k-1)/k bytes
    for c of n entries: less than an all-reduce of float32 if `keep` is below a half.

    Attributes:
      keep: the fraction of each part's entries that is sent in either direction, at least one
        entry.
    """

    keeps_rest: ClassVar[bool] = True
    keep: float

    def exchange(self, pending: Arrays) -> tuple[Arrays, Arrays]:
        """Exchange as in `Codec`."""
        k, rank = jax.lax.axis_size("data"), jax.lax.axis_index("data")
        padded = [jnp.pad(x.reshape(-1), (0, -x.size % k)) for x in pending]
        values_kC, indices_kC, left_kP = self._split([x.reshape(k, -1) for x in padded])
        ends = _ends([x.shape[-1] for x in indices_kC])[:-1]

        def add(sums_P: Arrays, message: tuple[jax.Array, jax.Array]) -> tuple[Arrays, None]:
            values, indices = (jnp.split(x, ends) for x in message)
            added = [
                x.at[indices_of_one].add(value, unique_indices=True)
                for x, value, indices_of_one in zip(sums_P, values, indices, strict=True)
            ]
            return added, None

        # Replica by replica: the order of a sum into one element is then the same on every
        # device that holds the array, and with it the parameters. What an owner sent to itself is
        # added back to the residual of its own part.
        messages = [jnp.concatenate(x, -1) for x in (values_kC, indices_kC)]
        arrived = tuple(jax.lax.all_to_all(x, "data", 0, 0) for x in messages)
        sums_P, _ = jax.lax.scan(add, [x[rank] for x in left_kP], arrived)
        values_C, indices_C, lost_P = self._split(sums_P)
        left_kP = [x.at[rank].set(lost) for x, lost in zip(left_kP, lost_P, strict=True)]
        messages = [jnp.concatenate(x) for x in (values_C, indices_C)]
        gathered = [jnp.split(jax.lax.all_gather(x, "data"), ends, -1) for x in messages]
        sent_kP = [
            jnp.put_along_axis(jnp.zeros_like(x), indices, values, -1, inplace=False)
            for x, values, indices in zip(left_kP, *gathered, strict=True)
        ]
        return _without_padding(sent_kP, pending), _without_padding(left_kP, pending)

    def _split(self, arrays: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Return the largest entries [..., C] of each row, their positions, and the rows without
        them.
        """
        indices = [largest(x, self.keep) for x in arrays]
        pairs = list(zip(arrays, indices, strict=True))
        values = [jnp.take_along_axis(x, at, -1) for x, at in pairs]
        rest = [jnp.put_along_axis(x, at, 0.0, -1, inplace=False) for x, at in pairs]
        return values, indices, rest


@dataclasses.dataclass(frozen=True)
class Signs:
    """signSGD with majority vote (arXiv 1810.05291): sign(sum over replicas of sign(gradient)).

    As in `torch.sign`, 0 has the sign 0: parameters without a gradient do not change, such as rows
    of an embedding, experts and positions without a token. For a tied vote the
    result is 0 too. For n elements per device sends n/4 bytes (k-1)/k twice: its votes to the
    owners of their parts, and each owner's result to all; 1/16 of an all-reduce of float32. Nothing
    is kept of the rounding error.
    """

    keeps_rest: ClassVar[bool] = False

    def exchange(self, pending: Arrays) -> tuple[Arrays, Arrays]:
        """Exchange as in `Codec`; there is no residual."""
        k = jax.lax.axis_size("data")
        flat = to_flat(pending)
        padded = jnp.pad(flat, (0, -flat.size % (_IN_A_BYTE * k)))
        votes_kM = jax.lax.all_to_all(_pack(padded).reshape(k, -1), "data", 0, 0)
        won_kM = jax.lax.all_gather(_pack(_unpack(votes_kM).sum(0)), "data")
        return from_flat(_unpack(won_kM).reshape(-1)[: flat.size], pending), []


class Reduction(Protocol):
    """Gradient reduction over replicas, with state between steps."""

    def init(self, params: nnx.State, replicas: int) -> Any:
        """Return the state before the first step; () for a reduction without state."""
        ...

    def shardings(self, kept: Any, layout: Layout) -> Any:
        """Return a NamedSharding for each array of the state."""
        ...

    def reduce(self, grads: nnx.State, params: nnx.State, kept: Any) -> tuple[nnx.State, Any]:
        """Return the reduced gradients and the new state.

        Args:
          grads: each replica's part of the mean over all targets, float32 [k, ...], sharded as the
            moments are.
          params: the parameters.
          kept: the state from the previous step.
        """
        ...


@transform
def compress_gradients(step: Step, reduction: Reduction) -> Step:
    """Return the synchronous step with a compressed reduction of the replicas' gradients.

    Its metrics are those of the decompressed gradient. `TrainState.exchange` has the reduction's
    state.

    Args:
      step: each replica computes its gradient on its own rows.
      reduction: the reduction that replaces the all-reduce.
    """
    setup, replicas = step.setup, replicas_of(step.setup)

    def init(*arguments: Any) -> TrainState:
        state = step.init(*arguments)
        return state.replace(exchange=reduction.init(state.params, replicas))

    def shardings(state: TrainState) -> TrainState:
        kept = reduction.shardings(state.exchange, setup.layout)
        return step.shardings(state).replace(exchange=kept)

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        # With the counts of all replicas, each one's gradient is its part of the mean over all.
        counts = setup.objective.counts(batch) if counts is None else counts
        dims: dict[str, Any] = {
            "step": None, "params": 0, "opt_state": None, "statistics": 0, "loss_scale": None,
        }  # fmt: skip
        axes = TrainState(**dims, guard=None if state.guard else ())
        # A gather from parameters without the dimension of the indices would not
        # know its layout.
        repeated = state.replace(
            params=to_replicas(state.params, replicas),
            statistics=to_replicas(state.statistics, replicas),
            exchange=(),
        )
        gradients = on_each_replica(step, _own_gradient, (axes, 0, None), 0)
        found = gradients(repeated, rows_of_replicas(setup, batch), counts)
        grads = reshard(found.grads, setup.layout.moment, setup.layout)
        arrived, kept = reduction.reduce(grads, state.params, state.exchange)
        return Gradient(
            arrived,
            {name: value.sum() for name, value in found.metrics.items()},
            jax.tree.map(lambda x: x.mean(0), found.statistics),
            exchange=kept,
        )

    def update(state: TrainState, found: Gradient) -> Updated:
        done = step.update(state, found)
        if "skipped" not in done.metrics:
            return done
        # An overflowed gradient is not added to the residual.
        skipped = done.metrics["skipped"] > 0
        kept = jax.tree.map(
            lambda old, new: jnp.where(skipped, old, new), state.exchange, found.exchange
        )
        return done._replace(state=done.state.replace(exchange=kept))

    def base_state(state: TrainState) -> TrainState:
        return state.replace(exchange=())

    def set_weights(state: TrainState, *weights: Any) -> TrainState:
        # The residual is of gradients, and is kept.
        return step.set_weights(base_state(state), *weights).replace(exchange=state.exchange)

    return step._replace(
        init=init,
        shardings=shardings,
        gradient=gradient,
        update=update,
        current_state=lambda state: step.current_state(base_state(state)),
        eval_state=lambda state: step.eval_state(base_state(state)),
        set_weights=set_weights,
    )


def _own_gradient(step: Step, state: TrainState, batch: Batch, counts: Sums) -> Gradient:
    return step.gradient(state, batch, counts)


@dataclasses.dataclass(frozen=True)
class Compressed:
    """Gradients sent in a codec's form; kept is the residual of each replica, float32 [k, ...].

    Attributes:
      codec: how gradients are compressed.
    """

    codec: Codec

    def init(self, params: nnx.State, replicas: int) -> Any:
        """Return the initial state as in `Reduction`: a residual of zeros."""
        if not self.codec.keeps_rest:
            return ()
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return to_replicas(zeros, replicas)

    def shardings(self, kept: Any, layout: Layout) -> Any:
        """Return the shardings as in `Reduction`."""
        return replica_shardings(kept, layout.moment, layout)

    def reduce(self, grads: nnx.State, params: nnx.State, kept: Any) -> tuple[nnx.State, Any]:
        """Reduce as in `Reduction`."""
        if self.codec.keeps_rest:
            grads = jax.tree.map(jnp.add, kept, grads)
        leaves, structure = jax.tree.flatten(grads)
        specs = [jax.typeof(x).sharding.spec for x in leaves]
        whole = [P(*spec[1:]) for spec in specs]

        def on_one(leaves: Arrays) -> tuple[Arrays, Arrays]:
            sent, residual = self.codec.exchange([x[0] for x in leaves])
            return sent, [x[None] for x in residual]

        rest = specs if self.codec.keeps_rest else []
        sent, residual = on_each_device(on_one, (specs,), (whole, rest))(leaves)
        sent = jax.tree.structure(params).unflatten(sent)
        return sent, structure.unflatten(residual) if residual else ()


def quantize(x_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantize blocks of values to int8 with a float32 scale each, largest magnitude / 127.

    Args:
      x_N: float32 [..., N]; the error is at most half of the block's scale.
    """
    scales = jnp.abs(x_N).max(-1) / 127.0
    steps = jnp.where(scales > 0, scales, 1.0)
    return jnp.round(x_N / steps[..., None]).astype(jnp.int8), scales


def dequantize(codes_N: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the float32 values of quantized blocks; the inverse of `quantize`."""
    return codes_N.astype(jnp.float32) * scales[..., None]


def largest(x: jax.Array, keep: float) -> jax.Array:
    """Return the indices [..., C] of the fraction `keep` (at least one) of largest magnitudes in
    each row [..., N], int32.
    """
    return jax.lax.top_k(jnp.abs(x), max(1, math.ceil(keep * x.shape[-1])))[1]


def to_flat(arrays: Arrays) -> jax.Array:
    """Concatenate flattened arrays into one, [N]."""
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def from_flat(flat: jax.Array, arrays: Arrays) -> Arrays:
    """Split a flat array [N] into arrays of the given shapes; the inverse of `to_flat`."""
    ends = _ends([x.size for x in arrays])
    return _like(jnp.split(flat, ends[:-1]), arrays)


def _to_blocks(arrays: Arrays) -> jax.Array:
    """Return the arrays as blocks [M, N]; a block never holds elements of two arrays."""
    flat = [jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)) for x in arrays]
    return jnp.concatenate(flat).reshape(-1, BLOCK)


def _from_blocks(blocks: jax.Array, arrays: Arrays) -> Arrays:
    ends = _ends([-(-x.size // BLOCK) * BLOCK for x in arrays])
    return _without_padding(jnp.split(blocks.reshape(-1)[: ends[-1]], ends[:-1]), arrays)


def _without_padding(padded: Arrays, arrays: Arrays) -> Arrays:
    """Return the arrays without their padding, in the given shapes."""
    flat = [part.reshape(-1)[: x.size] for part, x in zip(padded, arrays, strict=True)]
    return _like(flat, arrays)


def _like(flat: Arrays, arrays: Arrays) -> Arrays:
    return [x.reshape(array.shape) for x, array in zip(flat, arrays, strict=True)]


def _ends(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def _pack(x: jax.Array) -> jax.Array:
    """Pack the signs of [4 M] values, four per byte, into uint8 [M]."""
    codes = (x > 0).astype(jnp.uint8) + 2 * (x < 0).astype(jnp.uint8)
    codes = jnp.where(jnp.isfinite(x), codes, _NOT_FINITE)
    return (codes.reshape(-1, _IN_A_BYTE) << _bit_offsets()).sum(-1, dtype=jnp.uint8)


def _unpack(codes: jax.Array) -> jax.Array:
    """Unpack the signs, float32 [..., 4 M], from bytes [..., M]."""
    each = (codes[..., None] >> _bit_offsets()) & jnp.uint8(3)
    signs = (each & 1).astype(jnp.float32) - (each >> 1).astype(jnp.float32)
    return jnp.where(each == _NOT_FINITE, jnp.nan, signs).reshape(*codes.shape[:-1], -1)


def _bit_offsets() -> jax.Array:
    return 2 * jnp.arange(_IN_A_BYTE, dtype=jnp.uint8)
