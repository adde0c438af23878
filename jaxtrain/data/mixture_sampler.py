"""Sampler of a mixture of datasets: which source each row of the training stream comes from.

Position p belongs to the source in whose share of [0, 1) the fractional part of p times the golden
ratio falls (Weyl's sequence, with an offset from the seed): any range of positions, and so any
batch, matches the mixture weights to within a few rows. How many of the positions before p
are a source's is a sum of floors, computed in some 30 divisions however large p is, also where the
weights change linearly with p; so the example at p needs neither memory nor the positions before
it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.data.loader import shuffle_nearby

STREAM = 2  # among the seeds of `pipeline`: 0 shuffles, 1 augments
_WHOLE = 1 << 32  # a share is a number of these parts
_STEP = (
    2_654_435_769  # the golden ratio's fractional part of them; odd, so that every part is visited
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Size of one source of a mixture.

    Attributes:
      name: its name.
      rows: its training examples.
      tokens: of all of them.
      heldout_rows: its held-out examples.
    """

    name: str
    rows: int
    tokens: int
    heldout_rows: int


@dataclasses.dataclass(frozen=True)
class Seen:
    """Progress of a source.

    Attributes:
      rows: drawn so far.
      epochs: rows drawn over its size.
    """

    rows: int
    epochs: float


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Segment of the stream on which the bounds of the mixture weights are constant or linear.

    Attributes:
      begin: its first position.
      cuts: [sources + 1] the bounds at `begin`, from 0 to `_WHOLE`.
      moved: [sources + 1] how far each has moved after `length` positions.
      length: positions, at least 1.
      before: [sources] how many of the positions before `begin` are each source's.
    """

    begin: int
    cuts: tuple[int, ...]
    moved: tuple[int, ...]
    length: int
    before: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Mixture sampler: the weights of the sources, and the order in which they are drawn.

    The examples of the sources are concatenated, training and held-out ones alike.

    Attributes:
      sources: in their order.
      stages: (first step, share of each source), the first from step 0.
      once: for each source, whether it leaves the mixture after one epoch.
      linear: whether weights are interpolated between stages instead of jumping.
    """

    sources: tuple[Source, ...]
    stages: tuple[tuple[int, tuple[float, ...]], ...]
    once: tuple[bool, ...]
    linear: bool = False

    def indices(
        self, batch: int, rows: np.ndarray, *, global_batch_size: int, seed: int
    ) -> np.ndarray:
        """Return the training examples at some rows of a batch; each epoch of a source is a new
        order.

        Args:
          batch: its number, from 0.
          rows: indices of its rows, [n].
          global_batch_size: rows of every batch.
          seed: of the run.

        Returns:
          int64 [n].
        """
        first = batch * global_batch_size
        positions = np.arange(first, first + int(rows.max(initial=-1)) + 1)
        sources = self._source(positions, global_batch_size, seed)
        before = self._before(first, global_batch_size, seed)
        found = np.empty(len(rows), np.int64)
        offset = 0
        for number, (one, count) in enumerate(zip(self.sources, before, strict=True)):
            own = sources[rows] == number
            # The positions of a source, counted: those before this batch, then those before the
            # row.
            ranks = count + np.cumsum(sources == number)[rows[own]] - 1
            own_seed = int(np.random.SeedSequence((seed, STREAM, number)).generate_state(1)[0])
            found[own] = offset + shuffle_nearby(ranks, one.rows, own_seed)
            offset += one.rows
        return found

    def whose(self, position: int, *, seed: int) -> tuple[int, int]:
        """Return the index of the source at a position, and how many earlier positions it has."""
        number = int(self._source(np.array([position]), 1, seed)[0])
        return number, self._before(position, 1, seed)[number]

    def count_seen(self, batches: int, *, global_batch_size: int, seed: int) -> dict[str, Seen]:
        """Return how far each source is read after `batches`."""
        before = self._before(batches * global_batch_size, global_batch_size, seed)
        return {
            source.name: Seen(rows, rows / source.rows)
            for source, rows in zip(self.sources, before, strict=True)
        }

    def heldout_ranges(self) -> dict[str, range]:
        """Return the range of held-out examples of each source, by name."""
        ends = np.cumsum([source.heldout_rows for source in self.sources]).tolist()
        return {
            source.name: range(end - source.heldout_rows, end)
            for source, end in zip(self.sources, ends, strict=True)
        }

    def _source(self, positions: np.ndarray, global_batch_size: int, seed: int) -> np.ndarray:
        """Return the index of the source at each position."""
        segments, offset = _segments(self, global_batch_size, seed)
        # Modulo 2**64, which `_WHOLE` divides: an overflow changes nothing.
        with np.errstate(over="ignore"):
            parts = positions.astype(np.uint64) * np.uint64(_STEP) + np.uint64(offset)
        parts = (parts % np.uint64(_WHOLE)).astype(np.int64)
        begins = np.array([segment.begin for segment in segments])
        own = np.searchsorted(begins, positions, side="right") - 1
        found = np.empty(len(positions), np.int64)
        for number in np.unique(own).tolist():
            here = own == number
            found[here] = _among(segments[number], positions[here], parts[here])
        return found

    def _before(self, position: int, global_batch_size: int, seed: int) -> tuple[int, ...]:
        """Return how many positions before this one each source has."""
        segments, offset = _segments(self, global_batch_size, seed)
        segment = next(one for one in reversed(segments) if one.begin <= position)
        return _count(segment, position, offset)


