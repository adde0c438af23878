"""Membership of an elastic run: which hosts train together, decided by their supervisors.

A generation is a set of hosts that train together: its file in the run's folder is created once, so
two halves of a split network cannot both train. The first member leads it. Waiting hosts send
heartbeats to the leader of the newest generation and to all hosts with lower names; the lowest that
no lower one answers forms the next generation. Times are monotonic seconds of one host; clocks are
never compared between hosts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from jaxtrain.run.cluster.wire import Message

START_SECONDS = 30.0  # that the first generation waits for all hosts
_GAP_SECONDS = 2.0  # between two decisions: then this process itself stood still


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """The supervisor of one host.

    Attributes:
      name: of the host, unique in the run.
      address: where the other hosts reach it.
      port: of its heartbeats.
      incarnation: distinguishes it from an earlier supervisor of the same host.
    """

    name: str
    address: str
    port: int
    incarnation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Hosts that train together.

    Attributes:
      number: from 1.
      members: in the order of their process ids; the first leads.
      port: of the coordinator of their training processes, on the first host.
      words: added to the command, for the layout of this number of hosts.
      supersedes: the newest attempt when it was formed, whose process may be cut off.
      step: the newest checkpoint when it was formed; None: there was none.
      restarts: generations of the same hosts before it, in a row, without a newer checkpoint.
    """

    number: int
    members: tuple[Member, ...]
    port: int
    words: tuple[str, ...] = ()
    supersedes: int = 0
    step: int | None = None
    restarts: int = 0

    @property
    def leader(self) -> Member:
        """The first member."""
        return self.members[0]

    @property
    def names(self) -> list[str]:
        """The members' names, in their order."""
        return [member.name for member in self.members]

    def rank(self, member: Member) -> int | None:
        """Return the process id of a host; None for another host or incarnation."""
        return self.members.index(member) if member in self.members else None

    def to_json(self) -> dict[str, Any]:
        """Return the content of its file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the generation of a file or message.

        Raises:
          KeyError, TypeError: the content is none.
        """
        members = tuple(Member(**one) for one in content["members"])
        content = {**content, "words": tuple(content["words"])}
        del content["members"]
        return cls(members=members, **content)


