"""The cycles that a TPU's own compiler expects of a step, and which collectives hide behind it.

    python -m benchmarks.tpu_cycles [--row llama_1b] [--target v5p:2x2x1]
                                    [--also BINDINGS] [--flags NAME=VALUE,...]

libtpu writes what it expects of every operation into the program it makes (`estimated_cycles`), so
that settings and flags can be compared without a TPU (`libtpu`, jaxtrain's extra `[tpu]`, compiles
for any). Of products it expects what data sheets promise; elementwise work it counts about twice,
collectives and hand-written kernels not at all: see benchmarks/RESULTS.md.
"""

import argparse
import re
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.compiled.collectives import Collective, collectives
from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.compiled.costs import Cost
from jaxtrain.analysis.planning.compiled.hlo import Instruction
from jaxtrain.analysis.planning.compiled.schedule import ESTIMATE, PEAK, Scheduled, by_launch, walk
from jaxtrain.analysis.planning.machines.targets import Target, parse_target
from jaxtrain.analysis.planning.textbook.formulas import wire_bytes
from jaxtrain.parallel.compilation import xla_options
from jaxtrain.training.settings import load_config

_TEXT = ("SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False")
_ROWS_A_CHIP = {"gpt2_124m": 16, "llama_1b": 4, "llama_8b": 2, "resnet50_imagenet": 256}


def expected(text: str, target: Target) -> Scheduled:
    """The compiler's expectation in cycles, read from `compiled.as_text()` of a TPU's program.

    What waits is counted by what is sent, over one ring of links, both ways round.

    Raises:
      ValueError: a loop does not say how often it turns.
    """
    chip, devices = target.chip, target.devices
    assert chip.bf16_flops is not None
    assert chip.link_bandwidth is not None
    cycles_a_byte = chip.bf16_flops / PEAK[chip.name] / (2 * chip.link_bandwidth)

    def sent(one: Collective) -> float:
        return round(wire_bytes(one.kind, one.bytes, devices) * cycles_a_byte)

    return walk(text, _cycles, by_launch(collectives(text, {"all": devices}), sent))


def _cycles(one: Instruction, _: Cost | None) -> float | None:
    estimate = ESTIMATE.search(one.attributes)
    return None if estimate is None else int(estimate.group(1))


def planned(name: str, target: Target) -> list[str]:
    """Bindings: as many rows a chip as the table says, in one microbatch, sharded over all."""
    rows = _ROWS_A_CHIP[name] * target.devices
    own = [f"Train.global_batch_size = {rows}", "Train.accumulation = 1"]
    return own if name.startswith("resnet") else [*_TEXT, *own]


def _columns(lowered: jax.stages.Lowered, options: Any, target: Target) -> list[str]:
    """The table's row of one compiled step."""
    begin = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:  # the other rows are worth having
        return ["refused", str(error).splitlines()[0]]
    seconds, step = time.perf_counter() - begin, expected(compiled.as_text() or "", target)
    share = step.flops / PEAK[target.chip.name] / max(step.products, 1)
    stats: Any = compiled.memory_analysis()
    return [
        f"{(step.products + step.rest) / 1e6:.1f}", f"{step.products / 1e6:.1f}", f"{share:.1%}",
        f"{step.rest / 1e6:.1f}", str(step.kernels), str(step.waits),
        f"{step.waits_bytes / 1e9:.2f}", f"{step.waited / 1e6:.1f}",
        f"{stats.temp_size_in_bytes / 1e9:.2f}", f"{seconds:.0f}",
    ]  # fmt: skip


def main() -> None:
    """Compiles each target and setting with libtpu's own options and with ours; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", choices=list(_ROWS_A_CHIP), default="llama_1b")
    parser.add_argument("--target", action="append", help="a TPU slice; may be repeated")
    parser.add_argument("--also", action="append", default=[], help="bindings joined by ';'")
    parser.add_argument("--flags", action="append", default=[], help="XLA's, joined by ','")
    options = parser.parse_args()
    table = Table(
        "", "Mcycles", "products", "of peak", "the rest", "kernels", "waits", "GB waited for",
        "Mcycles waited", "temporaries, GB", "compiling, s", title=options.row,
    )  # fmt: skip
    for flags in options.flags:
        if not all(re.fullmatch(r"\w+=[^=]+", one) for one in flags.split(",")):
            parser.error(f"--flags {flags}: write NAME=VALUE, joined by ','")
    for target in map(parse_target, options.target or ["v5p:2x2x1"]):
        if target.chip.name not in PEAK:
            parser.error(f"--target {target.name}: not a TPU (there are {', '.join(PEAK)})")
        for bindings in ["", *options.also]:
            more = [one for one in bindings.split(";") if one.strip()]
            config = load_config(options.row, [*planned(options.row, target), *more])
            lowered = lower(config, target_layout(config, target))
            kind = target.chip.device_kinds[0]
            sets = {"": {}}
            if ours := xla_options("tpu", kind=kind):
                sets["ours"] = ours
            sets["ours, long run"] = xla_options("tpu", 10**9, kind)
            sets |= {f: dict(one.split("=") for one in f.split(",")) for f in options.flags}
            for name, chosen in sets.items():
                label = " ".join(part for part in (target.name, bindings, name) if part)
                table.add_row(label, *_columns(lowered, chosen, target))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