@functools.lru_cache(maxsize=16)
def _segments(mixing: Mixing, global_batch_size: int, seed: int) -> tuple[list[_Segment], int]:
    """Return the segments of a run's stream in order, and the offset of its sequence."""
    offset = int(np.random.SeedSequence((seed, STREAM)).generate_state(1)[0])
    positions = [step * global_batch_size for step, _ in mixing.stages]
    segments: list[_Segment] = []
    gone = [False] * len(mixing.sources)
    before = (0,) * len(mixing.sources)
    for number, (_, shares) in enumerate(mixing.stages):
        begin, last = positions[number], number + 1 == len(positions)
        end = None if last else positions[number + 1]
        later = mixing.stages[number + 1][1] if mixing.linear and not last else shares
        while end is None or begin < end:
            cuts = _cuts(shares, gone)
            moved = [after - cut for cut, after in zip(cuts, _cuts(later, gone), strict=True)]
            length = 1 if end is None else end - begin
            segment = _Segment(begin, cuts, tuple(moved), length, before)
            segments.append(segment)
            dry = [
                (position, one)
                for one, source in enumerate(mixing.sources)
                if mixing.once[one] and not gone[one]
                and (position := _dry_at(segment, one, source.rows, offset, end)) is not None
            ]  # fmt: skip
            if not dry:
                if end is not None:
                    before = _count(segment, end, offset)
                break
            position, one = min(dry)
            share = (position - begin) / length
            if later is not shares:
                shares = tuple(a + (b - a) * share for a, b in zip(shares, later, strict=True))
            gone[one] = True
            begin, before = position, _count(segment, position, offset)
    return segments, offset


def _cuts(shares: Sequence[float], gone: Sequence[bool]) -> tuple[int, ...]:
    """Return the bounds of the weights of the sources that are left."""
    remaining = [0.0 if out else share for share, out in zip(shares, gone, strict=True)]
    total = math.fsum(remaining)
    ends = [
        round(math.fsum(remaining[: end + 1]) / total * _WHOLE) for end in range(len(remaining))
    ]
    return (0, *ends)


