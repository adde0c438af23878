"""Parser of HLO text: computations, instructions, and the trip counts of loops.

The text is `jax.stages.Compiled.as_text()`: scheduled and partitioned, so every shape is one
device's shard. Parsing is lazy, since a large step prints megabytes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Bits of one element; "token" and "opaque" have no data.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+[a-z0-9]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_END = re.compile(r"\}(, execution_thread=.*)?")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
# Instructions that run the computations they call. Reductions apply theirs to pairs of elements.
_CALLERS = {
    "call", "while", "conditional", "fusion", "custom-call",
    "async-start", "call-start", "custom-call-start",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes without padding; elements narrower than a byte are packed."""
        return math.ceil(math.prod(self.shape) * _bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: "all-reduce", "while", "fusion", ...
      type_text: the printed type of the result.
      rest: printed operands and attributes, from the opening parenthesis on.
    """

    name: str
    opcode: str
    type_text: str
    rest: str

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The result, flattened."""
        return tuple(
            Tensor(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
            for dtype, sizes in _ARRAY.findall(self.type_text)
        )

    @functools.cached_property
    def _end(self) -> int:
        """Index of the operands' closing parenthesis in `rest`."""
        depth = 0
        for match in re.finditer(r"[()]", self.rest):
            depth += 1 if match.group() == "(" else -1
            if depth == 0:
                return match.start()
        raise ValueError(f"no closing parenthesis after {self.opcode} in {self.name}")

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _NAME.findall(self.rest[: self._end])

    @property
    def literal(self) -> str:
        """The text between the parentheses: a constant's value."""
        return self.rest[1 : self._end]

    @property
    def attributes(self) -> str:
        """The text after the operands."""
        return self.rest[self._end + 1 :]

    @property
    def op_name(self) -> str:
        """The path of named scopes and primitives that it came from; "" if missing."""
        match = _OP_NAME.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs, excluding a loop's condition."""
        if self.opcode not in _CALLERS:
            return []
        found = []
        for one, several in _CALLED.findall(self.attributes):
            found += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions in the order they are scheduled."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    entry: str
    computations: dict[str, Computation]

    def operand_tensors(self, inside: Computation, instruction: Instruction) -> list[Tensor]:
        """Return the operand arrays of an instruction in the computation `inside`."""
        return [
            tensor for name in instruction.operands for tensor in inside.instructions[name].tensors
        ]

    def concatenated_operands(self, inside: Computation, name: str) -> list[Tensor]:
        """Return the arrays, with their shapes before flattening, that were concatenated into an
        array of the computation `inside`; empty if it is not a concatenation."""
        made, given = inside.instructions[name], inside
        outer: list[str] = []
        if made.opcode == "fusion":
            outer, given = made.operands, self.computations[made.called[0]]
            made = given.instructions[given.root]
        if made.opcode != "concatenate":
            return []
        found = []
        for operand in made.operands:
            part = _trace_bitcasts(given, operand)
            if part.opcode == "parameter" and outer:
                part = _trace_bitcasts(inside, outer[int(part.literal)])
            found += part.tensors
        return found

    def trip_count(self, loop: Instruction) -> int | None:
        """Return the trip count of a `while`; None if the text does not show it.

        The compiler annotates it if known. Otherwise the condition is `counter < constant`, and the
        counter starts at 0, as in every `jax.lax.scan` and `fori_loop` from 0.
        """
        known = _TRIP_COUNT.search(loop.attributes)
        if known:
            return int(known.group(1))
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        if condition is None:
            return None
        within = list(self._with_called(self.computations[condition.group(1)]))
        compared = [i for i in within if i.opcode == "compare"]
        limits = [
            int(i.literal)
            for i in within
            if i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal)
        ]
        if len(compared) != 1 or len(limits) != 1 or "direction=LT" not in compared[0].attributes:
            return None
        return limits[0]

    def _with_called(self, computation: Computation) -> Iterator[Instruction]:
        for instruction in computation.instructions.values():
            yield instruction
            for name in instruction.called:
                yield from self._with_called(self.computations[name])


def _trace_bitcasts(inside: Computation, name: str) -> Instruction:
    """Return the source of one or several bitcasts."""
    made = inside.instructions[name]
    while made.opcode == "bitcast":
        made = inside.instructions[made.operands[0]]
    return made


def parse(text: str) -> Module:
    """Parse the text of a compiled program; asynchronous fusions are merged into one instruction.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    inside, last = False, None
    for line in text.splitlines():
        if not inside:
            header = _COMPUTATION.match(line) if line.endswith("{") else None
            if header:
                name, root, instructions, inside = header.group(2), "", {}, True
                last = None
                entry = name if header.group(1) else entry
        elif _END.fullmatch(line):
            computations[name] = Computation(name, instructions, root)
            inside = False
        else:
            found = _INSTRUCTION.match(line)
            opcode = _OPCODE.search(line, found.start(3)) if found else None
            if found and opcode:
                new = Instruction(
                    found.group(2),
                    opcode.group(1),
                    line[found.start(3) : opcode.start()],
                    line[opcode.end() - 1 :],
                )
                new = _in_order(new, instructions)
                instructions[new.name] = last = new
                root = new.name if found.group(1) else root
            elif last is not None and not found:
                # The configuration of a kernel may span several lines.
                last = dataclasses.replace(last, rest=f"{last.rest}\n{line}")
                instructions[last.name] = last
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is not that of a compiled program")
    return Module(entry, computations)


def _in_order(one: Instruction, before: dict[str, Instruction]) -> Instruction:
    """Return a fusion that a GPU runs asynchronously, on its own stream, as one at its start.

    Its work and its memory are the same. Its end, which alone has the type of the result, becomes a
    view of it.
    """
    if one.opcode == "fusion-start":
        return dataclasses.replace(one, opcode="fusion")
    if one.opcode != "fusion-done":
        return one
    (start,) = one.operands
    before[start] = dataclasses.replace(before[start], type_text=one.type_text)
    return dataclasses.replace(one, opcode="bitcast")


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s4, f8e4m3fn, c64
    assert digits is not None, dtype
    return int(digits.group(1))
