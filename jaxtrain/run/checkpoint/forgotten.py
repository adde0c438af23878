"""Workaround for a TensorStore memory leak on each save.

Where TensorStore makes Python objects of JSON it forgets its own reference to each key and value of
a dictionary (0.1.76 to 0.1.86, the newest on 2026-11-23), so that nothing ever frees them. Orbax
0.12.8 has it make such dictionaries once an array and twice a save: 31 kB a save of 36 arrays.
"""

import ast
import functools
import inspect
import sys
from typing import Any

import tensorstore  # Orbax's own


def leaks() -> bool:
    """Whether this TensorStore keeps what it makes of JSON indefinitely."""
    made = tensorstore.KvStore.Spec({"driver": "memory", "path": "of a probe"}).to_json()
    path = made.pop("path")
    return sys.getrefcount(path) > 2  # `path`, and the argument


@functools.cache  # once in a process
def avoid_leak() -> None:
    """Has TensorStore answer the two questions of Orbax without dictionaries of its own making.

    A store's JSON is the same for everybody, read from its `repr`. Metrics are kept from Orbax
    alone. Nothing is changed where TensorStore forgets nothing.
    """
    if not leaks():
        return
    to_json = tensorstore.KvStore.Spec.to_json
    collect = tensorstore.experimental_collect_matching_metrics

    @functools.wraps(to_json)
    def read(self: tensorstore.KvStore.Spec, include_defaults: bool = False) -> Any:
        text = repr(self)
        if include_defaults or "\\" in text:  # its escapes are of UTF-8's bytes
            return to_json(self, include_defaults)
        return ast.literal_eval(text.removeprefix("KvStore.Spec(").removesuffix(")"))

    @functools.wraps(collect)
    def of_others(*args: Any, **options: Any) -> Any:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is not None and caller.f_globals.get("__name__", "").startswith("orbax."):
            return []  # the bytes written, for figures that are never read
        return collect(*args, **options)

    tensorstore.KvStore.Spec.to_json = read
    tensorstore.experimental_collect_matching_metrics = of_others
