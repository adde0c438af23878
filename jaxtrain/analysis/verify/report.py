"""Report of `jaxtrain verify`: a row for each claim, with the measured error and its limit."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from jaxtrain.analysis.verify.shrink import Small

Verdict = Literal["proved", "FAILED", "not checked"]


@dataclasses.dataclass(frozen=True)
class Proof:
    """Row of the report's table.

    Attributes:
      proof: the short name of the claim.
      what: a description of the comparison.
      measured: the largest difference; None if not checked.
      limit: the tolerance; 0 requires bitwise equality; None if not checked.
      verdict: 'proved', 'FAILED' or 'not checked'.
      seconds: the duration, including compilation.
      detail: the individual figures, or the reason why it was not checked.
    """

    proof: str
    what: str
    measured: float | None
    limit: float | None
    verdict: Verdict
    seconds: float
    detail: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Proofs of one configuration.

    Attributes:
      small: the shrunk configuration.
      proofs: the rows, in order.
      seconds: the total duration.
    """

    small: Small
    proofs: tuple[Proof, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether no proof failed."""
        return all(proof.verdict != "FAILED" for proof in self.proofs)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` writes; docs/verify.md documents its keys."""
        return {
            "passed": self.passed,
            "seconds": self.seconds,
            "meshes": list(self.small.meshes),
            "pairs_left_out": [list(pair) for pair in self.small.pairs_left_out],
            "shrunk": [
                {"setting": c.setting, "own": c.own, "small": c.small} for c in self.small.changes()
            ],
            "proofs": [_finite(dataclasses.asdict(proof)) for proof in self.proofs],
        }


def _finite(proof: dict[str, Any]) -> dict[str, Any]:
    """Replace non-finite values by the largest double, because JSON has no infinity."""
    measured = proof["measured"]
    if measured is not None and not math.isfinite(measured):
        proof["measured"] = 1.7976931348623157e308
    return proof


def show_small(console: Console, small: Small) -> None:
    """Print the shrunk settings and the meshes."""
    for change in small.changes():
        line = f"shrunk: {change.setting} = {change.own!r} -> {change.small!r}"
        console.print(escape(line), highlight=False)
    for sizes in small.meshes:
        written = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        console.print(f"mesh: {written or 'one device'}", highlight=False)
    for one, other in small.pairs_left_out:
        line = f"not checked: Mesh.{one} together with Mesh.{other} (8 devices are too few)"
        console.print(line, highlight=False)


class _Shown:
    """Live report: a table that grows in a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._table = proof_table(())

    def small(self, small: Small) -> None:
        """Print the shrunk settings and the header of the table."""
        show_small(self._console, small)
        if self._console.is_terminal:
            self._live = Live(self._table, console=self._console)
            self._live.start()
        else:
            head = ("proof", "measured", "limit", "verdict", "seconds", "what (figures)")
            self._console.print(_plain(*head))

    def proof(self, proof: Proof) -> None:
        """Add a row."""
        if self._live is None:
            line = _plain(*_cells(proof))
            self._console.print(line, soft_wrap=True, highlight=False)
            return
        _add(self._table, proof)
        self._live.refresh()

    def close(self) -> None:
        """Stop the live display and leave the table in the terminal."""
        if self._live is not None:
            self._live.stop()


def proof_table(proofs: Iterable[Proof]) -> Table:
    """Return a table with a row for each proof."""
    table = Table("proof", "what", "measured", "limit", "verdict", "seconds")
    for proof in proofs:
        _add(table, proof)
    return table


def _add(table: Table, proof: Proof) -> None:
    name, measured, limit, verdict, seconds, what = _cells(proof)
    style = {"proved": "green", "FAILED": "bold red"}.get(verdict, "yellow")
    table.add_row(name, what, measured, limit, f"[{style}]{verdict}[/]", seconds)


@contextlib.contextmanager
def showing(console: Console) -> Iterator[_Shown]:
    """Open a live report of the shrunk configuration and of each finished proof."""
    shown = _Shown(console)
    try:
        yield shown
    finally:
        shown.close()


def _cells(proof: Proof) -> tuple[str, ...]:
    measured, limit = (_figure(value) for value in (proof.measured, proof.limit))
    what = escape(f"{proof.what} ({proof.detail})")
    return proof.proof, measured, limit, proof.verdict, f"{proof.seconds:.1f}", what


def _plain(*cells: str) -> str:
    name, measured, limit, verdict, seconds, what = cells
    return f"{name:<12} {measured:>8} {limit:>8} {verdict:<11} {seconds:>7}  {what}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def show_end(console: Console, report: Report) -> None:
    """Print the overall verdict."""
    counts = {word: 0 for word in ("proved", "FAILED", "not checked")}
    for proof in report.proofs:
        counts[proof.verdict] += 1
    text = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    console.print(f"{text} in {report.seconds:.0f} s", highlight=False)
