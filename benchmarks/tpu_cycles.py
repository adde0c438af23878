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
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.compiled.collectives import KINDS, collectives
from jaxtrain.analysis.planning.compiled.compiled import lower, planned_layout
from jaxtrain.analysis.planning.compiled.hlo import Instruction, Module, parse
from jaxtrain.analysis.planning.machines.targets import Target, parse_target
from jaxtrain.analysis.planning.textbook.formulas import wire_bytes
from jaxtrain.analysis.profiling.costs import CONTAINERS, Cost, costs
from jaxtrain.parallel.compilation import xla_options
from jaxtrain.training.settings import load_config

# bfloat16 FLOPs of a device's matrix units in one cycle: 128 x 128 multiply-adds each, 256 x 256
# from v6e on. With the published peaks that makes clocks of 1.05, 1.5, 1.75, 1.75 and 2.2 GHz.
PEAK = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "7x": 2**19}
_TEXT = ("SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False")
_ROWS_A_CHIP = {"gpt2_124m": 16, "llama_1b": 4, "llama_8b": 2, "resnet50_imagenet": 256}
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass
class Step:
    """What the compiler expects of one run of a program, on one device.

    Attributes:
      products: cycles of the operations that multiply matrices, with all that is fused into them.
      rest: cycles of all others that it says anything of.
      flops: of `products`.
      waits: collectives that nothing else runs beside.
      waits_bytes: of their results.
      waited: cycles that these take, and others longer than what runs beside them: by what is sent,
        over one ring of links, both ways round.
      kernels: hand-written kernels, of which it says nothing.
    """

    products: int = 0
    rest: int = 0
    flops: int = 0
    waits: int = 0
    waits_bytes: int = 0
    waited: int = 0
    kernels: int = 0


def expected(text: str, target: Target) -> Step:
    """The compiler's expectation, read from `compiled.as_text()` of a TPU's program.

    Raises:
      ValueError: a loop does not say how often it turns.
    """
    module = parse(text)
    walk = _Walk(module, costs(module), _launches(text, target))
    walk.run(module.entry, module.entry, 1)
    return walk.step


def _launches(text: str, target: Target) -> dict[str, int]:
    """Where a program launches a collective -> the cycles that the links need for it."""
    chip, devices = target.chip, target.devices
    assert chip.bf16_flops is not None
    assert chip.link_bandwidth is not None
    cycles_a_byte = chip.bf16_flops / PEAK[chip.name] / (2 * chip.link_bandwidth)
    found: dict[str, int] = {}
    for one in collectives(text, {"all": devices}):
        sent = wire_bytes(one.kind, one.bytes, devices)
        found[one.launch] = found.get(one.launch, 0) + round(sent * cycles_a_byte)
    return found


@dataclasses.dataclass
class _Walk:
    """Goes through a program in its order, with the time at which the links are free again."""

    module: Module
    of_one: dict[str, Cost]
    launches: dict[str, int]
    step: Step = dataclasses.field(default_factory=Step)

    def run(self, name: str, path: str, runs: int) -> int:
        """Cycles of one run of a computation that runs so often; counts them in `step`."""
        now = free = 0
        ends: dict[str, int] = {}
        held: dict[str, int] = {}
        for one in self.module.computations[name].instructions.values():
            here, estimate = f"{path}/{one.name}", ESTIMATE.search(one.attributes)
            if one.opcode.endswith(("-start", "-update")):
                cycles = self._links(here) + sum(held.pop(of, 0) for of in one.operands)
                if not one.operands:  # what is moved comes with the update
                    held[one.name] = cycles
                elif cycles:  # a copy has none
                    free = ends[one.name] = max(now, free) + cycles
            elif one.opcode.endswith("-done"):
                end = max([now, *(ends.get(operand, 0) for operand in one.operands)])
                self.step.waited += runs * (end - now)
                now = end
            elif one.opcode in CONTAINERS:
                turns = self.module.trip_count(one) if one.opcode == "while" else 1
                if turns is None:
                    raise ValueError(f"the program does not say how often {one.name} turns")
                now += turns * sum(self.run(body, here, runs * turns) for body in one.called)
            elif estimate is not None:
                now += int(estimate.group(1))
                self._count(one, runs * int(estimate.group(1)), runs)
            else:
                self.step.kernels += runs * ('"tpu_custom_call"' in one.attributes)
                if _waits(one):
                    self.step.waits += runs
                    self.step.waits_bytes += runs * sum(tensor.bytes for tensor in one.tensors)
                    free = max(now, free) + self._links(here)
                    self.step.waited += runs * (free - now)
                    now = free
        return now

    def _links(self, here: str) -> int:
        """Cycles of the links for what an operation launches itself, or in what it calls."""
        return sum(
            cycles
            for launch, cycles in self.launches.items()
            if launch == here or launch.startswith(f"{here}/")
        )

    def _count(self, one: Instruction, cycles: int, runs: int) -> None:
        cost = self.of_one.get(one.name)
        if cost is not None and cost.flops:
            self.step.products += cycles
            self.step.flops += runs * cost.flops
        else:
            self.step.rest += cycles


def _waits(one: Instruction) -> bool:
    """Whether it is a collective that starts and ends in one operation and computes nothing."""
    if one.opcode in KINDS:
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
            lowered = lower(config, planned_layout(config, target))
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
