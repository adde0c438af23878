"""Layer of an operation, from the named scopes of the model's code.

The metadata of a compiled operation includes its path of named scopes, transformations and
primitives, such as 'jit(train_step)/transpose(jvp(mlp))/norm/mul'.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

Pass = Literal["forward", "backward", "recomputed", "update"]

OTHER = "other"  # outside all scopes: casts, filled arrays
LOOP = "loop"  # only in a loop: what it saves for each layer, and the residual stream
UPDATE = "optimizer"

_WRAPPED = re.compile(r"([\w\-]+)\((.*)\)")
# Wrappers around the name of a scope; other ones, like jit, are around the name of a function.
_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "remat", "checkpoint"})
_RECOMPUTED = "rematted_computation"
# Parts of a path that JAX adds itself.
_MACHINERY = re.compile(
    r"while|body|cond|scan|closed_call|eval_jaxpr|core_call|checkpoint|remat2?|shard_map|pjit"
    r"|jit|main"
    rf"|branch_\d+_fun|custom_(jvp|vjp)_call\w*|{_RECOMPUTED}"
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of an operation in the model's code.

    Attributes:
      scope: the names of scopes, outermost first, joined by "/": "mlp", "mlp/norm"; `OTHER` or
        `LOOP` if there is none.
      stage: the forward pass, the backward pass, recomputation in the backward pass, or the
        optimizer update.
      operation: the primitive, after the equation of an einsum.
    """

    scope: str
    stage: Pass
    operation: str

    @property
    def layer(self) -> str:
        """Outermost scope."""
        return self.scope.split("/")[0]


def origin_of(op_name: str) -> Origin:
    """Return the origin of a compiled operation, from the path in its metadata."""
    # Operations that the compiler merged have several paths, joined by ";".
    path = op_name.partition(";")[0]
    parts = list(_unwrap(path))
    names = [name for name in parts[:-1] if not _MACHINERY.fullmatch(name)]
    equation = names.pop() if names and "->" in names[-1] else ""
    operation = parts[-1] if parts else ""
    if operation.startswith("("):  # combined collectives: '(mlp/dot_general:loss/exp)'
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
    """Yield the scope names of a path, without transformations and function names."""
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
