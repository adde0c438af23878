"""One attempt of a run: its current phase, and requests to stop."""

import contextlib
from collections.abc import Callable, Iterator

from jaxtrain.run.attempts.folder import RunFolder, nothing
from jaxtrain.run.attempts.goodput import Goodput
from jaxtrain.run.attempts.signals import stop_signals
from jaxtrain.run.cluster.cluster import Peers
from jaxtrain.run.phases import Phases

# A reason to stop that is not a preemption: a restart's output would also go nowhere.
OUTPUT_CLOSED = "closed standard output"


class Preempted(Exception):  # noqa: N818 - an orderly end, not an error
    """The run was requested to stop; everything up to `step` is saved.

    Attributes:
      step: optimizer steps done.
      is_failure: whether this needs attention: its standard output was closed.
    """

    def __init__(self, step: int, reason: str) -> None:
        saved = f"stopped by {reason} after saving step {step}"
        super().__init__(saved if step else f"stopped by {reason} before the first step")
        self.step = step
        self.is_failure = reason.startswith(OUTPUT_CLOSED)


class Attempt:
    """One attempt of a run.

    Attributes:
      number: index of this attempt of the run, from 1.
      phases: what the process is doing.
      goodput: where the time of the run goes.
      may_write: raises if the run's folder belongs to a later attempt by now.
      folder: the run's folder; None: the trainer opens its own.
      token: the secret of the run's processes; None for a single one.
      step: optimizer steps done, set by the trainer.
      has_begun: whether there is a trainer, so that its configuration was accepted.
      at_end: waits for the other processes at a clean exit; skipped if one of
        them failed or is lost.
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
        token: bytes | None = None,
    ) -> None:
        self.number = number
        self.phases = Phases() if phases is None else phases
        self.goodput = Goodput(None, self.phases) if goodput is None else goodput
        self.may_write = may_write
        self.folder = folder
        self.token = token
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

    @property
    def address(self) -> str:
        """This machine's address, for the other processes."""
        return self._peers.address

    def stop_reason(self) -> str | None:
        """Return the reason to stop before this step or evaluation batch, or None.

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
        """Turn signals into requests to stop, within the context; nested uses do nothing.

        Args:
          stop_now: called from another thread at a second Ctrl-C; None: KeyboardInterrupt.
        """
        if self._listening:
            yield
            return
        self._listening = True
        signals = stop_signals(self.request_stop)
        if stop_now is not None:
            answer = (
                "stopping after this step and saving; press Ctrl-C again to stop without saving"
            )
            signals = stop_signals(self.request_stop, answer=answer, stop_now=stop_now)
        try:
            with signals:
                yield
        finally:
            self._listening = False
