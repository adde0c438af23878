"""Seconds from the loss of a host to the next step of an elastic run, by part.

    python -m benchmarks.elastic [--rounds 3] [--json FILE]

Four hosts as network namespaces of this machine (root, iproute2), one CPU device each, train a tiny
model under `jaxtrain supervise --hosts 2:4 --notice-seconds 5`. Each round loses a host as by a
power cut, once one that follows and once the one that leads, and takes it in again. Parts, by the
lines of the host that leads afterwards: to the line that a host is lost (notice), that the next
generation is formed (rendezvous), that its devices are there (start: standby, channel, backend),
that a checkpoint was read (restore: data, model, arrays), and of the first step. Taken in again:
from the start of the supervisor to the first step of all hosts.
"""

import argparse
import collections
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.hosts import Host, Hosts, network, write_config

NAMES = ("a", "b", "c", "d")
PARTS = {
    "notice": "is lost: silent",
    "rendezvous": "generation {generation}: ",
    "start": "cpu devices, 1 of them",
    "restore": "Resuming from the checkpoint",
    "compile and first step": "\nstep ",
}


class Elastic:
    """An elastic run of four hosts."""

    def __init__(self, hosts: Hosts, config: Path) -> None:
        self.hosts, self._train = hosts, [str(config), "--simulate-devices", "4"]
        self.generation = 1
        for name in NAMES:
            self.start(name)
        hosts.wait_for_step(60)

    def start(self, name: str) -> None:
        """Start a host's supervisor."""
        self.hosts.start(name, "2:4", self._train, "--notice-seconds", "5")

    def lose(self, name: str) -> dict[str, float]:
        """Lose a host; return seconds by part."""
        self.hosts.wait_for_step(self.hosts.steps() + 60)
        time.sleep(15)  # the standbys have imported all
        rest = [other for other in self.members() if other != name]
        leader = self.hosts.each[rest[0] if rest[0] == self.members()[0] else min(rest)]
        before, self.generation = len(leader.log()), self.generation + 1
        ends = [time.monotonic()]
        self.hosts.each[name].lose()
        for text in PARTS.values():
            before = self._wait_for(leader, text.format(generation=self.generation), before)
            ends.append(time.monotonic())
        seconds = [end - begin for begin, end in itertools.pairwise(ends)]
        parts = dict(zip(PARTS, seconds, strict=True))
        return parts | {"whole": ends[-1] - ends[0]}

    def take_in(self, name: str) -> float:
        """Start a lost host again; return the seconds to the first step of all hosts."""
        began, self.generation = time.monotonic(), self.generation + 1
        host = self.hosts.each[name]
        before = len(host.log())
        host.join()
        self.start(name)
        wanted = f"generation {self.generation}: "
        self._wait_for(host, wanted, before)
        leader = self.hosts.each[self.members()[0]]
        self._wait_for(leader, "\nstep ", self._wait_for(leader, wanted, 0))
        return time.monotonic() - began

    def _wait_for(self, host: Host, text: str, begin: int) -> int:
        """Wait until a host has printed a text; return where in its output, from `begin` on."""
        self.hosts.wait_until(lambda: text in host.log()[begin:], 120)
        return host.log().index(text, begin)

    def members(self) -> list[str]:
        """Return the hosts of the newest generation, the leader first."""
        file = self.hosts.workdir / "attempts" / "generations" / f"{self.generation}.json"
        return [member["name"] for member in json.loads(file.read_text())["members"]]


def measure(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return each round's seconds by part, of a host that follows and of one that leads."""
    found: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, steps=100_000, save_every=50)
        with network(folder, NAMES) as hosts:
            run = Elastic(hosts, config)
            for _ in range(rounds):
                for kind, of in (("follows", -1), ("leads", 0)):
                    lost = run.members()[of]
                    parts = run.lose(lost)
                    found[kind].append({**parts, "taken in again": run.take_in(lost)})
    return dict(found)


def main() -> None:
    """Measure, print and, if asked, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    table = Table("part", *found, title="seconds, median (least, most)")
    for part in (*PARTS, "whole", "taken in again"):
        cells = []
        for rows in found.values():
            values = [row[part] for row in rows]
            middle = statistics.median(values)
            cells.append(f"{middle:.1f} ({min(values):.1f}, {max(values):.1f})")
        table.add_row(part, *cells)
    Console(file=sys.stdout).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
