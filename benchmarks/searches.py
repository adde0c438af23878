"""Holds `plan --search` against published layouts: `python -m benchmarks.searches`.

Each published run that `CASES` names is searched anew, on its machine with its model
and batch, and the best that fits is held against the layout that was published, both predicted by
the same closed forms.
"""

import csv
import dataclasses
import shlex
import time

import jax
from rich.console import Console

from benchmarks.published_memory import FILES
from jaxtrain import load_config
from jaxtrain.analysis.planning.machines.targets import Target, parse_target
from jaxtrain.analysis.planning.search.candidates import Candidate, Found
from jaxtrain.analysis.planning.search.search import price, search
from jaxtrain.analysis.planning.search.variants import apply_changes
from jaxtrain.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Case:
    """A published run to search anew.

    Attributes:
      machine: the model and how many chips of which kind.
      layout: what was published.
      name: of its row.
      target: another size of its machine; None: its own.
      more: bindings over the row's.
    """

    machine: str
    layout: str
    name: str
    target: str | None = None
    more: tuple[str, ...] = ()

    def read(self) -> tuple[Config, Target]:
        """The published layout and its machine."""
        rows = {row["id"]: row for file in FILES for row in csv.DictReader(file.open(newline=""))}
        config, *words = shlex.split(rows[self.name]["bindings"])
        bindings = [word for flag, word in zip(words, words[1:], strict=False) if flag == "-b"]
        machine = self.target or words[words.index("--target") + 1]
        return load_config(config, [*bindings, *self.more]), parse_target(machine)


CASES = (
    Case("70B on 64 H100", "NeMo, TP4 PP4 CP2 VP5", "h100-nemo-70b-64"),
    Case("Llama 2 70B on 64 H100", "MaxText, fsdp=64", "h100-mt-l2-70b-64"),
    Case("Mixtral 8x7B on 64 H100", "Megatron-Core, EP8 PP4 VP8", "h100-mcore-mix8x7-64"),
    # AXLearn's, of 512 chips, on half of them with half of the batch.
    Case(
        "70B on 256 v5p", "AXLearn, fsdp", "v5p-fuji70b-512", "v5p:4x8x8",
        ("Mesh.fsdp=256", "Train.global_batch_size=512"),
    ),
    # NeMo's of 128 GPUs, eight times, in bfloat16.
    Case(
        "405B on 1,024 B200", "NeMo, TP4 PP8 CP2 VP8", "b200-nemo-405b-128-fp8", "b200:128x8",
        ("Mesh.fsdp=16", "Train.global_batch_size=512", "Precision.matmul='compute'"),
    ),
    Case("8B on 8 H100", "NeMo, CP2", "h100-nemo-8b-8"),
    Case("70B on 128 v6e", "MaxText, fsdp", "v6e-70b-128"),
    Case("Mixtral 8x22B on 256 v6e", "MaxText, fsdp", "v6e-mix8x22-256"),
    Case("Gemma 3 12B on 256 v6e", "MaxText, fsdp", "v6e-gemma12b-256"),
    Case("DeepSeek-V3 on 256 H100", "Automodel, EP64 PP4", "am-h100-ds3-256"),
)  # fmt: skip


def searched(case: Case, share: float = 0.0) -> tuple[Found, Candidate, float]:
    """What is found, its fastest, and that over the published layout's time.

    The search ends with the first layout of no more than `share` of that time, since what the
    whole search finds is no slower.
    """
    config, machine = case.read()
    # Other stacks make their logits at once.
    published = price(apply_changes(config, {"Loss.chunk_size": None}), machine)
    found = search(config, machine, enough=share * published.seconds)
    best = min(found.candidates, key=lambda one: one.price.seconds)
    return found, best, best.price.seconds / published.seconds


def main() -> None:
    """Prints the rows of benchmarks/history/searches.md, with the bindings of what was found."""
    say = Console(width=120, highlight=False).out
    jax.config.update("jax_platforms", "cpu")
    say("| model, machine | published layout | best found, of its time | layouts tried | seconds |")
    say("|---|---|---|---|---|")
    for case in CASES:
        begun = time.process_time()
        found, best, share = searched(case)
        seconds = time.process_time() - begun
        say(f"| {case.machine} | {case.layout} | {share:.2f} | {found.priced:,} | {seconds:.0f} |")
        say(f"  found: {' '.join(best.bindings)}")


if __name__ == "__main__":
    main()
