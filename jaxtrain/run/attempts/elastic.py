"""Elastic supervision (`supervise --hosts MIN:MAX`): resume without lost hosts, take them in again.

Each host has one supervisor. They form generations (`run.cluster.membership`): the hosts that train
together, with the layout of their number. When one is lost, all end their training processes and
form the next; when one comes back, the leader ends the generation at the next save. A signal to a
supervisor takes its own host out of the run.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config.buckets import AnyPath, BucketError
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors
from jaxtrain.run.attempts import DONE, FAILED, PREEMPTED, USER_ERROR, records
from jaxtrain.run.attempts.lock import BEAT_SECONDS, BEATS_WAITED
from jaxtrain.run.attempts.signals import record_signals
from jaxtrain.run.attempts.standby import Reserve
from jaxtrain.run.attempts.supervise import Order, Supervision, run_child, to_stderr
from jaxtrain.run.cluster.authentication import VARIABLE, RunToken
from jaxtrain.run.cluster.cluster import join_address
from jaxtrain.run.cluster.heartbeats import (
    Heartbeats,
    read_hosts,
    read_newest,
    register,
    write_generation,
)
from jaxtrain.run.cluster.membership import Decision, Final, Generation, Member, Membership
from jaxtrain.run.cluster.wire import free_port, is_loopback

TOKEN_FILE = "token"
_PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_REFRESH_SECONDS = 1.0  # between two reads of the run's folder
_LINGER_SECONDS = 2.0  # for the other hosts to receive how the run ended
_LAYOUTS = (sys.executable, "-P", "-m", "jaxtrain.training.preflight.elastic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elastic:
    """Options of an elastic run.

    Attributes:
      least: the smallest number of hosts that train.
      most: the largest number, for which the configuration is written.
      name: of this host, unique in the run; None: the system's.
      address: where the other hosts reach this one; None: that of the system's name.
      notice_seconds: a host is lost after this time without a heartbeat.
      wait_seconds: time limit for enough hosts.
    """

    least: int
    most: int
    name: str | None = None
    address: str | None = None
    notice_seconds: float = 5.0
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.name is not None and re.fullmatch(r"[\w][\w.-]{0,99}", self.name) is None:
            raise UserError(
                f"--host-name {self.name!r}: use letters, digits, '.', '-' and '_', up to 100"
            )
        for option, value in (("notice", self.notice_seconds), ("wait", self.wait_seconds)):
            if not value > 0:
                raise UserError(f"--{option}-seconds {value:g}: use more than 0, such as 5")

    def own_address(self) -> str:
        """Return the address of this host.

        Raises:
          UserError: its name resolves to loopback, or not at all.
        """
        if self.address is not None:
            return self.address
        name, found = socket.gethostname(), []
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        for *_, address in found:
            if not is_loopback(str(address[0])):
                return str(address[0])
        raise UserError(
            f"--hosts: no address of this host ({name}) that others reach is known; give --address"
        )


def read_layouts(elastic: Elastic, train: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the words that each allowed number of hosts adds to the command.

    A process of its own computes them: it imports JAX.

    Args:
      elastic: the numbers of hosts.
      train: config, bindings and allow_imports of the command.

    Raises:
      UserError: the configuration cannot train on `most` hosts.
    """
    given = {**train, "least": elastic.least, "most": elastic.most}
    found = subprocess.run([*_LAYOUTS, json.dumps(given)], capture_output=True, check=False)
    if found.returncode:
        message = found.stderr.decode(errors="replace").strip().removeprefix("jaxtrain: ")
        raise UserError(message or f"the layouts cannot be computed ({found.returncode})")
    layouts = json.loads(found.stdout.splitlines()[-1])
    if layouts[-1]["error"] is not None:
        raise UserError(layouts[-1]["error"])
    words: dict[int, list[str]] = {}
    for one in layouts:
        if one["error"] is None:
            changes = one["changes"]
            devices = changes.pop("Mesh.simulated_devices", None)
            words[one["hosts"]] = [
                word for name, value in changes.items() for word in ("-b", f"{name} = {value!r}")
            ]
            if devices is not None:
                words[one["hosts"]] += ["--simulate-devices", str(devices)]
    return words


