"""Time and memory limits of chat templates (Jinja's sandbox has none).

A template is an untrusted program. Every loop iteration, call and operation takes steps from the
budget of its rendering, and a long text or list takes more of them; operations whose result would
be too long are rejected beforehand. The limits are counts, not times: the same template ends the
same way on every machine.
"""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_SOURCE = 1 << 18  # bytes of a template; the longest published ones have 20 kB
MAX_STEPS = 1_000_000  # some seconds; a conversation of a million characters takes a tenth
_CHARACTERS = 64  # characters of a text per step
_MAX_LENGTH = 1 << 24  # characters of a text, items of a list
_MAX_NUMBER = 100_000  # of an argument, such as a width
_MAX_BITS = 4096  # of a product or power
_LONG_FORM = re.compile(r"[*]|\d{6}")  # a width in a format

_left: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("steps", default=None)


class BoundsError(ValueError):
    """Error of a template that exceeds its time or memory limits."""


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """Limit the templates of this thread to MAX_STEPS steps in total, within the context."""
    token = _left.set([MAX_STEPS])
    try:
        yield
    finally:
        _left.reset(token)


def _spend(steps: int) -> None:
    remaining = _left.get()
    if remaining is not None:
        remaining[0] -= steps
        if remaining[0] < 0:
            raise BoundsError(f"it takes more than {MAX_STEPS:,} steps")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _spent(value: Any) -> Any:
    """Return the value after its length was charged to the budget."""
    length = _length(value)
    _validate_length(length)
    _spend(1 + (length // _CHARACTERS if isinstance(value, str) else length))
    return value


def _validate_length(length: int) -> None:
    if length > _MAX_LENGTH:
        raise BoundsError(f"it makes a text or list of {length:,} characters or items")


def _validate_operands(operator: str, left: Any, right: Any) -> None:
    """Reject a binary operation with a long result from short operands."""
    match operator, left, right:
        case "+", _, _:
            _validate_length(_length(left) + _length(right))
        case "*", int(), int():
            if left.bit_length() + right.bit_length() > _MAX_BITS:
                raise BoundsError("it multiplies numbers that are too large")
        case "*", (int() as count), many:
            _validate_length(count * _length(many))
        case "*", many, (int() as count):
            _validate_length(count * _length(many))
        case "**", int(), int():
            if abs(left) > 1 and left.bit_length() * abs(right) > _MAX_BITS:
                raise BoundsError("it raises a number to a power that is too large")
        case "%", str(), _:
            _validate_form(left)


def _validate_form(form: str) -> None:
    if _LONG_FORM.search(form):
        raise BoundsError(f"it formats with {form[:40]!r}")


def _validate_arguments(function: Any, arguments: list[Any]) -> None:
    """Reject a call with a long result from short arguments."""
    own = getattr(function, "__self__", None)  # of a method: 'x'.join
    own = getattr(
        getattr(function, "__wrapped__", None), "__self__", own
    )  # of the sandbox's format
    name = getattr(function, "__name__", "")
    parts = [own, *arguments] if isinstance(own, str) else arguments
    for one in arguments:
        if isinstance(one, int) and abs(one) > _MAX_NUMBER:
            raise BoundsError(f"it calls {name} with {one}")
    if name in ("format", "format_map", "do_format") and parts and isinstance(parts[0], str):
        _validate_form(parts[0])
    if name in (
        "replace",
        "do_replace",
        "join",
        "do_join",
        "sync_do_join",
        "expandtabs",
        "translate",
    ):
        longest = sorted(map(_length, parts))[-2:]
        _validate_length((longest[0] + 1) * (longest[-1] + 1))


def add_bounds(sandbox: type) -> type:
    """Return a subclass of an environment class with these limits.

    Args:
      sandbox: a class of Jinja's sandboxed environments.
    """
    base: Any = sandbox

    class Bounded(base):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _validate_operands(operator, left, right)
            return _spent(super().call_binop(context, operator, left, right))

        # Names that cannot clash with a template's keyword arguments, as in Jinja.
        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            _validate_arguments(__obj, [*args, *kwargs.values()])
            return _spent(base.call(__self, __context, __obj, *args, **kwargs))

    return Bounded


def bound_filters(environment: Any) -> None:
    """Add the limits to an environment's filters, and remove what no chat template needs."""
    environment.globals.pop("lipsum", None)
    environment.filters.pop("urlize", None)
    for name, function in environment.filters.items():
        environment.filters[name] = _bound_filter(function)


def _bound_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with Jinja's marks on it
    def call_filter(*args: Any, **kwargs: Any) -> Any:
        _validate_arguments(function, [*args, *kwargs.values()])
        return _spent(function(*args, **kwargs))

    return call_filter


def bounds_extension(base: type) -> type:
    """Return an extension class with the methods that the tree of `insert_budget` calls."""
    of_extension: Any = base

    class Bounds(of_extension):
        tags = frozenset()

        def tick(self, characters: int) -> str:
            _spend(1 + characters // _CHARACTERS)
            return ""

        def concat(self, *parts: Any) -> str:
            found = [str(part) for part in parts]
            _validate_length(sum(map(len, found)))
            return _spent("".join(found))

    return Bounds


def charge_output(value: Any) -> Any:
    """Charge a template's output to the budget by its length; Jinja's `finalize`."""
    return _spent(value if isinstance(value, str) else str(value))


def insert_budget(nodes: Any, visitor: Any, tree: Any, environment: Any) -> Any:
    """Return a template's tree that counts loop iterations and block calls, and bounds
    concatenations.

    Args:
      nodes, visitor: Jinja's modules.
      tree: from `environment.parse`.
      environment: with the extension of `bounds_extension`.
    """
    bounds = next(x for x in environment.extensions.values() if hasattr(x, "concat"))

    def call(name: str, arguments: list[Any], line: int) -> Any:
        made = nodes.Call(bounds.attr(name), arguments, [], None, None)
        return made.set_lineno(line)

    class Counting(visitor.NodeTransformer):
        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return call("concat", node.nodes, node.lineno)

        def visit_For(self, node: Any) -> Any:
            # Texts in it are written once per turn, without `finalize`.
            texts = sum(len(one.data) for one in node.find_all(nodes.TemplateData))
            self.generic_visit(node)
            tick = nodes.ExprStmt(call("tick", [nodes.Const(texts)], node.lineno))
            node.body.insert(0, tick.set_lineno(node.lineno))
            return node

        visit_Macro = visit_CallBlock = visit_AssignBlock = visit_FilterBlock = visit_For

    return Counting().visit(tree)
