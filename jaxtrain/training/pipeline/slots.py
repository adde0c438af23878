"""What an engine needs to run a schedule: who sends when, and a static place for all that waits."""

import dataclasses
import itertools
from collections.abc import Hashable
from typing import Literal

import numpy as np

from jaxtrain.training.pipeline.table import Kind, Schedule, check

Backward = Literal["recompute", "residuals"]
Edges = tuple[tuple[int, int], ...]

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def sends(schedule: Schedule) -> tuple[tuple[Edges, ...], tuple[Edges, ...]]:
    """Per tick, the sorted (source rank, destination rank) pairs of activations, of gradients."""
    forward: list[list[tuple[int, int]]] = [[] for _ in schedule.ticks]
    backward: list[list[tuple[int, int]]] = [[] for _ in schedule.ticks]
    for tick, rank, action in schedule.actions():
        to = schedule.next_rank(rank, action)
        if to is not None:
            (forward if action.kind == Kind.FORWARD else backward)[tick].append((rank, to))
    return tuple(map(tuple, forward)), tuple(map(tuple, backward))


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """A schedule as int32 arrays [ticks, ranks], with a place for everything that waits.

    Buffers have as many slots as the rank that needs most; -1 is no slot. What arrives at the END
    of a tick is written after that tick's action has read its slots, so it may take their place.

    Attributes:
      kind: a Kind.
      microbatch: 0 where idle.
      chunk: the stage among those of its rank; 0 where idle.
      input_slot: where the action's stage input lies. Stage 0 reads tokens and has none; with
        residuals only a FORWARD reads its input; a BACKWARD_WEIGHT reads its stash instead.
      gradient_slot: where the gradient of the stage's output lies; the last stage has none.
      receive_input_slot: where the activation goes that arrives at the end of this tick.
      receive_gradient_slot: the same for a gradient.
      stash_slot: where a BACKWARD_INPUT leaves what its BACKWARD_WEIGHT finds there.
      residual_slot: with residuals, where a FORWARD leaves them until the last backward action.
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


class _Buffer:
    """Slots in one rank's buffer: always the lowest free one is taken, so that it stays small."""

    def __init__(self) -> None:
        self.slots: dict[Hashable, int] = {}
        self.size = 0

    def put(self, item: Hashable) -> int:
        used = set(self.slots.values())
        slot = next(number for number in itertools.count() if number not in used)
        assert item not in self.slots
        self.slots[item] = slot
        self.size = max(self.size, slot + 1)
        return slot

    def get(self, item: Hashable, *, free: bool) -> int:
        return self.slots.pop(item) if free else self.slots[item]


def slots(schedule: Schedule, *, backward: Backward = "recompute") -> Slots:
    """Places for everything that waits in a schedule.

    A stage input is kept from its arrival to the action that sends its gradient on; with
    'residuals', or without backward, to its FORWARD. A gradient is kept from its arrival to that
    action, residuals from FORWARD to the last backward action of their microbatch and stage.

    Raises:
      ValueError: the table is none that can be run.
    """
    check(schedule)
    shape = (len(schedule.ticks), schedule.ranks)
    zeros = ("kind", "microbatch", "chunk")
    places = ("input_slot", "gradient_slot", "receive_input_slot", "receive_gradient_slot",
              "stash_slot", "residual_slot")  # fmt: skip
    columns = {name: np.zeros(shape, np.int32) for name in zeros}
    columns |= {name: np.full(shape, -1, np.int32) for name in places}
    inputs, gradients, stashes, residuals = (
        [_Buffer() for _ in range(schedule.ranks)] for _ in range(4)
    )
    recompute = schedule.has_backward and backward == "recompute"
    for tick, row in enumerate(schedule.ticks):
        for rank, action in enumerate(row):
            if action is None:
                continue
            kind, microbatch, stage = action
            item, at = (stage, microbatch), (tick, rank)
            columns["kind"][at] = kind
            columns["microbatch"][at] = microbatch
            columns["chunk"][at] = stage // schedule.ranks
            if stage > 0 and (kind == Kind.FORWARD or (recompute and kind in _BACKWARDS)):
                done = kind in _BACKWARDS or not recompute
                columns["input_slot"][at] = inputs[rank].get(item, free=done)
            if stage + 1 < schedule.num_stages and kind in _BACKWARDS:
                columns["gradient_slot"][at] = gradients[rank].get(item, free=True)
            if kind == Kind.BACKWARD_INPUT:
                columns["stash_slot"][at] = stashes[rank].put(item)
            elif kind == Kind.BACKWARD_WEIGHT:
                columns["stash_slot"][at] = stashes[rank].get(item, free=True)
            if backward == "residuals" and schedule.has_backward:
                if kind == Kind.FORWARD:
                    columns["residual_slot"][at] = residuals[rank].put(item)
                else:
                    done = kind != Kind.BACKWARD_INPUT
                    columns["residual_slot"][at] = residuals[rank].get(item, free=done)
        for rank, action in enumerate(row):
            to = None if action is None else schedule.next_rank(rank, action)
            if action is None or to is None:
                continue
            if action.kind == Kind.FORWARD:
                item, buffer, column = (action.stage + 1, action.microbatch), inputs, "input"
            else:
                item, buffer, column = (action.stage - 1, action.microbatch), gradients, "gradient"
            columns[f"receive_{column}_slot"][tick, to] = buffer[to].put(item)
    sizes = [max(one.size for one in buffer) for buffer in (inputs, gradients, stashes, residuals)]
    return Slots(
        **columns,
        num_input_slots=sizes[0],
        num_gradient_slots=sizes[1],
        num_stash_slots=sizes[2],
        num_residual_slots=sizes[3],
        has_backward=schedule.has_backward,
    )
