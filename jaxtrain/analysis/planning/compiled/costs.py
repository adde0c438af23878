"""FLOPs and bytes of each operation of a compiled program.

A trace says how often an operation ran; the program's text says what it is given and gives back.
Shapes are one device's part, so all figures are too.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxtrain.analysis.planning.compiled.hlo import Computation, Instruction, Module
from jaxtrain.analysis.planning.textbook.flops import meeting_places
from jaxtrain.nn.remat import OF_ROWS, OF_WEIGHTS

# What runs other operations, which are costed and timed themselves.
_ASYNCHRONOUS = {
    f"{what}-{phase}"
    for what in ("async", "call", "custom-call")
    for phase in ("start", "update", "done")
}
CONTAINERS = frozenset({"while", "conditional", "call"} | _ASYNCHRONOUS)
# Names for what is there already: nothing moves.
_FREE = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"})
# Of these only the part that is requested is read.
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
      flops: of its matrix products and convolutions, a multiply-add being two, as
        `planning.flops` counts them; None where its code is a library's or a kernel's, which the
        text does not show. Elementwise work is not in it: memory is what bounds that.
      moved_bytes: what it has to read and write at least: every operand and result once, of a
        slice only what it takes.
    """

    flops: int | None
    moved_bytes: int


def costs(module: Module) -> dict[str, Cost]:
    """The cost of every operation that runs by itself: not of what stands inside a fusion, nor of
    loops and calls, whose bodies' operations are in the result."""
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
                # Calls may run as one operation: a loop shared out over threads.
                if one.opcode == "call":
                    found[one.name] = _of_call(module, one)
            elif one.opcode not in _FREE:
                found[one.name] = Cost(
                    _flops(module, inside, one), _moved_bytes(module, inside, one)
                )
    return found


def readers(module: Module) -> dict[str, frozenset[str]]:
    """For every operation of `costs`, those beside it that read its result or a view of it.

    A result that leaves its loop or call has no readers that the text beside it shows.
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
    """2 x elements of the result x length of the contraction."""
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
    # Sorting, random numbers and the like hold no products; an attention kernel does.
    return 0 if name.startswith(("TopK", "Sharding", "annotate_device_placement")) else None


def _of_experts(module: Module, inside: Computation, one: Instruction) -> int | None:
    """2 x rows x the numbers of one expert's matrix; None for a kernel of another kind."""
    operands = [tensor.shape for tensor in module.operand_tensors(inside, one)]
    if OF_ROWS in one.op_name:
        return 2 * operands[1][0] * math.prod(operands[2][1:])
    if OF_WEIGHTS in one.op_name:
        return 2 * operands[1][0] * math.prod(one.tensors[0].shape[1:])
    return None


def _convolution(module: Module, inside: Computation, one: Instruction) -> int | None:
    """2 x the multiply-adds of real values; padding and holes of a dilation are left out."""
    labels, window = _LABELS.search(one.attributes), _WINDOW.search(one.attributes)
    if labels is None:
        return None
    left, right = (tensor.shape for tensor in module.operand_tensors(inside, one)[:2])
    result = one.tensors[0].shape
    of_left, of_right, of_result = labels.groups()
    # Channels that one result reads: with feature groups the kernel has just those.
    count = result[of_result.index("b")] * result[of_result.index("f")]
    count *= right[of_right.index("i")]
    dimensions = _places(window.group(1) if window else "")
    for axis in (letter for letter in of_result if letter.isdigit()):
        given = {name: values[int(axis)] for name, values in dimensions.items()}
        before = given.get("pad", "0_0").split("_")[0]
        count *= meeting_places(
            inputs=left[of_left.index(axis)],
            kernel=right[of_right.index(axis)],
            outputs=result[of_result.index(axis)],
            stride=int(given.get("stride", 1)),
            before=int(before),
            input_dilation=int(given.get("lhs_dilate", 1)),
            kernel_dilation=int(given.get("rhs_dilate", 1)),
        )
    return 2 * count


def _places(window: str) -> dict[str, list[str]]:
    """'size=3x3 pad=1_1x1_1' as the values along each spatial dimension."""
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
    """Bytes that a fusion reads of each of its parameters."""
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
    """Who uses a value under which name: the same bytes, or the same numbers in another dtype."""
    for user in users.get(of.name, ()):
        if user.opcode in ("bitcast", "convert"):
            yield from _through_names(users, user)
        else:
            yield of.name, user


def _part_read(name: str, user: Instruction) -> int | None:
    """Return the bytes of an array that a user of it reads; None: all of them."""
    if user.opcode in _READS_A_PART and user.operands[0] == name:
        return sum(tensor.bytes for tensor in user.tensors)
    # The array that is updated in place is not read.
    updates = user.opcode == "dynamic-update-slice" and user.operands[0] == name
    return 0 if updates else None


def _written_bytes(module: Module, body: Computation, root: Instruction) -> int:
    """Bytes of a fusion's result, of an update in place only the part that changes."""
    if root.opcode == "tuple":
        return sum(_written_bytes(module, body, body.instructions[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written_bytes(module, body, body.instructions[root.operands[0]])
    if root.opcode == "dynamic-update-slice":
        return _operand_bytes(module, body, root)[1]
    return sum(tensor.bytes for tensor in root.tensors)
