"""Coordinator on process 0: lost processes, first cause of failure, common stop step."""

import dataclasses
from collections.abc import Callable, Mapping

from jaxtrain.run.cluster.interface import Cause, Row, Table
from jaxtrain.run.cluster.wire import Message

# A process that only feels another's death reports an error of its own, often some milliseconds
# before that death is seen here: the loss is waited for before an error is called the cause.
_DOUBT_SECONDS = 0.5


class Hub:
    """The decisions of process 0, fed with messages and times; it opens no socket.

    Attributes:
      cause: the first cause; None while all is well.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        silence_seconds: float,
        send: Callable[[int, Message], None],
        now: float,
    ) -> None:
        """Begins with all processes there.

        Args:
          hosts: of all processes.
          silence_seconds: after this long without a word a process is lost.
          send: takes a message to a process; to 0 it is this process's own.
          now: the monotonic time in seconds, as everywhere here.
        """
        self.cause: Cause | None = None
        self._hosts, self._silence, self._send = hosts, silence_seconds, send
        self._heard = dict.fromkeys(hosts, now)
        self._rows: dict[int, Row] = {process: {} for process in hosts}
        self._gone: dict[int, int] = {}
        self._suspected: tuple[float, Cause] | None = None
        self._stop_reason: str | None = None
        self._ticks: dict[int, int] = {}
        self._agreed = False

    def hear(self, process: int, message: Message, now: float) -> None:
        """One message of a process."""
        self._heard[process] = now
        match message["kind"]:
            case "beat":
                self._rows[process] = message["activity"]
            case "stop":
                self._begin_stop(message["reason"])
            case "at":
                self._ticks[process] = message["tick"]
                self._agree()
            case "failed":
                cause = Cause("failed", process, self._hosts[process], message["reason"])
                if self._suspected is None:
                    self._suspected = (now + _DOUBT_SECONDS, cause)
            case "goodbye":
                self._gone[process] = message["tick"]
                self._agree()
                if len(self._gone) == len(self._hosts):
                    self._tell_all({"kind": "end"})

    def mark_closed(self, process: int, why: str, now: float) -> None:
        """A connection ended; after a goodbye or a report of its own that is no loss."""
        suspected = self._suspected is not None and self._suspected[1].process_id == process
        if process not in self._gone and not suspected:
            self._settle(Cause("lost", process, self._hosts[process], why), now)

    def check(self, now: float) -> None:
        """Looks for processes that are silent and settles what was in doubt for long enough."""
        for process, heard in self._heard.items():
            if process and process not in self._gone and now - heard > self._silence:
                why = f"silent for {self._silence:g} s"
                self._settle(Cause("lost", process, self._hosts[process], why), now)
        if self._suspected is not None and now > self._suspected[0]:
            self._settle(self._suspected[1], now)

    def mark_frozen(self, seconds: float, now: float) -> None:
        """This process itself did not run for so long that it is the one that was lost."""
        self._settle(Cause("lost", 0, self._hosts[0], f"stood still for {seconds:.0f} s"), now)

    def next_check(self) -> float:
        """When `check` will have a doubt to settle; infinity where there is none."""
        if self._suspected is None or self.cause is not None:
            return float("inf")
        return self._suspected[0]

    def table(self, now: float) -> Table:
        """What each process was doing when it was last heard, and how long ago that was."""
        return {
            process: {
                "host": self._hosts[process],
                "seconds_ago": round(now - self._heard[process], 1),
                "ended": process in self._gone,
                **row,
            }
            for process, row in self._rows.items()
        }

    def share_table(self, now: float) -> None:
        """Sends the table to all, so that everybody has it should this process be lost."""
        self._tell_all({"kind": "table", "table": _with_text_keys(self.table(now))})

    def missing(self) -> list[int]:
        """Processes that have not said goodbye."""
        return [process for process in self._hosts if process not in self._gone]

    def _begin_stop(self, reason: str) -> None:
        if self._stop_reason is None:
            self._stop_reason = reason
            self._tell_all({"kind": "ask"})
            self._agree()

    def _agree(self) -> None:
        """All have said at which tick they are, or have ended: the last of these is the target."""
        ticks = {**self._ticks, **self._gone}
        if self._stop_reason is None or self._agreed or len(ticks) < len(self._hosts):
            return
        self._agreed = True
        told = {"kind": "until", "tick": max(ticks.values()), "reason": self._stop_reason}
        self._tell_all(told)

    def _settle(self, cause: Cause, now: float) -> None:
        if self.cause is None:
            self.cause = cause
            table = _with_text_keys(self.table(now))
            self._tell_all({"kind": "verdict", **dataclasses.asdict(cause), "table": table})

    def _tell_all(self, message: Message) -> None:
        # This process last: its answer to a verdict may be its end.
        for process in sorted(self._hosts, reverse=True):
            self._send(process, message)


def _with_text_keys(table: Table) -> dict[str, Row]:
    return {str(process): row for process, row in table.items()}


def read_table(message: Message) -> Table:
    """The table of a message, its keys numbers again."""
    return {int(process): row for process, row in message["table"].items()}
