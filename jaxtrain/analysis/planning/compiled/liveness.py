"""Live buffers at the memory peak of a compiled program, read from its schedule."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from jaxtrain.analysis.planning.compiled.hlo import Computation, Instruction, Module, parse

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
# Memory spaces other than HBM: a TPU's vector memory, the host.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")
# Operations whose result is (part of) an operand.
_VIEWS = ("bitcast", "optimization-barrier", "while", "copy-done", "async-done")
_NO_BUFFER = ("parameter", "constant")
_RUNS = ("while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that is live at the memory peak.

    Attributes:
      bytes: size including tile padding.
      type: type in XLA's notation, "bf16[16,2,4096,2048]".
      op_name: the path of named scopes and primitives that it came from; "" if missing.
    """

    bytes: int
    type: str
    op_name: str


def fullest(text: str) -> list[Buffer]:
    """Return the temporary buffers live at the memory peak of a scheduled program, largest first.

    Loop-carried buffers count once, updates in place and views count as their operand. If the
    compiler reuses memory in more ways than these, the sum exceeds what it reports.
    """
    found = _Liveness(parse(text)).peak_of_entry()
    return sorted(found, key=lambda buffer: -buffer.bytes)


def padded_bytes(type_text: str) -> list[int]:
    """Return the bytes of every array of a type, including tile padding; 0 outside HBM."""
    return [_array_bytes(*match.groups()) for match in _ARRAY.finditer(type_text)]


def _array_bytes(dtype: str, sizes: str, layout: str | None) -> int:
    shape = [int(size.lstrip("<=")) for size in sizes.split(",") if size]
    layout = layout or ""
    if _ELSEWHERE.search(layout):
        return 0
    order = [int(dim) for dim in layout.split(":")[0].split(",") if dim.isdigit()]
    physical = [shape[dim] for dim in reversed(order)] if len(order) == len(shape) else shape
    tile = _TILE.search(layout)
    if tile:
        steps = [int(size) for size in tile.group(1).split(",")]
        for dim, step in zip(reversed(range(len(physical))), reversed(steps), strict=False):
            physical[dim] = -(-physical[dim] // step) * step
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.ceil(math.prod(physical) * bits / 8)


# A value is the set of buffers that may hold it; a tuple is a list of such values.
_Value = set[str] | list


class _Liveness:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._peaks: dict[str, tuple[int, list[Buffer]]] = {}

    def peak_of_entry(self) -> list[Buffer]:
        return self._peak(self._module.entry)[1]

    def _peak(self, name: str) -> tuple[int, list[Buffer]]:
        """Return the peak live bytes of buffers created in a computation, and those buffers."""
        if name not in self._peaks:
            self._peaks[name] = self._walk(self._module.computations[name])
        return self._peaks[name]

    def _walk(self, inside: Computation) -> tuple[int, list[Buffer]]:
        order = list(inside.instructions.values())
        values, sizes = self._values(inside, order)
        last = self._last_uses(inside, order, values)
        ends: dict[int, list[str]] = collections.defaultdict(list)
        for name, when in last.items():
            ends[when].append(name)
        alive: set[str] = set()
        total, most, at_most = 0, 0, []
        for now, one in enumerate(order):
            if one.name in sizes:
                alive.add(one.name)
                total += sizes[one.name]
            below = max((self._peak(c) for c in self._bodies(one)), key=_bytes, default=(0, []))
            if total + below[0] > most:
                most = total + below[0]
                at_most = [_buffer(inside.instructions[n], sizes[n]) for n in alive] + below[1]
            for name in ends[now]:
                if name in alive:
                    alive.discard(name)
                    total -= sizes[name]
        return most, [buffer for buffer in at_most if buffer.bytes]

    def _bodies(self, one: Instruction) -> list[str]:
        return one.called if one.opcode in _RUNS else []

    def _values(
        self, inside: Computation, order: list[Instruction]
    ) -> tuple[dict[str, _Value], dict[str, int]]:
        """Return the buffers that hold each value, and the created buffers with their bytes."""
        values: dict[str, _Value] = {}
        sizes: dict[str, int] = {}
        for one in order:
            operands = one.operands
            if one.opcode in _NO_BUFFER:
                values[one.name] = set()
            elif one.opcode == "get-tuple-element":
                values[one.name] = _element(values[operands[0]], one)
            elif one.opcode == "tuple":
                values[one.name] = [values[name] for name in operands]
            elif one.opcode in _VIEWS or one.opcode.endswith("-done"):
                values[one.name] = values[operands[0]]
            else:
                padded = padded_bytes(one.type_text)
                target = self._updated_operand(inside, one, max(padded, default=0))
                if target is not None:
                    values[one.name] = set(_flat(values[target]))
                    continue
                # The result of an asynchronous start includes its operand.
                starts = one.opcode.endswith("-start")
                sizes[one.name] = max(padded, default=0) if starts else sum(padded)
                values[one.name] = {one.name}
        return values, sizes

    def _updated_operand(self, inside: Computation, one: Instruction, size: int) -> str | None:
        """Return the operand that an instruction overwrites, if it works in place."""
        if one.opcode == "fusion" and one.called:
            body = self._module.computations[one.called[0]]
            root = body.instructions[body.root]
            roots = [root]
            if root.opcode == "tuple":
                roots = [body.instructions[name] for name in root.operands]
            in_place = any(r.opcode == "dynamic-update-slice" for r in roots)
        else:
            in_place = one.opcode == "dynamic-update-slice"
        if not in_place:
            return None
        for name in one.operands:
            if sum(padded_bytes(inside.instructions[name].type_text)) == size:
                return name
        return None

    def _last_uses(
        self, inside: Computation, order: list[Instruction], values: dict[str, _Value]
    ) -> dict[str, int]:
        last: dict[str, int] = {}
        for now, one in enumerate(order):
            if one.opcode in _NO_BUFFER:
                continue
            for name in one.operands:
                for buffer in _flat(values.get(name, set())):
                    last[buffer] = now
            for buffer in _flat(values[one.name]):
                last.setdefault(buffer, now)
        for buffer in _flat(values.get(inside.root, set())):
            last[buffer] = len(order)
        return last


def _bytes(found: tuple[int, list[Buffer]]) -> int:
    return found[0]


def _flat(value: _Value) -> Iterator[str]:
    for part in value:
        if isinstance(part, str):
            yield part
        else:
            yield from _flat(part)


def _element(value: _Value, one: Instruction) -> _Value:
    index = re.search(r"index=(\d+)", one.attributes)
    if isinstance(value, list) and index and int(index.group(1)) < len(value):
        return value[int(index.group(1))]
    return value


def _buffer(one: Instruction, size: int) -> Buffer:
    shape = re.search(r"\w+\[[\d,<=]*\]", one.type_text)
    return Buffer(size, shape.group(0) if shape else "", one.op_name)
