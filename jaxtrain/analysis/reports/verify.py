"""HTML report of `jaxtrain verify --html`: the verdict, every proof, and the shrunk settings."""

from collections.abc import Sequence

from jaxtrain.analysis.verify.report import Report, proof_table, show_end, show_small
from jaxtrain.config.writer import changes
from jaxtrain.run.show.html.page import (
    Recorder,
    Tile,
    document,
    element,
    sections,
    settings,
    tiles,
    verdict,
)
from jaxtrain.run.show.progress import print_lines
from jaxtrain.training.settings import Config

_READS = (
    "A proof runs the configuration, shrunk, on 8 simulated devices and compares it with the same "
    "training on one. It is proved if the largest difference is within the limit; a limit of 0 is "
    "bit for bit. Nothing was measured on an accelerator."
)


def verify_page(report: Report, config: Config, name: str, words: Sequence[str] = ()) -> bytes:
    """Return the HTML page of a verification.

    Args:
      report: the report with all proofs.
      config: the user's configuration, before shrinking.
      name: the name of the configuration.
      words: the arguments of the command line.
    """
    count = {"proved": 0, "FAILED": 0, "not checked": 0}
    for proof in report.proofs:
        count[proof.verdict] += 1
    found, tone = "Everything that was checked is proved", "good"
    if count["FAILED"]:
        found, tone = f"{count['FAILED']} of {len(report.proofs)} proofs failed", "bad"
    elif not count["proved"]:
        found, tone = "Nothing was checked", "unsure"
    figures = [
        Tile("Proved", count["proved"], str(count["proved"])),
        Tile("Failed", count["FAILED"], str(count["FAILED"])),
        Tile("Not checked", count["not checked"], str(count["not checked"])),
        Tile("Took", report.seconds, f"{report.seconds:.0f} s"),
    ]
    proofs, small = Recorder(), Recorder()
    proofs.print(proof_table(report.proofs))
    show_end(proofs, report)
    show_small(small, report.small)
    print_lines(small, *config.notes)
    return document(
        f"{name}: proofs",
        verdict(found, tone),
        tiles(figures),
        element("h2", "Proofs"),
        sections(proofs.blocks),
        element("h2", "What ran in its place"),
        element("p", "The configuration was shrunk to sizes that run in seconds:"),
        sections(f"- {line}" for line in small.blocks),
        settings(changes(config)),
        words=words,
        reads=_READS,
    )
