"""Audit of a compiled step's collectives against closed forms; unexplained ones are flagged."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxtrain.analysis.planning.compiled.collectives import Collective
from jaxtrain.analysis.planning.textbook.facts import Expected

# Bytes per step of an array that nobody expected, up to which it goes into the row of small things.
SMALL = 64 * 1024
SMALL_THINGS = "scalars and norms"
NOT_MOVED = "not moved"
_TILE_ROWS = 8  # of a TPU


@dataclasses.dataclass(frozen=True)
class Row:
    """What was moved for one reason.

    Attributes:
      kind: as it was compiled.
      axis: the mesh axis, or several joined by "+".
      count: arrays moved in a step.
      bytes: what one device puts in during the step.
      cause: why; with what the compiler made of it, where that is not the textbook's form.
      link: "dcn" where the axis goes over several slices (or hosts), else "ici".
      textbook_bytes: what the textbook would put in, of a gather that became an all-reduce counted
        as that is: the whole array, and not a device's part; None where it has no such thing.
      explained: whether there is a reason for it.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    cause: str
    link: str
    textbook_bytes: int | None
    explained: bool


def audit(
    found: Iterable[Collective],
    expected: Iterable[Expected],
    sizes: Mapping[str, int],
    *,
    dcn: Iterable[str] = (),
    small: int = SMALL,
    widens: bool = False,
) -> list[Row]:
    """A row for every reason and for everything without one, the largest first.

    Both sides are matched by kind, axis and size, so that equal arrays share their reasons; several
    that were concatenated, as a GPU's compiler does with small ones, each by itself. First those
    that run as often as they should, each or all of a size together, or all layers' as one array.
    What remains is tried in the forms that the compiler is free to choose:

    - the arrays of several layers as one;
    - a reduce-scatter as an all-reduce and a slice (below a tile, or where the compiler does not
      see it), which sends twice as much; a gather as an all-reduce likewise;
    - a reduce-scatter of shards that were padded to whole tiles, by up to a third (12 rows to 16),
      and permutes after it, since shards without padding begin elsewhere: one of less than a shard,
      and one of a shard for each that the last of them lies further;
    - a reduce-scatter along some axes and the all-reduce of its parts along others as one
      all-reduce along all of them;
    - on a CPU, bfloat16 as float32, in any of these forms; the greatest of bfloat16 numbers so
      elsewhere too, as GPUs' compilers have it since jaxlib 0.11.

    What the textbook has and the program has not is a row of 0 bytes.

    Args:
      found: of the compiled program; of a pipeline, counted with `traffic.branch_counts`.
      expected: `traffic.expect_traffic` of the same configuration and mesh.
      sizes: the mesh's axes.
      dcn: mesh axes whose collectives leave a slice: `over_dcn` or `over_hosts`.
      small: unexpected arrays of up to this many bytes per step are one row for each kind and axis.
      widens: whether the compiler may send bfloat16 as float32, as the CPU's does.
    """
    matching = _Matching([_Open(one, one.count) for one in expected], sizes)
    unmatched = [
        *itertools.chain.from_iterable(_split_concatenated(_Left(one, one.count)) for one in found)
    ]
    exact = [
        functools.partial(matching.same, exact=True), matching.of_a_size,
        functools.partial(matching.match_stacked, exact=True),
    ]  # fmt: skip
    forms = (
        *exact, matching.same, matching.match_stacked, matching.match_padded,
        matching.match_shifted, matching.match_all_reduce, matching.match_merged,
    )  # fmt: skip
    if widens:
        unmatched = [_to_bfloat16(one) for one in unmatched]
    else:
        unmatched = [_to_bfloat16(one) if _is_greatest(one) else one for one in unmatched]
    matching.count(unmatched)
    unmatched = _match(unmatched, forms if widens else exact)
    unmatched = _match(map(_from_bfloat16, unmatched), forms)
    unexpected = [
        Row(one.found.kind, one.found.axis, one.count, one.count * one.found.bytes,
            _where(one.found), "", None, False)
        for one in unmatched
    ]  # fmt: skip
    rows = [*matching.rows, *_small_together(unexpected, small), *matching.missing()]
    slow = set(dcn)
    rows = [
        dataclasses.replace(row, link="dcn" if slow & set(row.axis.split("+")) else "ici")
        for row in _same_together(rows)
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.axis, row.kind, row.cause))


