"""The cycles that a TPU's own compiler expects of a step, and which collectives hide behind it.

    python -m benchmarks.tpu_cycles [--row llama_1b] [--target v5p:2x2x1]
                                    [--also BINDINGS] [--flags NAME=VALUE,...]

libtpu writes what it expects of every operation into the program it makes (`estimated_cycles`), so
that settings and flags can be compared without a TPU (`libtpu`, jaxtrain's extra `[tpu]`, compiles
for any). Of products it expects what data sheets promise; elementwise work it counts about twice,
collectives and hand-written kernels not at all: see benchmarks/RESULTS.md.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.compilation import xla_options
from jaxtrain.planning.compiled import lower, planned_layout
from jaxtrain.planning.hlo import Instruction, Module, parse
from jaxtrain.planning.targets import Target, parse_target
from jaxtrain.profiling.costs import CONTAINERS, costs
from jaxtrain.settings import load_config

# bfloat16 FLOPs of a device's matrix units in one cycle: 128 x 128 multiply-adds each, 256 x 256
# from v6e on. With the published peaks that makes clocks of 1.05, 1.5, 1.75, 1.75 and 2.2 GHz.
PEAK = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "7x": 2**19}
_TEXT = ("SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False")
_ROWS_A_CHIP = {"gpt2_124m": 16, "llama_1b": 4, "llama_8b": 2, "resnet50_imagenet": 256}
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass
class Step:
    """What the compiler expects of one run of a program, on one device.

    Attributes:
      products: cycles of the operations that multiply matrices, with all that is fused into them.
      rest: cycles of all others that it says anything of.
      flops: of `products`.
      waits: collectives that nothing else runs beside.
      waits_bytes: of their results.
      kernels: hand-written kernels, of which it says nothing.
    """

    products: int = 0
    rest: int = 0
    flops: int = 0
    waits: int = 0
    waits_bytes: int = 0
    kernels: int = 0


def expected(text: str) -> Step:
    """The compiler's expectation, read from `compiled.as_text()` of a TPU's program.

    Raises:
      ValueError: a loop does not say how often it turns.
    """
    module = parse(text)
    of_one, step = costs(module), Step()
    for one, runs in _operations(module):
        estimate, cost = _ESTIMATE.search(one.attributes), of_one.get(one.name)
        if estimate is None:
            if _waits(module, one):
                step.waits += runs
                step.waits_bytes += runs * sum(tensor.bytes for tensor in one.tensors)
            step.kernels += runs * ('"tpu_custom_call"' in one.attributes)
        elif cost is not None and cost.flops:
            step.products += runs * int(estimate.group(1))
            step.flops += runs * cost.flops
        else:
            step.rest += runs * int(estimate.group(1))
    return step


def _operations(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Every operation that runs by itself, and how often."""
    waiting = [(module.entry, 1)]
    while waiting:
        name, runs = waiting.pop()
        for one in module.computations[name].instructions.values():
            if one.opcode not in CONTAINERS:
                yield one, runs
                continue
            turns = module.trip_count(one) if one.opcode == "while" else 1
            if turns is None:
                raise ValueError(f"the program does not say how often {one.name} turns")
            waiting += [(body, runs * turns) for body in one.called]


def _waits(module: Module, one: Instruction) -> bool:
    """Whether it is a collective that starts and ends in one operation and computes nothing."""
    if one.opcode in _COLLECTIVES:
        return True
    # An all-reduce of which each device keeps its part.
    return one.opcode == "fusion" and any(
        name.startswith("all-reduce-scatter") for name in one.called
    )


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
    seconds, step = time.perf_counter() - begin, expected(compiled.as_text() or "")
    share = step.flops / PEAK[target.chip.name] / max(step.products, 1)
    stats: Any = compiled.memory_analysis()
    return [
        f"{(step.products + step.rest) / 1e6:.1f}", f"{step.products / 1e6:.1f}", f"{share:.1%}",
        f"{step.rest / 1e6:.1f}", str(step.kernels), str(step.waits),
        f"{step.waits_bytes / 1e9:.2f}", f"{stats.temp_size_in_bytes / 1e9:.2f}", f"{seconds:.0f}",
    ]  # fmt: skip


def main() -> None:
    """Compiles every target and setting, as in short and in long runs, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", choices=list(_ROWS_A_CHIP), default="llama_1b")
    parser.add_argument("--target", action="append", help="a TPU slice; may be repeated")
    parser.add_argument("--also", action="append", default=[], help="bindings joined by ';'")
    parser.add_argument("--flags", action="append", default=[], help="XLA's, joined by ','")
    options = parser.parse_args()
    table = Table(
        "", "Mcycles", "products", "of peak", "the rest", "kernels", "waits", "GB waited for",
        "temporaries, GB", "compiling, s", title=options.row,
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
            lowered = lower(config, planned_layout(config, target))
            kind = target.chip.device_kinds[0]
            sets = {"": {}, "long run": xla_options("tpu", 10**9, kind)}
            sets |= {f: dict(one.split("=") for one in f.split(",")) for f in options.flags}
            for name, chosen in sets.items():
                label = " ".join(part for part in (target.name, bindings, name) if part)
                table.add_row(label, *_columns(lowered, chosen, target))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