def _among(segment: _Segment, positions: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the index of the source whose weight interval contains each part.

    Args:
      segment: holds the positions.
      positions: consecutive, [n].
      parts: each one's value in [0, `_WHOLE`).
    """
    found = np.zeros(len(positions), np.int64)
    after, steps = int(positions[0]) - segment.begin, positions - positions[0]
    for cut, moved in zip(segment.cuts[1:-1], segment.moved[1:-1], strict=True):
        # The bound rounded up, which compares the same with integers. In two parts: the product
        # of a position and a bound has more than 64 bits.
        whole, rest = divmod(cut * segment.length + moved * after - 1, segment.length)
        step, step_rest = divmod(moved, segment.length)
        bounds = whole + 1 + step * steps + (rest + step_rest * steps) // segment.length
        found += parts >= bounds
    return found


def _dry_at(segment: _Segment, number: int, rows: int, offset: int, end: int | None) -> int | None:
    """Return the position before which all rows of a source were drawn; None: not before `end`."""
    if not segment.cuts[number + 1] - segment.cuts[number] and end is None:
        return None
    low, high = segment.begin, end
    if high is None:
        share = segment.cuts[number + 1] - segment.cuts[number]
        high = low + (rows - segment.before[number] + 2) * _WHOLE // share + 2
        while _count(segment, high, offset)[number] < rows:
            high += high - low
    elif _count(segment, high, offset)[number] < rows:
        return None
    while low < high:
        middle = (low + high) // 2
        if _count(segment, middle, offset)[number] < rows:
            low = middle + 1
        else:
            high = middle
    return None if low == end else low


def _count(segment: _Segment, position: int, offset: int) -> tuple[int, ...]:
    """Return how many positions of the segment before this one each source has."""
    count, first = position - segment.begin, offset + _STEP * segment.begin
    under = [
        _under(cut, moved, segment.length, count, first)
        for cut, moved in zip(segment.cuts, segment.moved, strict=True)
    ]
    return tuple(
        before + high - low
        for before, low, high in zip(segment.before, under[:-1], under[1:], strict=True)
    )


def _under(cut: int, moved: int, length: int, count: int, offset: int) -> int:
    """Count the first positions of a segment whose part is under a bound.

    x mod m < c exactly where floor(x / m) - floor((x - c) / m) is 1 and not 0; of place k the part
    is x = step k + offset and the bound c = cut + moved k / length, both taken `length` times.
    """
    whole = floor_sum(count, _WHOLE, _STEP, offset)
    divisor, step = _WHOLE * length, _STEP * length - moved
    return whole - floor_sum(count, divisor, step, (offset - cut) * length)


def floor_sum(count: int, divisor: int, step: int, offset: int) -> int:
    """Return the sum of floor((step * k + offset) / divisor) for k from 0 to count - 1
    (Euclid-like).

    Each round removes whole multiples, negative ones too, and counts the remaining lattice points
    by columns instead of rows (Graham, Knuth, Patashnik: Concrete Mathematics, section 3.5).
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // divisor) + count * (offset // divisor)
        step, offset = step % divisor, offset % divisor
        top = step * count + offset
        if top < divisor:
            return total
        count, offset = divmod(top, divisor)
        divisor, step = step, divisor


def shares_by_size(sizes: Mapping[str, int]) -> dict[str, float]:
    """Return mixture weights proportional to the sources' sizes."""
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items()}


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Order of batches with one row length each (length buckets); implements `rows.Order`.

    The length of batch k is drawn like the source of a mixture, weighted by rows: so each
    row is drawn as often as any other, to within a batch of each length.

    Attributes:
      rows: of each length.
    """

    rows: tuple[int, ...]

    def indices(
        self, batch: int, rows: np.ndarray, *, global_batch_size: int, seed: int
    ) -> np.ndarray:
        """Return the examples at some rows of a batch, int64 [n]; each length has its own
        epochs.
        """
        number, before = self._mixing.whose(batch, seed=seed)
        own_seed = int(np.random.SeedSequence((seed, STREAM, number)).generate_state(1)[0])
        ranks = before * global_batch_size + rows
        return sum(self.rows[:number]) + shuffle_nearby(ranks, self.rows[number], own_seed)

    @functools.cached_property
    def _mixing(self) -> Mixing:
        sources = tuple(Source(str(index), rows, 0, 0) for index, rows in enumerate(self.rows))
        shares = tuple(rows / sum(self.rows) for rows in self.rows)
        return Mixing(sources, ((0, shares),), (False,) * len(sources))
