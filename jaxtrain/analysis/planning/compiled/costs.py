"""FLOPs and bytes of each operation of a compiled program.

A trace has the run count of an operation; the program's text has its operands and results. Shapes
are one device's shards, so all figures are per device.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxtrain.analysis.planning.compiled.hlo import Computation, Instruction, Module
from jaxtrain.analysis.planning.textbook.flops import count_kernel_taps
from jaxtrain.nn.remat import OF_ROWS, OF_WEIGHTS

# Operations that run others, whose costs and times are counted separately.
_ASYNCHRONOUS = {
    f"{what}-{phase}"
    for what in ("async", "call", "custom-call")
    for phase in ("start", "update", "done")
}
CONTAINERS = frozenset({"while", "conditional", "call"} | _ASYNCHRONOUS)
# Operations that only name existing values: no bytes move.
_FREE = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"})
# Operations that read only the requested part of an operand.
_READS_A_PART = frozenset({"slice", "dynamic-slice", "gather"})

_DIMENSIONS = r'(?:={|":\[)([^}\]]*)[}\]]'
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s" + _DIMENSIONS)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one run of an operation, on one device.

    Attributes:
      flops: FLOPs of its matmuls and convolutions, a multiply-add being two, as counted by
        `count_flops`. None if a library or a hand-written kernel computes it, since the text
        does not show that. Elementwise operations are not counted: they are memory-bound.
      moved_bytes: minimum bytes read and written: every operand and result once, and of a slice
        only the requested part.
    """

    flops: int | None
    moved_bytes: int


def costs(module: Module) -> dict[str, Cost]:
    """Return the cost of every operation that runs by itself.

    Operations inside a fusion are not listed. Loops and calls are represented by the operations of
    their bodies.
    """
    found: dict[str, Cost] = {}
    waiting, seen = [module.entry], set()
    while waiting:
        inside = module.computations[waiting.pop()]
        if inside.name in seen:
            continue
        seen.add(inside.name)
        for one in inside.instructions.values():
            if one.opcode in CONTAINERS:
                waiting += one.called
                # Calls may run as one operation: a loop parallelized over threads.
                if one.opcode == "call":
                    found[one.name] = _of_call(module, one)
            elif one.opcode not in _FREE:
                found[one.name] = Cost(
                    _flops(module, inside, one), _moved_bytes(module, inside, one)
                )
    return found


def readers(module: Module) -> dict[str, frozenset[str]]:
    """Return, for every operation of `costs`, the others that read its result or a view of it.

    A result that leaves its loop or call has no readers in the text of that computation.
    """
    operations = costs(module)
    found: dict[str, set[str]] = {name: set() for name in operations}
    for inside in module.computations.values():
        origins: dict[str, set[str]] = {}
        for name, one in inside.instructions.items():
            given = [origins.get(operand, set()) for operand in one.operands]
            if one.opcode in _FREE:
                origins[name] = set().union(*given)
                continue
            origins[name] = {name}
            for operation in set().union(*given) & found.keys():
                found[operation].add(name)
    return {name: frozenset(names & operations.keys()) for name, names in found.items()}


def _of_call(module: Module, call: Instruction) -> Cost:
    (called,) = call.called
    inside = module.computations[called]
    parts = [
        Cost(_flops(module, inside, one), _moved_bytes(module, inside, one))
        for one in inside.instructions.values()
        if one.opcode not in CONTAINERS | _FREE
    ]
    flops = [part.flops for part in parts]
    return Cost(_sum(flops), sum(part.moved_bytes for part in parts))


def _sum(flops: list[int | None]) -> int | None:
    known = [count for count in flops if count is not None]
    return sum(known) if len(known) == len(flops) else None


# -- arithmetic ----------------------------------------------------------------------------------


def _flops(module: Module, inside: Computation, one: Instruction) -> int | None:
    if one.opcode in ("dot", "ragged-dot"):
        return _dot(module, inside, one)
    if one.opcode == "convolution":
        return _convolution(module, inside, one)
    if one.opcode == "custom-call":
        return _library_call(module, inside, one)
    if one.opcode == "fusion":
        return _sum(
            [
                _flops(module, module.computations[name], part)
                for name in one.called
                for part in module.computations[name].instructions.values()
            ]
        )
    return 0


def _dot(module: Module, inside: Computation, one: Instruction) -> int | None:
    """Return 2 x elements of the result x length of the contraction."""
    contracted = _CONTRACTED.search(one.attributes)
    if contracted is None:
        return None
    left = module.operand_tensors(inside, one)[0].shape
    axes = [int(axis) for axis in re.findall(r"\d+", contracted.group(1))]
    return 2 * math.prod(one.tensors[0].shape) * math.prod(left[axis] for axis in axes)


def _library_call(module: Module, inside: Computation, one: Instruction) -> int | None:
    target = _TARGET.search(one.attributes)
    name = target.group(1) if target else ""
    if "gemm" in name or "matmul" in name:
        return _dot(module, inside, one)
    if name == "__cudnn$convForward":
        return _convolution(module, inside, one)
    if name == "__gpu$xla.gpu.triton":
        return _of_experts(module, inside, one)
    # Sorting, random numbers and similar calls have no matmuls; an attention kernel does.
    return 0 if name.startswith(("TopK", "Sharding", "annotate_device_placement")) else None


