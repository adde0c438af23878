"""Turns signals into requests to stop, also while the main thread is inside a compiler."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

# SIGTERM: preemption by TPU VMs, Kubernetes, Slurm, `kill`. SIGUSR1: what Slurm sends ahead of the
# end with `--signal=USR1@120`. SIGINT: Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextlib.contextmanager
def stop_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Calls `request_stop` with the name of every stop signal that arrives.

    Python runs a signal's handler in the main thread between two of its instructions, which may be
    a compilation away; the handler's number comes through a socket at once, to a thread of ours.
    The first Ctrl-C asks to stop, a second one interrupts at once. Outside the main thread, where
    Python lets nobody set handlers (a notebook's worker), nothing is set.

    Args:
      request_stop: called in another thread; more than once if more signals come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(
        target=_listen, args=(reader, request_stop), name="stop signals", daemon=True
    )
    listener.start()
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
        listener.join()
        reader.close()


def _listen(reader: socket.socket, request_stop: Callable[[str], None]) -> None:
    while numbers := reader.recv(16):
        for number in numbers:
            if number in STOP_SIGNALS:  # other handlers' signals come through the socket too
                request_stop(signal.Signals(number).name)
