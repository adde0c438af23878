"""Layer of an operation, from the named scopes of the model's code.

A compiled operation remembers the path of named scopes, transformations and primitives that it
came from, such as 'jit(train_step)/transpose(jvp(mlp))/norm/mul'.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

Pass = Literal["forward", "backward", "recomputed", "update"]

OTHER = "other"  # in no scope: casts, what fills arrays
LOOP = "loop"  # in none but a loop: what it keeps of each layer, and the residual stream
UPDATE = "optimizer"

_WRAPPED = re.compile(r"([\w\-]+)\((.*)\)")
# Wrappers that hold a scope's name; other ones, like jit, hold a function's.
_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "remat", "checkpoint"})
_RECOMPUTED = "rematted_computation"
# Parts of a path that the machinery of JAX adds.
_MACHINERY = re.compile(
    r"while|body|cond|scan|closed_call|eval_jaxpr|core_call|checkpoint|remat2?|shard_map|pjit"
    r"|jit|main"
    rf"|branch_\d+_fun|custom_(jvp|vjp)_call\w*|{_RECOMPUTED}"
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of an operation in the model's code.

    Attributes:
      scope: the names of scopes, outermost first, joined by "/": "mlp", "mlp/norm"; `OTHER` where
        there is none, or `LOOP`.
      stage: the forward or the backward pass, what the backward pass recomputes of the forward
        pass, or the optimizer's update.
      operation: the primitive, an einsum's equation before it.
    """

    scope: str
    stage: Pass
    operation: str

    @property
    def layer(self) -> str:
        """Outermost scope."""
        return self.scope.split("/")[0]


def origin_of(op_name: str) -> Origin:
    """Return the origin that the path of a compiled operation names."""
    # Operations that the compiler made one have several paths, joined by ";".
    path = op_name.partition(";")[0]
    parts = list(_unwrap(path))
    names = [name for name in parts[:-1] if not _MACHINERY.fullmatch(name)]
    equation = names.pop() if names and "->" in names[-1] else ""
    operation = parts[-1] if parts else ""
    if operation.startswith("("):  # collectives that were joined: '(mlp/dot_general:loss/exp)'
        operation = "several"
    scope = "/".join(dict.fromkeys(name for name in names if "->" not in name))
    if scope.split("/")[0] == UPDATE:
        stage: Pass = "update"
    elif _RECOMPUTED in path:
        stage = "recomputed"
    else:
        stage = "backward" if "transpose(" in path else "forward"
    outside = LOOP if "while" in parts else OTHER
    return Origin(scope or outside, stage, f"{equation} {operation}".strip())


def _unwrap(path: str) -> Iterator[str]:
    """Yield the names of a path, without the transformations around them and without functions."""
    for part in _split(path):
        wrapped = _WRAPPED.fullmatch(part)
        if wrapped is None:
            yield part
        elif wrapped.group(1) in _TRANSFORMS:
            yield from _unwrap(wrapped.group(2))


def _split(path: str) -> Iterator[str]:
    """Split a path at the slashes outside parentheses."""
    depth, start = 0, 0
    for i, letter in enumerate(path):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            yield path[start:i]
            start = i + 1
    if path[start:]:
        yield path[start:]
