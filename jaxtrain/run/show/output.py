"""Standard output that may be closed during a run, which then stops cleanly."""

import errno
import os
import sys
from collections.abc import Callable
from typing import TextIO

TERMINAL_CLOSED = "a closed terminal"


class Output:
    """A stream for people; once nobody can read it any more, what is written goes nowhere.

    Args:
      stream: such as `sys.stdout`.
      closed: what its closing is called, where it is a pipe.
    """

    def __init__(self, stream: TextIO, closed: str) -> None:
        self._stream, self._closed = stream, closed
        self.encoding = stream.encoding
        self._is_terminal = stream.isatty()
        self._gone: str | None = None
        self._tell: Callable[[str], None] | None = None

    def when_closed(self, tell: Callable[[str], None]) -> None:
        """Has `tell` called with what was closed: now, where that has happened, or then."""
        self._tell = tell
        if self._gone is not None:
            tell(self._gone)

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """What cannot be written now or later goes to the null device, on stderr too."""
        is_pipe = error.errno == errno.EPIPE
        if not (is_pipe or (error.errno == errno.EIO and self._is_terminal)):
            raise error
        lost = os.fstat(self.fileno())
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (self.fileno(), sys.stderr.fileno()):
            if os.path.samestat(os.fstat(descriptor), lost):
                os.dup2(null, descriptor)
        os.close(null)
        self._gone = self._closed if is_pipe else TERMINAL_CLOSED
        if self._tell is not None:
            self._tell(self._gone)