def supervise_elastic(
    command: Sequence[str],
    workdir: AnyPath,
    elastic: Elastic,
    words: Mapping[int, Sequence[str]],
    *,
    settings: Supervision,
    report: Callable[[str], None] = to_stderr,
) -> int:
    """Supervise this host's part of an elastic run; return the exit status.

    Args:
      command: the program and its arguments, without those of the cluster.
      workdir: the run's folder, which all hosts share.
      elastic: the numbers of hosts, and this one's name and address.
      words: added to the command, by the number of hosts: `read_layouts`.
      settings: restart policy and timeouts.
      report: called with each line to print.

    Raises:
      UserError: the folder cannot be written, or the host has no address.
    """
    folder = workdir / records.ATTEMPTS_FOLDER
    with path_errors(f"--workdir {workdir}", needs="use a folder that can be made and written"):
        token = RunToken(os.environ, folder / TOKEN_FILE, report=report).share()
        heartbeats = Heartbeats(
            elastic.own_address(), token, seconds=elastic.notice_seconds, report=report
        )
        me = Member(
            name=elastic.name or socket.gethostname(),
            address=elastic.own_address(),
            port=heartbeats.port,
            incarnation=uuid.uuid4().hex,
        )
        register(folder, me)
    os.environ[VARIABLE] = token.decode()  # for the training processes
    membership = Membership(
        me,
        sorted(words),
        program=_digest(command, words),
        notice_seconds=elastic.notice_seconds,
        wait_seconds=elastic.wait_seconds,
        now=time.monotonic(),
    )
    with (
        contextlib.closing(heartbeats),
        contextlib.closing(Reserve(command)) as reserve,
        record_signals() as stop,
    ):
        host = _Host(command, workdir, words, settings, report, membership, stop, reserve)
        heartbeats.start(membership, host.lock, time.monotonic)
        return host.run()


