"""`verify`: check a configuration, shrunk, on eight simulated devices."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from jaxtrain.analysis.verify.measures import NotChecked
from jaxtrain.analysis.verify.meshes import DEVICES
from jaxtrain.analysis.verify.proofs import claims
from jaxtrain.analysis.verify.runs import Bench
from jaxtrain.analysis.verify.shrink import Small, shrink
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.pairs.spans import SpanData
from jaxtrain.data.text.source import text_of
from jaxtrain.models.model import reads_pairs, reads_tokens
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.parallel.devices import simulate_devices
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config

# -- report: a row for each claim, with the measured error and its limit ---------------------------

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


# -- the check -------------------------------------------------------------------------------------

# Every program runs only a few times, so these flags disable LLVM's optimizations of machine code,
# but not XLA's own passes (partitioning, fusion, memory). This halves the time.
_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def simulate() -> None:
    """Make JAX run on eight simulated CPU devices; call before the backend is initialized.

    Raises:
      UserError: JAX already runs on other devices in this process.
    """
    os.environ["XLA_FLAGS"] = f"{_XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    simulate_devices(DEVICES)


def verify(
    config: Config,
    *,
    on_small: Callable[[Small], None] = lambda _: None,
    on_proof: Callable[[Proof], None] = lambda _: None,
) -> Report:
    """Verify a configuration, shrunk to sizes that run in seconds, on random data.

    Args:
      config: the user's configuration, of any size.
      on_small: called with the shrunk configuration before the first proof.
      on_proof: called with each proof when it is done.

    Raises:
      UserError: the configuration cannot run on its own devices.
    """
    began = time.monotonic()
    validate(config)
    small = shrink(config)
    on_small(small)
    proofs = []
    for claim in claims(Bench(small)):
        start = time.monotonic()
        found = claim.prove()
        seconds = time.monotonic() - start
        if isinstance(found, NotChecked):
            proof = Proof(claim.proof, claim.what, None, None, "not checked", seconds, found.reason)
        else:
            verdict = "proved" if found.measured <= found.limit else "FAILED"
            proof = Proof(
                claim.proof, claim.what, found.measured, found.limit, verdict, seconds, found.detail
            )
        proofs.append(proof)
        on_proof(proof)
    return Report(small, tuple(proofs), time.monotonic() - began)


def validate(config: Config) -> None:
    """Raise UserError if the configuration cannot run on its devices.

    If an axis is -1, the number of devices is unknown: the configuration is valid if it can run
    with size 1 or 2 of that axis.
    """
    model, data = config.train.model, config.train.data
    text = text_of(data)
    # Neither the text nor the tokenizer needs to be on this machine.
    if text is not None and reads_tokens(model):
        vocabulary = max(model.vocab_size, 2)
        data = dataclasses.replace(
            text, source="synthetic", heldout_split=None, synthetic_vocab_size=vocabulary
        )
    if isinstance(data, PairData | SpanData) and reads_pairs(model):
        data = PairData(
            source="synthetic",
            synthetic_vocab_size=max(model.vocab_size, 2),
            source_length=data.source_length,
            target_length=data.target_length,
        )
    train = dataclasses.replace(config.train, data=data)
    sizes = [getattr(config.mesh, axis) for axis in MESH_AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    counts = (2 * fixed, fixed) if -1 in sizes else (fixed,)
    # Validate each kernel on its own platform, whatever the platform of this machine.
    named = KERNELS.get(config.attention.kernel)
    platform = (None if named is None else named.only_on) or "gpu"
    errors = []
    for count in counts:
        try:
            preflight.check(
                dataclasses.replace(config, train=train), device_count=count, platform=platform
            )
        except UserError as error:
            errors.append(error)
    if len(errors) == len(counts):
        raise errors[0]
