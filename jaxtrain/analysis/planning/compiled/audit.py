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

# Unexpected arrays of up to this many bytes per step are summarized in one row.
SMALL = 64 * 1024
SMALL_THINGS = "scalars and norms"
NOT_MOVED = "not moved"
_TILE_ROWS = 8  # on a TPU


@dataclasses.dataclass(frozen=True)
class Row:
    """The traffic of one kind with one cause.

    Attributes:
      kind: kind of collective, as compiled.
      axis: the mesh axis, or several joined with "+".
      count: arrays moved in a step.
      bytes: payload bytes of one device during the step.
      cause: the reason, and the form that the compiler chose if it differs from the closed form.
      link: "dcn" if the axis spans several slices (or hosts), else "ici".
      textbook_bytes: payload bytes in closed form. A gather that became an all-reduce counts as the
        whole array, like the all-reduce, and not as a device's shard. None if not expected.
      explained: whether there is a cause.
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
    """Return a row for every cause and for every unexplained collective, largest first.

    Both sides are matched by kind, axis and size, so that equal arrays share their causes. Small
    arrays that a GPU's compiler concatenated are matched one by one. Exact matches come first: the
    same number of runs (each array, or all of a size together), or all layers as one array. The
    remainder is matched with the forms that the compiler may choose:

    - the arrays of several layers as one;
    - a reduce-scatter as an all-reduce and a slice (below a tile, or if the compiler does not
      recognize it), which doubles the traffic; a gather as an all-reduce likewise;
    - a reduce-scatter of shards padded to whole tiles, by up to a third (12 rows to 16), and
      permutes after it, since unpadded shards start at other offsets: one of less than a shard, and
      one of a shard for each shard by which the last one is displaced;
    - a reduce-scatter along some axes and the all-reduce of its shards along others as one
      all-reduce along all of them;
    - on a CPU, bfloat16 as float32, in any of these forms; a max over bfloat16 values also
      elsewhere, as in GPU compilers since jaxlib 0.11.

    Expected collectives that the program does not have are rows of 0 bytes.

    Args:
      found: collectives of the compiled program; for a pipeline, with `traffic.branch_counts`.
      expected: `traffic.expect_traffic` of the same configuration and mesh.
      sizes: the mesh's axes.
      dcn: mesh axes whose collectives leave a slice: `over_dcn` or `over_hosts`.
      small: unexpected arrays of up to this many bytes per step are merged by kind and axis.
      widens: whether the compiler may send bfloat16 as float32, like the CPU's.
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
    """Return the mesh axes that leave a slice, from `Mesh.dcn`."""
    return {axis for axis, slices in dcn.items() if slices > 1}


def over_hosts(sizes: Mapping[str, int], devices_per_host: int) -> set[str]:
    """Return the mesh axes along which neighbors are on different hosts.

    Args:
      sizes: the mesh's axes, outermost first; devices are in the hosts' order.
      devices_per_host: GPUs per host.
    """
    hosts = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    hosts //= devices_per_host
    return {axis for number, axis in enumerate(sizes) if np.ptp(hosts, axis=number).any()}


# -- matching ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Open:
    """An expected collective, and its number of unmatched runs."""

    expected: Expected
    count: int


