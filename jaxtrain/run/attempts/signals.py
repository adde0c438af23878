"""Signal handling: SIGTERM and SIGINT become requests to stop."""

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# SIGTERM: preemption by TPU VMs, Kubernetes, Slurm, `kill`. SIGUSR1: what Slurm sends ahead of the
# end with `--signal=USR1@120`. SIGINT: Ctrl-C. SIGHUP: the terminal was closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
    """Those of them that this process may take: not SIGHUP under nohup, which has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [one for one in STOP_SIGNALS if not (ignored and one == signal.SIGHUP)]


@contextlib.contextmanager
def stop_signals(
    request_stop: Callable[[str], None],
    *,
    answer: str = "stopping after this step; again to stop at once",
    stop_now: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Calls `request_stop` with the name of every stop signal that arrives.

    Python runs a signal's handler in the main thread between two of its instructions, which may be
    a compilation away; the handler's number comes through a socket at once, to a thread of ours.
    The first Ctrl-C asks to stop, a second one interrupts at once. Outside the main thread, where
    Python lets nobody set handlers (a notebook's worker), nothing is set.

    Args:
      request_stop: called in another thread; more than once if more signals come.
      answer: a line for stderr at the first Ctrl-C.
      stop_now: called in that thread at the second Ctrl-C; None: KeyboardInterrupt is raised in the
        main thread, which may be a compilation away.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: Any) -> None:
        if number == signal.SIGINT and stop_now is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(
        target=_listen,
        args=(reader, request_stop, answer, stop_now),
        name="stop signals",
        daemon=True,
    )
    listener.start()
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
        listener.join()
        reader.close()


@contextlib.contextmanager
def record_signals() -> Iterator[list[int]]:
    """The numbers of the stop signals that came, in order; for one who waits for other processes.

    To be used in the main thread.
    """
    came: list[int] = []

    def note(number: int, _frame: Any) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in handled_signals()}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(
    reader: socket.socket,
    request_stop: Callable[[str], None],
    answer: str,
    stop_now: Callable[[], None] | None,
) -> None:
    is_interrupted = False
    while numbers := reader.recv(16):
        for number in numbers:
            if number == signal.SIGINT and is_interrupted:
                if stop_now is not None:
                    stop_now()
            elif number in STOP_SIGNALS:  # other handlers' signals come through the socket too
                request_stop(signal.Signals(number).name)
                if number == signal.SIGINT:
                    is_interrupted = True
                    with contextlib.suppress(OSError):  # a terminal that is gone
                        sys.stderr.write(f"jaxtrain: {answer}\n")
                        sys.stderr.flush()
