"""Requests to stop a run: SIGTERM, SIGINT, SIGHUP, and Google Cloud maintenance notices."""

import contextlib
import http.client
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# SIGTERM: preemption by TPU VMs, Kubernetes, Slurm, `kill`. SIGUSR1: what Slurm sends ahead of the
# end with `--signal=USR1@120`. SIGINT: Ctrl-C. SIGHUP: the terminal was closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Set by a supervisor, whose end is a request to stop too.
SUPERVISOR_VARIABLE = "JAXTRAIN_SUPERVISOR"


def attempt_to_supersede() -> int:
    """Return the attempt that the supervisor's command supersedes; 0 if none."""
    return int(os.environ.get(SUPERVISOR_VARIABLE, "0").split()[-1])


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals that this process may handle: not SIGHUP under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [one for one in STOP_SIGNALS if not (ignored and one == signal.SIGHUP)]


@contextlib.contextmanager
def stop_signals(
    request_stop: Callable[[str], None],
    *,
    answer: str = "stopping after this step; press Ctrl-C again to stop at once",
    stop_now: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Call `request_stop` with the name of every stop signal that arrives.

    Python runs a signal's handler in the main thread between two bytecodes, which may take
    as long as a compilation; the signal number arrives through a socket at once, in our own thread.
    The first Ctrl-C requests a stop, a second one interrupts at once. Outside the main thread,
    where Python does not allow handlers (a notebook's worker), nothing is set.

    Args:
      request_stop: called in another thread; more than once if more signals come.
      answer: a line for stderr at the first Ctrl-C.
      stop_now: called in that thread at the second Ctrl-C; None: KeyboardInterrupt is raised in the
        main thread, which may take as long as a compilation.
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
    """Yield the list of received stop signals, in order; for programs that wait for child
    processes.

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
            elif number in STOP_SIGNALS:  # other handlers' signals arrive through the socket too
                request_stop(signal.Signals(number).name)
                if number == signal.SIGINT:
                    is_interrupted = True
                    with contextlib.suppress(OSError):  # a closed terminal
                        sys.stderr.write(f"jaxtrain: {answer}\n")
                        sys.stderr.flush()


# Metadata server attributes of a virtual machine (Google Cloud: "Maintenance notices",
# "Preemptible VM instances"), and the answers that announce its end.
NOTICES = {
    "instance/maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "instance/preempted": ("TRUE",),
}
METADATA_HOST = "metadata.google.internal"
PERIOD_SECONDS = 10.0


def notice(host: str, timeout_seconds: float = 2.0) -> str | None:
    """Return the notice of this machine's shutdown, such as 'instance/preempted TRUE', or None.

    A metadata server that does not answer is ignored: SIGTERM still arrives.
    """
    for path, alarms in NOTICES.items():
        request = urllib.request.Request(
            f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
                reply = answer.read(256).decode("ascii", "replace").strip()
        except (OSError, http.client.HTTPException, urllib.error.URLError):
            continue
        if reply in alarms:
            return f"{path} {reply}"
    return None


@contextlib.contextmanager
def maintenance_notices(
    request_stop: Callable[[str], None],
    environment: Mapping[str, str],
    *,
    on_google_cloud: bool,
    period_seconds: float = PERIOD_SECONDS,
) -> Iterator[None]:
    """Poll the notices in a thread and call `request_stop` once when one comes.

    Args:
      request_stop: called with the notice.
      environment: GCE_METADATA_HOST in it names another metadata server, as for Google's libraries.
      on_google_cloud: whether there is a metadata server to ask; False polls nothing.
      period_seconds: between two requests.
    """
    host = environment.get("GCE_METADATA_HOST")
    if host is None and not on_google_cloud:
        yield
        return
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(period_seconds):
            found = notice(host or METADATA_HOST)
            if found is not None:
                request_stop(found)
                return

    poller = threading.Thread(target=poll, name="maintenance notices", daemon=True)
    poller.start()
    try:
        yield
    finally:
        ended.set()
        poller.join()