def _digest(command: Sequence[str], words: Mapping[int, Sequence[str]]) -> str:
    versions = [importlib.metadata.version(name) for name in _PACKAGES]
    facts = [list(command[1:]), sorted((k, list(v)) for k, v in words.items()), versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class _Host:
    """The loop of one supervisor."""

    def __init__(
        self,
        command: Sequence[str],
        workdir: AnyPath,
        words: Mapping[int, Sequence[str]],
        settings: Supervision,
        report: Callable[[str], None],
        membership: Membership,
        stop: list[int],
        reserve: Reserve,
    ) -> None:
        self.lock = threading.Lock()
        self._command, self._workdir, self._words = command, workdir, words
        self._settings, self._report = settings, report
        self._membership, self._stop, self._reserve = membership, stop, reserve
        self._folder = workdir / records.ATTEMPTS_FOLDER
        self._refreshed = -float("inf")
        self._step: int | None = None
        self._lock_beat: tuple[Any, float] = (None, time.monotonic())
        self._form_after = 0.0
        self._reported = ""

    def run(self) -> int:
        while True:
            decision = self._decide()
            if self._stop:
                self._report("stopped by a signal while no training process ran")
                return PREEMPTED
            if decision.kind == "exit":
                assert decision.final is not None
                return self._exit(decision.final)
            if decision.kind == "run":
                status = self._train()
                if status is not None:
                    return status
                continue
            self._reserve.prepare()
            if decision.kind == "form":
                self._form(decision)
            elif decision.reason != self._reported:
                self._reported = decision.reason
                self._report(decision.reason)
            time.sleep(self._settings.poll_seconds)

    def _decide(self) -> Decision:
        now = time.monotonic()
        self._refresh(now)
        abandoned = now - self._lock_beat[1] > BEATS_WAITED * BEAT_SECONDS
        with self.lock:
            self._membership.is_leaving = bool(self._stop)
            return self._membership.decide(now, step=self._step, is_abandoned=abandoned)

    def _refresh(self, now: float) -> None:
        """Read the run's folder, at most once in a while."""
        if now - self._refreshed < _REFRESH_SECONDS:
            return
        try:
            hosts, newest = read_hosts(self._folder), read_newest(self._folder)
            self._step = records.newest_step(self._workdir)
            beat = records.read(self._workdir / records.LOCK_FILE)
        except OSError:
            return  # the next time, or another host decides
        self._refreshed = time.monotonic()
        if beat != self._lock_beat[0]:
            self._lock_beat = (beat, now)
        me = self._membership.me
        with self.lock:
            if hosts.get(me.name, me) != me:
                reason = f"another supervisor of host {me.name} has started; this one ends"
                self._membership.own_final = Final(FAILED, reason)
                return
            self._membership.registered.update(hosts)
            self._membership.learn(newest)

    def _form(self, decision: Decision) -> None:
        """Form the next generation, after a backoff if the last ended without progress."""
        before, now = self._membership.newest, time.monotonic()
        step = records.newest_step(self._workdir)
        restarts, members = 0, set(decision.members)
        if before is not None and members == set(before.members) and step == before.step:
            restarts = before.restarts + 1
        if restarts > self._settings.max_restarts_without_progress:
            kept = "no checkpoint yet" if step is None else f"newest checkpoint: step {step}"
            reason = (
                f"gave up after {restarts - 1} restarts of the same hosts in a row without a newer "
                f"checkpoint ({kept})"
            )
            with self.lock:
                self._membership.final = Final(FAILED, reason)
            return
        if self._form_after == 0.0 and restarts:
            self._form_after = now + self._settings.backoff(restarts - 1)
        if now < self._form_after:
            return
        self._form_after = 0.0
        me = self._membership.me
        generation = Generation(
            number=1 if before is None else before.number + 1,
            members=decision.members,
            port=free_port(me.address, me.port),
            words=tuple(self._words[len(decision.members)]),
            supersedes=0 if before is None else records.newest_attempt(self._workdir),
            step=step,
            restarts=restarts,
        )
        with contextlib.suppress(OSError):
            write_generation(self._folder, generation)
            newest = read_newest(self._folder)
            with self.lock:
                self._membership.learn(newest)

    def _train(self) -> int | None:
        """Run this host's process of the newest generation; return the exit status of the
        supervisor, None to continue."""
        with self.lock:
            generation = self._membership.begin(time.monotonic())
        me, self._reported = self._membership.me, ""
        rank, count = generation.members.index(me), len(generation.members)
        self._report(
            f"generation {generation.number}: {', '.join(generation.names)} "
            f"({', '.join(generation.words[1::2]) or 'all hosts'})"
        )
        address = join_address(generation.leader.address, generation.port)
        cluster = ["--coordinator", address, "--num-processes", str(count)]
        command = [*self._command, *generation.words, *cluster, "--process-id", str(rank)]
        ending = run_child(
            command,
            self._workdir,
            self._settings,
            self._stop,
            self._reserve,
            self._report,
            watch=self._watch,
            supersedes=generation.supersedes,
        )
        with contextlib.suppress(BucketError):
            ending.write(self._workdir)
        with self.lock:
            self._membership.end(time.monotonic())
        self._refreshed = -float("inf")
        if self._stop:
            return PREEMPTED if ending.status == PREEMPTED else ending.status or DONE
        if ending.status in (DONE, USER_ERROR):
            final = Final(ending.status, str(ending))
            with self.lock:
                self._membership.final = self._membership.final or final
            return self._exit(self._membership.final or final)
        self._report(str(ending))
        return None

    def _watch(self) -> Order | None:
        decision = self._decide()
        if decision.kind in ("kill", "exit"):
            return Order("kill", decision.reason)
        return Order("save", decision.reason) if decision.kind == "save" else None

    def _exit(self, final: Final) -> int:
        """End after the other hosts had time to receive how the run ended."""
        if final.status:
            self._report(final.reason)
        time.sleep(_LINGER_SECONDS)
        return final.status
