"""Buffer slots and sends of a pipeline schedule, assigned statically, and the buffers of a rank."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout as in_memory
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import on_each_device
from jaxtrain.training.pipeline.schedules import Backward
from jaxtrain.training.pipeline.timetables import Action, Timetable, Work, check

Edges = tuple[tuple[int, int], ...]

_BACKWARDS = (Work.BACKWARD, Work.BACKWARD_INPUT)


def sends(schedule: Timetable, first_stage: int = 0) -> tuple[tuple[Edges, ...], tuple[Edges, ...]]:
    """Return per tick the sorted (source rank, destination rank) pairs of activations, of
    gradients.

    Args:
      schedule: the table.
      first_stage: only transfers from this stage or a later one to the next, or back.
    """
    forward: list[list[tuple[int, int]]] = [[] for _ in schedule.ticks]
    backward: list[list[tuple[int, int]]] = [[] for _ in schedule.ticks]
    for tick, rank, action in schedule.actions():
        to = schedule.next_rank(action)
        lower = action.stage - (action.kind != Work.FORWARD)
        if to is not None and lower >= first_stage:
            (forward if action.kind == Work.FORWARD else backward)[tick].append((rank, to))
    return tuple(map(tuple, forward)), tuple(map(tuple, backward))


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Schedule as int32 arrays [ticks, ranks], with slots for pending data.

    Buffers have as many slots as the rank that needs most; -1 is no slot. Data that arrives at the
    END of a tick is written after that tick's action has read its slots, so it may reuse them.

    Attributes:
      kind: a Work.
      microbatch: 0 where idle.
      chunk: the stage among those of its rank; 0 where idle.
      input_slot: slot of the action's stage input. Stage 0 reads tokens and has none; with
        residuals only a FORWARD reads its input; a BACKWARD_WEIGHT reads its stash instead.
      gradient_slot: slot of the gradient of the stage's output; the last stage has none.
      receive_input_slot: slot of the activation that arrives at the end of this tick.
      receive_gradient_slot: the same for a gradient.
      stash_slot: where a BACKWARD_INPUT stores data for its BACKWARD_WEIGHT.
      residual_slot: with residuals, where a FORWARD stores them until the last backward action.
      num_input_slots: slots of the buffer of stage inputs.
      num_gradient_slots: of that of gradients.
      num_stash_slots: of the stash.
      num_residual_slots: of that of residuals.
      has_backward: whether gradients are computed.
    """

    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    input_slot: np.ndarray
    gradient_slot: np.ndarray
    receive_input_slot: np.ndarray
    receive_gradient_slot: np.ndarray
    stash_slot: np.ndarray
    residual_slot: np.ndarray
    num_input_slots: int
    num_gradient_slots: int
    num_stash_slots: int
    num_residual_slots: int
    has_backward: bool


Item = tuple[int, int]  # a stage and a microbatch


class _Buffer:
    """Slot allocation in one rank's buffer: the lowest free slot is taken, so that it
    stays small.
    """

    def __init__(self) -> None:
        self.slots: dict[Item, int] = {}
        self.size = 0

    def put(self, item: Item) -> int:
        used = set(self.slots.values())
        slot = next(number for number in itertools.count() if number not in used)
        assert item not in self.slots
        self.slots[item] = slot
        self.size = max(self.size, slot + 1)
        return slot

    def read(self, item: Item) -> int:
        return self.slots[item]

    def take(self, item: Item) -> int:
        return self.slots.pop(item)


class _Waiting:
    """Buffers of one kind, one per rank, with the slot used at each tick.

    Attributes:
      used: int32 [ticks, ranks], the slot that a rank's action reads or fills.
      received: the slot of data that arrives at the end of the tick.
    """

    def __init__(self, schedule: Timetable) -> None:
        shape = (len(schedule.ticks), schedule.ranks)
        self.used, self.received = (np.full(shape, -1, np.int32) for _ in range(2))
        self.buffers = [_Buffer() for _ in range(schedule.ranks)]

    @property
    def size(self) -> int:
        """Number of slots on the rank that needs most."""
        return max(buffer.size for buffer in self.buffers)


# How an action uses data that waits at its rank: one of a _Buffer's methods.
_Use = Callable[[_Buffer, Item], int]