@dataclasses.dataclass(frozen=True)
class _Left:
    """A compiled collective, and its number of unexplained runs.

    Attributes:
      found: the collective.
      count: its unexplained runs.
      wide: whether it moves twice the bytes of `found`: float32 for bfloat16.
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
        """Record the kinds, axes and sizes that were found as often as expected.

        An array of two rows would otherwise match two layers of an array half as large.
        """
        found, expected = collections.Counter(), collections.Counter()
        for one in unmatched:
            found[one.found.kind, one.found.axis, one.found.bytes] += one.count
        for other in self.open:
            expected[other.expected.kind, other.expected.axis, other.expected.bytes] += other.count
        self.complete = {key for key in found if found[key] == expected[key]}

    def devices(self, axis: str) -> int:
        """Return the number of devices along an axis, or along several joined with "+"."""
        return math.prod(self.sizes[name] for name in axis.split("+"))

    def same(self, unmatched: _Left, *, exact: bool = False) -> list[_Left]:
        """Match kind, axis and size; if exact, also the number of runs."""
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
        """Match kind, axis and size if as many are expected as were found."""
        one = unmatched.found
        return (
            self.same(unmatched)
            if (one.kind, one.axis, one.bytes) in self.complete
            else [unmatched]
        )

    def match_stacked(self, unmatched: _Left, *, exact: bool = False) -> list[_Left]:
        """Match the arrays of several layers as one; if exact, of all layers."""
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
        """Match a reduce-scatter of rows that a TPU pads until each shard is whole tiles."""
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
        """Match permutes of rows that padding moves to another device."""
        one, count = unmatched.found, unmatched.count
        for other in sorted(self.shifts, key=lambda other: other.expected.bytes):
            fits = (other.expected.kind, other.expected.axis) == (one.kind, one.axis)
            if count and other.count and fits and one.bytes < other.expected.bytes:
                taken = min(count, other.count)
                self._take(unmatched, other, taken, taken, other.expected.cause, 0)
                count -= taken
        return _rest(unmatched, count)

    def match_all_reduce(self, unmatched: _Left) -> list[_Left]:
        """Match a reduce-scatter or a gather that became an all-reduce."""
        one, count = unmatched.found, unmatched.count
        if one.kind != "all-reduce":
            return [unmatched]
        for kind in ("reduce-scatter", "all-gather"):
            for other in self._nearest(one, kind):
                payload = other.expected.bytes
                if kind == "all-gather":  # of zeros with each device's shard at its offset
                    payload *= self.devices(other.expected.axis)
                if count and other.expected.axis == one.axis and payload == one.bytes:
                    taken = min(count, other.count)
                    cause = f"{other.expected.cause} ({kind} as all-reduce: twice the wire)"
                    # A gather's payload is a device's shard: both columns count the whole array.
                    self._take(unmatched, other, taken, taken, cause, taken * payload)
                    count -= taken
        return _rest(unmatched, count)

    def match_merged(self, unmatched: _Left) -> list[_Left]:
        """Match a reduce-scatter merged with the all-reduce of its shards along other axes."""
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
        """Return a row for each expected collective that the program does not have."""
        return [
            Row(one.expected.kind, one.expected.axis, 0, 0, f"{one.expected.cause} ({NOT_MOVED})",
                "", one.count * one.expected.bytes, True)
            for one in self.open
            if one.count
        ]  # fmt: skip

    def _nearest(self, one: Collective, kind: str) -> list[_Open]:
        """Return the unmatched ones of a kind, those in the collective's named scopes first."""
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
    """Apply the forms in order and return the collectives that none of them explains."""
    unmatched = list(unmatched)
    for match in forms:
        unmatched = [rest for one in unmatched for rest in match(one)]
    return unmatched


def _is_greatest(unmatched: _Left) -> bool:
    return unmatched.found.op_name.endswith("reduce_max")


def _to_bfloat16(unmatched: _Left) -> _Left:
    """Return the same collective as if it were in bfloat16."""
    one = unmatched.found
    if one.dtype != "f32":
        return unmatched
    found = dataclasses.replace(one, bytes=one.bytes // 2)
    return dataclasses.replace(unmatched, found=found, wide=True)


def _from_bfloat16(unmatched: _Left) -> _Left:
    """Undo `_to_bfloat16`."""
    if not unmatched.wide:
        return unmatched
    found = dataclasses.replace(unmatched.found, bytes=2 * unmatched.found.bytes)
    return dataclasses.replace(unmatched, found=found, wide=False)


def _split_concatenated(unmatched: _Left) -> Iterable[_Left]:
    """Split a collective into the arrays that were concatenated."""
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
    """Describe an unexpected collective: its array and where it was traced."""
    shape = f"{one.dtype}[{','.join(map(str, one.shape))}]"
    return f"unexpected: {shape} from {one.op_name or 'the compiler'}"


def _small_together(rows: Iterable[Row], small: int) -> list[Row]:
    """Merge the rows of few bytes by kind and axis."""
    return [
        row if row.bytes > small else dataclasses.replace(row, cause=SMALL_THINGS, explained=True)
        for row in rows
    ]


def _same_together(rows: Iterable[Row]) -> list[Row]:
    """Merge the rows that differ only in counts and bytes."""
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