def over_dcn(dcn: Mapping[str, int]) -> set[str]:
    """The mesh axes that leave a slice, from `Mesh.dcn`."""
    return {axis for axis, slices in dcn.items() if slices > 1}


def over_hosts(sizes: Mapping[str, int], devices_per_host: int) -> set[str]:
    """The mesh axes along which neighbours stand in different hosts, devices in the hosts' order.

    Args:
      sizes: the mesh's axes, outermost first.
      devices_per_host: GPUs of one host.
    """
    hosts = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    hosts //= devices_per_host
    return {axis for number, axis in enumerate(sizes) if np.ptp(hosts, axis=number).any()}


# -- matching ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Open:
    """An expected collective, and how many of its runs nothing has been found for yet."""

    expected: Expected
    count: int


@dataclasses.dataclass(frozen=True)
class _Left:
    """A compiled collective, and how many of its runs have no reason yet.

    Attributes:
      found: itself.
      count: its runs.
      wide: whether it moves twice the bytes that `found` says: float32 for bfloat16.
    """

    found: Collective
    count: int
    wide: bool = False


class _Matching:
    def __init__(self, open_: list[_Open], sizes: Mapping[str, int]) -> None:
        self.open, self.sizes = open_, sizes
        self.rows: list[Row] = []
        self.complete: set[tuple[str, str, int]] = set()  # kinds, axes and sizes, see `count`
        self.shifts: list[_Open] = []  # of less than this many bytes

    def count(self, unmatched: list[_Left]) -> None:
        """Note the kinds, axes and sizes of which as many arrays were found as are expected.

        An array of two rows is otherwise taken for two layers of an array half as large.
        """
        found, expected = collections.Counter(), collections.Counter()
        for one in unmatched:
            found[one.found.kind, one.found.axis, one.found.bytes] += one.count
        for other in self.open:
            expected[other.expected.kind, other.expected.axis, other.expected.bytes] += other.count
        self.complete = {key for key in found if found[key] == expected[key]}

    def devices(self, axis: str) -> int:
        """Devices along an axis, or along several joined by "+"."""
        return math.prod(self.sizes[name] for name in axis.split("+"))

    def same(self, unmatched: _Left, *, exact: bool = False) -> list[_Left]:
        """Kind, axis and size agree; exact: and how often it runs."""
        one, count = unmatched.found, unmatched.count
        for other in self._nearest(one, one.kind):
            if exact and other.count != count:
                continue
            if count and other.expected.axis == one.axis and other.expected.bytes == one.bytes:
                taken = min(count, other.count)
                self._take(unmatched, other, taken, taken, other.expected.cause)
                count -= taken
        return _rest(unmatched, count)

    def of_a_size(self, unmatched: _Left) -> list[_Left]:
        """Kind, axis and size agree, and as many are expected of them as were found."""
        one = unmatched.found
        return (
            self.same(unmatched)
            if (one.kind, one.axis, one.bytes) in self.complete
            else [unmatched]
        )

    def match_stacked(self, unmatched: _Left, *, exact: bool = False) -> list[_Left]:
        """The arrays of several layers as one; exact: of all the layers."""
        one, count = unmatched.found, unmatched.count
        for other in self._nearest(one, one.kind):
            size = other.expected.bytes
            layers = one.bytes // size  # arrays of `size` in this one
            fits = other.expected.axis == one.axis and one.bytes % size == 0 and layers in one.shape
            if exact and other.count != count * layers:
                continue
            if count and fits and other.count >= layers:
                taken = min(count, other.count // layers)
                self._take(unmatched, other, taken, taken * layers, other.expected.cause)
                count -= taken
        return _rest(unmatched, count)

    def match_padded(self, unmatched: _Left) -> list[_Left]:
        """A reduce-scatter of rows that a TPU pads until each shard is whole tiles."""
        one, count = unmatched.found, unmatched.count
        if one.kind != "reduce-scatter":
            return [unmatched]
        nearest = sorted(self._nearest(one, one.kind), key=lambda other: -other.expected.bytes)
        for other in nearest:  # the least padding first
            payload, devices = other.expected.bytes, self.devices(one.axis)
            fits = other.expected.axis == one.axis and payload < one.bytes <= payload * 4 / 3
            if count and fits and any(size % (_TILE_ROWS * devices) == 0 for size in one.shape):
                taken = min(count, other.count)
                cause = f"{other.expected.cause} (padded to whole tiles)"
                self._take(unmatched, other, taken, taken, cause)
                further = int((devices - 1) * (1 - payload / one.bytes))  # shards, the last one
                moved = dataclasses.replace(
                    other.expected,
                    kind="collective-permute",
                    bytes=one.bytes // devices + (further > 0),
                    cause=f"{cause[:-1]}: rows moved back)",
                )
                self.shifts.append(_Open(moved, taken * (1 + further)))
                count -= taken
        return _rest(unmatched, count)

    def match_shifted(self, unmatched: _Left) -> list[_Left]:
        """Rows of a padded shard that lie on another device without padding."""
        one, count = unmatched.found, unmatched.count
        for other in sorted(self.shifts, key=lambda other: other.expected.bytes):
            fits = (other.expected.kind, other.expected.axis) == (one.kind, one.axis)
            if count and other.count and fits and one.bytes < other.expected.bytes:
                taken = min(count, other.count)
                self._take(unmatched, other, taken, taken, other.expected.cause, 0)
                count -= taken
        return _rest(unmatched, count)

    def match_all_reduce(self, unmatched: _Left) -> list[_Left]:
        """A reduce-scatter or a gather that became an all-reduce."""
        one, count = unmatched.found, unmatched.count
        if one.kind != "all-reduce":
            return [unmatched]
        for kind in ("reduce-scatter", "all-gather"):
            for other in self._nearest(one, kind):
                payload = other.expected.bytes
                if kind == "all-gather":  # of zeros with each device's part at its offset
                    payload *= self.devices(other.expected.axis)
                if count and other.expected.axis == one.axis and payload == one.bytes:
                    taken = min(count, other.count)
                    cause = f"{other.expected.cause} ({kind} as all-reduce: twice the wire)"
                    # A gather's own payload is a device's part: both columns count the whole array.
                    self._take(unmatched, other, taken, taken, cause, taken * payload)
                    count -= taken
        return _rest(unmatched, count)

    def match_merged(self, unmatched: _Left) -> list[_Left]:
        """A reduce-scatter, and the all-reduce of its parts along other axes, in one all-reduce."""
        one, count = unmatched.found, unmatched.count
        if one.kind != "all-reduce":
            return [unmatched]
        axes = set(one.axis.split("+"))
        for other in self._nearest(one, "reduce-scatter"):
            first = other.expected
            if not count or first.bytes != one.bytes or not set(first.axis.split("+")) < axes:
                continue
            rest = axes - set(first.axis.split("+"))
            for second in self._nearest(one, "all-reduce"):
                of_parts = set(second.expected.axis.split("+")) == rest
                if count and of_parts and second.expected.cause == first.cause:
                    taken = min(count, other.count, second.count)
                    textbook = taken * (first.bytes + second.expected.bytes)
                    cause = f"{first.cause} (reduced whole over {one.axis}, then sliced)"
                    self._take(unmatched, other, taken, taken, cause, textbook)
                    second.count -= taken
                    count -= taken
        return _rest(unmatched, count)

    def missing(self) -> list[Row]:
        """What the textbook moves and the program does not."""
        return [
            Row(one.expected.kind, one.expected.axis, 0, 0, f"{one.expected.cause} ({NOT_MOVED})",
                "", one.count * one.expected.bytes, True)
            for one in self.open
            if one.count
        ]  # fmt: skip

    def _nearest(self, one: Collective, kind: str) -> list[_Open]:
        """What is open of a kind, first what the named scopes of the collective speak of."""
        fitting = [other for other in self.open if other.count and other.expected.kind == kind]
        return sorted(fitting, key=lambda other: not _speaks_of(one.op_name, other.expected.cause))

    def _take(
        self,
        unmatched: _Left,
        other: _Open,
        runs: int,
        of_expected: int,
        cause: str,
        textbook: int | None = None,
    ) -> None:
        other.count -= of_expected
        textbook = of_expected * other.expected.bytes if textbook is None else textbook
        one, moved = unmatched.found, runs * unmatched.found.bytes
        if unmatched.wide:
            moved, cause = 2 * moved, f"{cause} (bfloat16 as float32: twice the bytes)"
        self.rows.append(Row(one.kind, one.axis, runs, moved, cause, "", textbook, True))


def _match(
    unmatched: Iterable[_Left], forms: Iterable[Callable[[_Left], list[_Left]]]
) -> list[_Left]:
    """What no form explains."""
    unmatched = list(unmatched)
    for match in forms:
        unmatched = [rest for one in unmatched for rest in match(one)]
    return unmatched


def _is_greatest(unmatched: _Left) -> bool:
    return unmatched.found.op_name.endswith("reduce_max")


def _to_bfloat16(unmatched: _Left) -> _Left:
    """What it would have been in bfloat16."""
    one = unmatched.found
    if one.dtype != "f32":
        return unmatched
    found = dataclasses.replace(one, bytes=one.bytes // 2)
    return dataclasses.replace(unmatched, found=found, wide=True)


def _from_bfloat16(unmatched: _Left) -> _Left:
    """The inverse."""
    if not unmatched.wide:
        return unmatched
    found = dataclasses.replace(unmatched.found, bytes=2 * unmatched.found.bytes)
    return dataclasses.replace(unmatched, found=found, wide=False)


def _split_concatenated(unmatched: _Left) -> Iterable[_Left]:
    """The arrays that were concatenated."""
    one = unmatched.found
    if sum(part.bytes for part in one.parts) != one.bytes:
        return [unmatched]
    parts = (
        dataclasses.replace(one, bytes=part.bytes, shape=part.shape, parts=()) for part in one.parts
    )
    return [dataclasses.replace(unmatched, found=part) for part in parts]


def _rest(unmatched: _Left, count: int) -> list[_Left]:
    return [dataclasses.replace(unmatched, count=count)] if count else []


_SCOPES = ("attention", "mlp", "experts", "embedding", "loss", "forward", "backward")


def _speaks_of(op_name: str, cause: str) -> bool:
    return any(scope in op_name and scope in cause for scope in _SCOPES)


def _where(one: Collective) -> str:
    """What is known of a collective that nobody expected: its array and where it was traced."""
    shape = f"{one.dtype}[{','.join(map(str, one.shape))}]"
    return f"unexpected: {shape} from {one.op_name or 'the compiler'}"


def _small_together(rows: Iterable[Row], small: int) -> list[Row]:
    """The same rows, those of few bytes made one for each kind and axis."""
    return [
        row if row.bytes > small else dataclasses.replace(row, cause=SMALL_THINGS, explained=True)
        for row in rows
    ]


def _same_together(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ in their numbers alone as one."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.kind, row.axis, row.cause)
        old = found.get(key)
        if old is None:
            found[key] = row
            continue
        textbook = None
        if row.textbook_bytes is not None or old.textbook_bytes is not None:
            textbook = (row.textbook_bytes or 0) + (old.textbook_bytes or 0)
        found[key] = dataclasses.replace(
            old,
            count=old.count + row.count,
            bytes=old.bytes + row.bytes,
            textbook_bytes=textbook,
        )
    return list(found.values())