def _uses(schedule: Timetable, action: Action, backward: Backward) -> Iterator[tuple[str, _Use]]:
    """Yield how an action uses each kind of buffer: "input", "gradient", "stash" or "residual"."""
    kind, _, stage = action
    recompute = schedule.has_backward and backward == "recompute"
    if stage > 0 and kind == Work.FORWARD:
        yield "input", _Buffer.read if recompute else _Buffer.take
    if stage > 0 and kind in _BACKWARDS and recompute:
        yield "input", _Buffer.take
    if stage + 1 < schedule.num_stages and kind in _BACKWARDS:
        yield "gradient", _Buffer.take
    if kind == Work.BACKWARD_INPUT:
        yield "stash", _Buffer.put
    if kind == Work.BACKWARD_WEIGHT:
        yield "stash", _Buffer.take
    if schedule.has_backward and backward == "residuals":
        of_kind = {Work.FORWARD: _Buffer.put, Work.BACKWARD_INPUT: _Buffer.read}
        yield "residual", of_kind.get(kind, _Buffer.take)


def slots(schedule: Timetable, *, backward: Backward = "recompute") -> Slots:
    """Return the slots for all pending data of a schedule.

    A stage input is kept from its arrival to the action that sends its gradient on; with
    'residuals', or without backward, to its FORWARD. A gradient is kept from its arrival to that
    action, residuals from FORWARD to the last backward action of their microbatch and stage.

    Raises:
      ValueError: the table cannot be run.
    """
    check(schedule)
    shape = (len(schedule.ticks), schedule.ranks)
    kinds, microbatches, chunks = (np.zeros(shape, np.int32) for _ in range(3))
    waiting = {name: _Waiting(schedule) for name in ("input", "gradient", "stash", "residual")}
    for tick, row in enumerate(schedule.ticks):
        actions = [(rank, action) for rank, action in enumerate(row) if action is not None]
        for rank, action in actions:
            at, item = (tick, rank), (action.stage, action.microbatch)
            kinds[at], microbatches[at] = action.kind, action.microbatch
            chunks[at] = action.stage // schedule.ranks
            for name, use in _uses(schedule, action, backward):
                waiting[name].used[at] = use(waiting[name].buffers[rank], item)
        # Arriving data is written after all reads.
        for _, action in actions:
            to = schedule.next_rank(action)
            if to is not None:
                forward = action.kind == Work.FORWARD
                item = (action.stage + (1 if forward else -1), action.microbatch)
                there = waiting["input" if forward else "gradient"]
                there.received[tick, to] = there.buffers[to].put(item)
    return Slots(
        kind=kinds,
        microbatch=microbatches,
        chunk=chunks,
        input_slot=waiting["input"].used,
        gradient_slot=waiting["gradient"].used,
        receive_input_slot=waiting["input"].received,
        receive_gradient_slot=waiting["gradient"].received,
        stash_slot=waiting["stash"].used,
        residual_slot=waiting["residual"].used,
        num_input_slots=waiting["input"].size,
        num_gradient_slots=waiting["gradient"].size,
        num_stash_slots=waiting["stash"].size,
        num_residual_slots=waiting["residual"].size,
        has_backward=schedule.has_backward,
    )


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros of this shape, dtype and sharding."""
    return _zeros(shape, ())


def buffer(shape: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    """Return slots for `slots` arrays of this shape, at least one."""
    return _zeros(shape, (max(slots, 1),))


def _zeros(shape: jax.ShapeDtypeStruct, leading: tuple[int, ...]) -> jax.Array:
    spec = None if shape.sharding is None else P(*[None] * len(leading), *shape.sharding.spec)
    return jnp.zeros((*leading, *shape.shape), shape.dtype, out_sharding=spec)


def take(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """Return the element at a slot of each buffer."""
    return [jax.lax.dynamic_index_in_dim(b, slot, keepdims=False) for b in buffers]


def put(
    buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the buffers with these values at a slot."""
    return [
        jax.lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), slot, 0)
        for b, v in zip(buffers, values, strict=True)
    ]


def by_rows(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Return values in row-major layout, as in their buffers.

    Otherwise XLA's TPU compiler gives a buffer the layout of a value's use, and copies all
    its slots from one to the other.

    Per device shard: for a whole array XLA would gather it first.
    """
    specs = [jax.typeof(x).sharding.spec for x in values]

    def on_one(shards: list[jax.Array]) -> list[jax.Array]:
        return [
            in_memory.with_layout_constraint(x, in_memory.Layout(tuple(range(x.ndim))))
            for x in shards
        ]

    return on_each_device(on_one, (specs,), specs)(list(values))
