"""Wrapper of the `tokenizers` library that turns its exceptions and panics into messages."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from jaxtrain.config.errors import UserError

_SHOWN = 300  # characters of what the library says


@contextlib.contextmanager
def library_errors(named: str) -> Iterator[None]:
    """Within, what the library raises becomes a UserError.

    It has no class of its own to catch: a bare Exception, or pyo3's PanicException, which no module
    offers and which derives from BaseException, so that it would pass every handler.

    Args:
      named: the file, for messages.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())
        said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
        raise UserError(
            f"{named}: the installed tokenizers library cannot use it ({said}); get the file anew, "
            "or update: pip install -U tokenizers"
        ) from error


class Guarded:
    """A tokenizer of the library, `library_errors` around each of its methods.

    Args:
      guarded: the tokenizer.
      named: the file, for messages.
    """

    def __init__(self, guarded: Any, named: str) -> None:
        vars(self).update(_guarded=guarded, _named=named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._guarded, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            with library_errors(self._named):
                return found(*args, **kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._guarded, name, value)
