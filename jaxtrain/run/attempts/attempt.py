"""One attempt of a run: its current phase, and requests to stop."""

import contextlib
from collections.abc import Callable, Iterator

from jaxtrain.run.attempts.folder import RunFolder, nothing
from jaxtrain.run.attempts.goodput import Goodput
from jaxtrain.run.attempts.signals import stop_signals
from jaxtrain.run.cluster.cluster import Peers
from jaxtrain.run.phases import Phases

# A reason to stop that is no preemption: nobody sees what the same command would print again.
OUTPUT_CLOSED = "closed standard output"


class Preempted(Exception):  # noqa: N818 - an orderly end, not an error
    """Somebody asked the run to stop; everything up to `step` is saved.

    Attributes:
      step: optimizer steps done.
      is_failure: whether whoever runs it should look: its standard output was closed.
    """

    def __init__(self, step: int, reason: str) -> None:
        saved = f"stopped by {reason} after saving step {step}"
        super().__init__(saved if step else f"stopped by {reason} before the first step")
        self.step = step
        self.is_failure = reason.startswith(OUTPUT_CLOSED)


class Attempt:
    """One start of a run.

    Attributes:
      number: which start of the same run this is, from 1.
      phases: what the process is doing.
      goodput: where the time of the run goes.
      may_write: raises where the run's folder belongs to a later attempt by now.
      folder: the run's folder; None: the trainer opens its own.
      step: optimizer steps done, as the trainer says.
      has_begun: whether there is a trainer: its configuration was not rejected.
      at_end: what waits for the other processes at an orderly end, and is left out where one of
        them failed or is gone.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        number: int = 1,
        phases: Phases | None = None,
        goodput: Goodput | None = None,
        may_write: Callable[[], None] = nothing,
        folder: RunFolder | None = None,
    ) -> None:
        self.number = number
        self.phases = Phases() if phases is None else phases
        self.goodput = Goodput(None, self.phases) if goodput is None else goodput
        self.may_write = may_write
        self.folder = folder
        self.step = 0
        self.has_begun = False
        self.at_end: list[Callable[[], None]] = []
        self._peers = peers
        self._ticks = 0
        self._listening = False

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes and shows."""
        return self._peers.process_id == 0

    def stop_reason(self) -> str | None:
        """Before a step or a batch of an evaluation: why the run stops here, or None.

        Each process asks at the same points, so that all stop at the same one.
        """
        self._ticks += 1
        return self._peers.tick(self._ticks)

    def request_stop(self, reason: str) -> None:
        """Ask all processes to stop; from any thread."""
        peers = self._peers
        where = f" on process {peers.process_id} (host {peers.hosts[peers.process_id]})"
        peers.request_stop(reason + where * (peers.num_processes > 1))

    @contextlib.contextmanager
    def listening(self, stop_now: Callable[[], None] | None = None) -> Iterator[None]:
        """While signals are requests to stop; inside another such `with` it does nothing.

        Args:
          stop_now: what a second Ctrl-C does, from another thread; None: it interrupts.
        """
        if self._listening:
            yield
            return
        self._listening = True
        signals = stop_signals(self.request_stop)
        if stop_now is not None:
            answer = "stopping after this step, saving; again to stop without saving"
            signals = stop_signals(self.request_stop, answer=answer, stop_now=stop_now)
        try:
            with signals:
                yield
        finally:
            self._listening = False