def _of_experts(module: Module, inside: Computation, one: Instruction) -> int | None:
    """Return 2 x rows x the elements of one expert's matrix; None for a kernel of another kind."""
    operands = [tensor.shape for tensor in module.operand_tensors(inside, one)]
    if OF_ROWS in one.op_name:
        return 2 * operands[1][0] * math.prod(operands[2][1:])
    if OF_WEIGHTS in one.op_name:
        return 2 * operands[1][0] * math.prod(one.tensors[0].shape[1:])
    return None


def _convolution(module: Module, inside: Computation, one: Instruction) -> int | None:
    """Return 2 x the multiply-adds of real values, excluding padding and holes of a dilation."""
    labels, window = _LABELS.search(one.attributes), _WINDOW.search(one.attributes)
    if labels is None:
        return None
    left, right = (tensor.shape for tensor in module.operand_tensors(inside, one)[:2])
    result = one.tensors[0].shape
    of_left, of_right, of_result = labels.groups()
    # Input channels per result: with feature groups, only those of the kernel.
    count = result[of_result.index("b")] * result[of_result.index("f")]
    count *= right[of_right.index("i")]
    dimensions = _parse_window(window.group(1) if window else "")
    for axis in (letter for letter in of_result if letter.isdigit()):
        given = {name: values[int(axis)] for name, values in dimensions.items()}
        before = given.get("pad", "0_0").split("_")[0]
        count *= count_kernel_taps(
            inputs=left[of_left.index(axis)],
            kernel=right[of_right.index(axis)],
            outputs=result[of_result.index(axis)],
            stride=int(given.get("stride", 1)),
            before=int(before),
            input_dilation=int(given.get("lhs_dilate", 1)),
            kernel_dilation=int(given.get("rhs_dilate", 1)),
        )
    return 2 * count


def _parse_window(window: str) -> dict[str, list[str]]:
    """Parse 'size=3x3 pad=1_1x1_1' into the values along each spatial dimension."""
    pairs = (part.split("=", 1) for part in window.split())
    return {name: values.split("x") for name, values in pairs}


# -- memory --------------------------------------------------------------------------------------


def _moved_bytes(module: Module, inside: Computation, one: Instruction) -> int:
    if one.opcode == "fusion":
        (called,) = one.called
        body = module.computations[called]
        return sum(_read(module, body)) + _written_bytes(module, body, body.instructions[body.root])
    if one.opcode == "dynamic-update-slice":
        return 2 * _operand_bytes(module, inside, one)[1]
    result = sum(tensor.bytes for tensor in one.tensors)
    if one.opcode in _READS_A_PART:
        return 2 * result
    return sum(_operand_bytes(module, inside, one)) + result


def _operand_bytes(module: Module, inside: Computation, one: Instruction) -> list[int]:
    return [
        sum(tensor.bytes for tensor in inside.instructions[name].tensors) for name in one.operands
    ]


def _read(module: Module, body: Computation) -> Iterator[int]:
    """Yield the bytes that a fusion reads of each of its parameters."""
    users: dict[str, list[Instruction]] = {}
    for one in body.instructions.values():
        for name in one.operands if one.opcode not in ("parameter", "constant") else ():
            users.setdefault(name, []).append(one)
    for parameter in body.instructions.values():
        if parameter.opcode != "parameter":
            continue
        whole = sum(tensor.bytes for tensor in parameter.tensors)
        parts = [_part_read(name, user) for name, user in _through_names(users, parameter)]
        yield min(whole, sum(whole if part is None else part for part in parts))


def _through_names(
    users: dict[str, list[Instruction]], of: Instruction
) -> Iterator[tuple[str, Instruction]]:
    """Yield the users of a value with its name there, through views and casts."""
    for user in users.get(of.name, ()):
        if user.opcode in ("bitcast", "convert"):
            yield from _through_names(users, user)
        else:
            yield of.name, user


def _part_read(name: str, user: Instruction) -> int | None:
    """Return the bytes that a user reads of an array; None if it reads all of them."""
    if user.opcode in _READS_A_PART and user.operands[0] == name:
        return sum(tensor.bytes for tensor in user.tensors)
    # An array that is updated in place is not read.
    updates = user.opcode == "dynamic-update-slice" and user.operands[0] == name
    return 0 if updates else None


def _written_bytes(module: Module, body: Computation, root: Instruction) -> int:
    """Return the bytes of a fusion's result; for an update in place, only of the updated part."""
    if root.opcode == "tuple":
        return sum(_written_bytes(module, body, body.instructions[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written_bytes(module, body, body.instructions[root.operands[0]])
    if root.opcode == "dynamic-update-slice":
        return _operand_bytes(module, body, root)[1]
    return sum(tensor.bytes for tensor in root.tensors)