@dataclasses.dataclass(frozen=True)
class Final:
    """The end of the run for all hosts: an exit status, and the reason."""

    status: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a supervisor does next.

    Attributes:
      kind: `wait`; `form` a generation of `members`; `run` the newest generation; continue
        `training`; `save` and end the training process; `kill` it; `exit`.
      reason: a sentence.
      members: of the generation to form, in order.
      final: how to exit.
    """

    kind: Literal["wait", "form", "run", "training", "save", "kill", "exit"]
    reason: str = ""
    members: tuple[Member, ...] = ()
    final: Final | None = None


@dataclasses.dataclass
class _Seen:
    """The last message of another host, and when."""

    message: Message
    at: float


class Membership:
    """State machine of one supervisor, driven by messages and times, without I/O.

    Attributes:
      me: this host.
      registered: all hosts of the run's folder, by name.
      newest: the newest generation; None before the first.
      final: set when the run has ended, for all hosts.
      own_final: set when it has ended for this host alone.
      is_leaving: whether this host received a signal to stop.
    """

    def __init__(
        self,
        me: Member,
        allowed: Sequence[int],
        *,
        program: str,
        notice_seconds: float,
        wait_seconds: float,
        now: float,
    ) -> None:
        """Start to wait for the other hosts.

        Args:
          me: this host.
          allowed: the numbers of hosts that can train, in order.
          program: digest of versions and command, which all hosts share.
          notice_seconds: a host is lost after this time without a message.
          wait_seconds: time limit for enough hosts.
          now: the monotonic time, like all times of this class.
        """
        self.me, self.registered = me, {me.name: me}
        self.newest: Generation | None = None
        self.final: Final | None = None
        self.own_final: Final | None = None
        self.is_leaving = False
        self._allowed, self._program = sorted(allowed), program
        self._notice, self._patience = notice_seconds, wait_seconds
        self._beats: dict[str, _Seen] = {}
        self._answers: dict[str, _Seen] = {}
        self._running: Generation | None = None
        self._ended = 0  # the last generation that ended here
        self._since = self._turn = self._began = now
        self._started: set[str] = set()
        self._lost: set[str] = set()
        self._over: tuple[float, str] | None = None
        self._candidates: dict[str, int | None] = {}

    # -- messages ---------------------------------------------------------------------------------

    def beat(self) -> Message:
        """Return this host's heartbeat."""
        return {
            "kind": "beat",
            "member": dataclasses.asdict(self.me),
            "running": 0 if self._running is None else self._running.number,
            "leaving": self.is_leaving,
            "program": self._program,
            "final": None if self.final is None else dataclasses.asdict(self.final),
        }

    def receive(self, message: Message, now: float) -> Message:
        """Handle another host's heartbeat; return the answer."""
        member = Member(**message["member"])
        if message["program"] != self._program:
            sentence = (
                f"host {member.name} has another command, configuration or version of a package "
                f"than host {self.me.name}; all hosts of a run need the same"
            )
            return {"kind": "answer", "refused": sentence, **self.beat(), "newest": None}
        self.registered[member.name] = member
        self._beats[member.name] = _Seen(message, now)
        if self._running is not None and self._running.rank(member) is not None:
            self._adopt(message)
        newest = None if self.newest is None else self.newest.to_json()
        return {**self.beat(), "kind": "answer", "refused": None, "newest": newest}

    def receive_answer(self, name: str, message: Message, now: float) -> None:
        """Handle the answer of another host."""
        if message["refused"] is not None:
            if self._running is None:
                self.own_final = Final(2, message["refused"])
            return
        self._answers[name] = _Seen(message, now)
        if message["newest"] is not None:
            self.learn(Generation.from_json(message["newest"]))
        if self.newest is not None and name == self.newest.leader.name:
            self._adopt(message)

    def learn(self, generation: Generation | None) -> None:
        """Take over a newer generation, from the run's folder or another host."""
        if generation is not None and (
            self.newest is None or generation.number > self.newest.number
        ):
            self.newest = generation

    def targets(self) -> list[Member]:
        """Return the hosts to send heartbeats to."""
        if self._running is not None:
            leader = self._running.leader
            return [] if leader == self.me else [leader]
        names = {name for name in self.registered if name < self.me.name}
        if self.newest is not None:
            names.add(self.newest.leader.name)
        names.discard(self.me.name)
        return [self.registered[name] for name in sorted(names) if name in self.registered]

    def _adopt(self, message: Message) -> None:
        if self.final is None and message["final"] is not None:
            self.final = Final(**message["final"])

    # -- decisions --------------------------------------------------------------------------------

    def begin(self, now: float) -> Generation:
        """Begin to run the newest generation."""
        assert self.newest is not None
        self._running, self._over = self.newest, None
        self._began, self._started, self._lost = now, set(), set()
        self._candidates = {}
        # A leader is given the time to begin, too.
        self._answers[self.newest.leader.name] = _Seen({"running": None, "leaving": False}, now)
        return self.newest

    def end(self, now: float) -> None:
        """The training process of the running generation has ended."""
        assert self._running is not None
        leader = self._running.leader
        watched = self._running.names[1:] if leader == self.me else [leader.name]
        self._lost = {name for name in watched if self._is_silent(name, now)}
        self._ended, self._running, self._since = self._running.number, None, now

    def decide(
        self, now: float, *, step: int | None = None, is_abandoned: bool = False
    ) -> Decision:
        """Return what to do next.

        Args:
          now: the time.
          step: the newest checkpoint.
          is_abandoned: whether nothing beats in the run's folder any more.
        """
        self._skip_gap(now)
        final = self.own_final or self.final
        # A training process that is done ends by itself.
        if final is not None and (final.status or self._running is None):
            return Decision("exit", final.reason, final=final)
        if self._running is None:
            return self._decide_waiting(now, is_abandoned)
        over = self._find_end(self._running, now)
        if over is not None and self._over is None:
            self._over = (now, over[1])
        if self._over is not None:
            # Its own error message comes within a moment, unless a host is lost.
            is_due = (over is not None and over[0]) or now >= self._over[0] + self._notice / 2
            if is_due:
                return Decision("kill", self._over[1])
            return Decision("training")
        return self._decide_growth(self._running, now, step)

    def _skip_gap(self, now: float) -> None:
        """Do not count time in which this process itself stood still."""
        gap = now - self._turn
        self._turn = now
        if gap > _GAP_SECONDS:
            for seen in (*self._beats.values(), *self._answers.values()):
                seen.at += gap
            self._since += gap
            self._began += gap

    def _last(self, name: str) -> _Seen | None:
        seen = [one[name] for one in (self._beats, self._answers) if name in one]
        return max(seen, key=lambda one: one.at, default=None)

    def _is_silent(self, name: str, now: float) -> bool:
        seen = self._last(name)
        return seen is None or now - seen.at > self._notice or bool(seen.message["leaving"])

    def _find_end(self, running: Generation, now: float) -> tuple[bool, str] | None:
        """Return why the running generation is over, and whether at once; None if it is not."""
        if self.newest is not None and self.newest.number > running.number:
            return True, f"generation {self.newest.number} has replaced {running.number}"
        if running.leader != self.me:
            seen = self._answers[running.leader.name]
            if now - seen.at > self._notice:
                return True, self._loss(running.leader.name)
            number = seen.message["running"]
            if number is not None and number != running.number:
                return True, f"generation {running.number} has ended on {running.leader.name}"
            return None
        for member in running.members[1:]:
            seen = self._beats.get(member.name)
            if seen is None or now - seen.at > self._notice:
                if now - self._began > 2 * self._notice:
                    return True, self._loss(member.name)
                if member.name in self._started:
                    return True, self._loss(member.name)
                continue
            is_here = seen.message["member"] == dataclasses.asdict(member)
            if is_here and seen.message["running"] == running.number:
                self._started.add(member.name)
            elif member.name in self._started or now - self._began > 2 * self._notice:
                return not is_here, f"generation {running.number} has ended on {member.name}"
        return None

    def _loss(self, name: str) -> str:
        return f"host {name} is lost: silent for {self._notice:g} s"

    def _waiting(self, now: float) -> dict[str, Member]:
        """Return the hosts that wait, by name, without this one."""
        return {
            name: Member(**seen.message["member"])
            for name, seen in self._beats.items()
            if now - seen.at <= self._notice
            and not seen.message["running"]
            and not seen.message["leaving"]
            and seen.message["final"] is None
        }

    def _decide_growth(self, running: Generation, now: float, step: int | None) -> Decision:
        """The leader takes waiting hosts in at the first save after they came."""
        if running.leader != self.me:
            return Decision("training")
        waiting = {n: m for n, m in self._waiting(now).items() if n not in running.names}
        self._candidates = {name: self._candidates.get(name, step) for name in sorted(waiting)}
        saved = [name for name, before in self._candidates.items() if before != step]
        size = self._largest(len(running.members) + len(saved))
        if size is None or size <= len(running.members):
            return Decision("training")
        return Decision("save", f"taking in {', '.join(saved)} after the save of step {step}")

    def _largest(self, count: int) -> int | None:
        return max((size for size in self._allowed if size <= count), default=None)

    def _decide_waiting(self, now: float, is_abandoned: bool) -> Decision:
        newest = self.newest
        if newest is not None and newest.number > self._ended and newest.rank(self.me) is not None:
            return Decision("run")
        if newest is not None and self._is_running_elsewhere(newest, now):
            if newest.rank(self.me) is not None:
                return Decision("wait", f"generation {newest.number} has ended here")
            self._since = now
            names = ", ".join(newest.names)
            return Decision("wait", f"{names} train; this host is taken in at the next save")
        if now - self._since > self._patience:
            final = Final(1, f"{self._missing(now)}; gave up after {self._patience:g} s")
            return Decision("exit", final.reason, final=final)
        lower = [name for name in self._answers if name < self.me.name]
        for name in sorted(lower):
            seen = self._answers[name]
            is_there = now - seen.at <= self._notice and not seen.message["leaving"]
            if is_there and not seen.message["running"]:
                return Decision("wait", f"host {name} forms the next generation")
        present = {self.me.name: self.me, **self._waiting(now)}
        size = self._largest(len(present))
        if size is None:
            return Decision("wait", self._missing(now))
        if newest is None:
            if size < self._allowed[-1] and now - self._since < START_SECONDS:
                return Decision("wait", self._missing(now, self._allowed[-1]))
        else:
            before = set(newest.names)
            if 2 * len(before & set(present)) < len(before) and not is_abandoned:
                sentence = f"{self._missing(now)}; other hosts of the last generation may train"
                return Decision("wait", sentence)
            late = before - set(present) - self._lost
            if late and now - self._since < self._notice and size < self._allowed[-1]:
                return Decision("wait", f"waiting for {', '.join(sorted(late))}")
        others = [present[name] for name in sorted(present) if name != self.me.name]
        return Decision("form", members=(self.me, *others)[:size])

    def _is_running_elsewhere(self, newest: Generation, now: float) -> bool:
        seen = self._answers.get(newest.leader.name)
        return (
            newest.leader.name != self.me.name
            and seen is not None
            and now - seen.at <= self._notice
            and seen.message["running"] == newest.number
        )

    def _missing(self, now: float, wanted: int | None = None) -> str:
        there = sorted({self.me.name, *self._waiting(now)})
        wanted = wanted or self._allowed[0]
        return f"{len(there)} of {wanted} hosts are here ({', '.join(there)}); waiting for the rest"
