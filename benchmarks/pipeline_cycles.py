"""How long a pipeline's step takes in lockstep, by the cycles that a TPU's own compiler expects.

    python -m benchmarks.pipeline_cycles [--target v5e:2x2] [--schedule zero_bubble] [--width 512]

A step is compiled for a slice that is not there. What its compiler expects of a stage's forward and
backward goes into the schedule's table: every tick lasts as long as its longest action, and as all
that every rank does between two actions (it finds inputs, puts away what arrived). Beside it stands
the asynchronous ideal of the schedule's paper, from the same cycles of the actions alone.
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.compiled.costs import CONTAINERS
from jaxtrain.analysis.planning.compiled.hlo import Instruction, Module, parse
from jaxtrain.analysis.planning.compiled.schedule import ESTIMATE, PEAK
from jaxtrain.analysis.planning.machines.targets import Target, parse_target
from jaxtrain.analysis.planning.timing.timeline import simulate
from jaxtrain.parallel.compilation import xla_options
from jaxtrain.training.pipeline.schedules import SCHEDULES
from jaxtrain.training.pipeline.timetables import Timetable, Work, make_schedule
from jaxtrain.training.settings import load_config

_ACTION = re.compile(r'op_name="[^"]*/closed_call/stage/cond"')
_COSTS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.BACKWARD_INPUT: "backward_input",
    Work.BACKWARD_WEIGHT: "backward_weight",
}


@dataclasses.dataclass(frozen=True)
class Tick:
    """Cycles of one tick, as the compiler expects them.

    Attributes:
      actions: of what a rank may do in it; where only some ranks do a part (embedding, loss), with
        that part.
      between: of what every rank does in every tick, sends aside.
    """

    actions: Mapping[Work, int]
    between: int

    def lockstep(self, schedule: Timetable) -> int:
        """Cycles of all ticks of a schedule."""
        return sum(
            self.between + max(self.actions[Work.IDLE if a is None else a.kind] for a in row)
            for row in schedule.ticks
        )

    def ideal(self, schedule: Timetable) -> float:
        """Cycles of the paper's schedule: actions alone, ranks that go on each by itself."""
        p, m, v = schedule.ranks, schedule.microbatches, schedule.virtual_stages
        if any(action.kind == Work.BACKWARD_INPUT for _, _, action in schedule.actions()):
            forward, first, second = (
                self.actions[kind]
                for kind in (Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
            )
            # DualPipe's (F&B + B - 3W) with F + B for F&B (arXiv 2412.19437, table 2).
            bubble = forward + (2 if schedule.folded else 1) * first - second
            return v * m * (forward + first + second) + (p - 1) * bubble
        return (v * m + p - 1) * (self.actions[Work.FORWARD] + self.actions[Work.BACKWARD])


def tick_of(text: str, schedule: Timetable) -> Tick:
    """The cycles of a pipeline's tick, read from `compiled.as_text()` of a TPU's program."""
    module = parse(text)
    ((body, stage),) = (
        (inside.name, one)
        for inside in module.computations.values()
        for one in inside.instructions.values()
        if one.opcode == "conditional" and _ACTION.search(one.attributes)
    )
    kinds = sorted({Work.IDLE} | {action.kind for _, _, action in schedule.actions()})
    assert len(kinds) == len(stage.called), "a branch for each kind of action"
    actions = {k: _cycles(module, name) for k, name in zip(kinds, stage.called, strict=True)}
    return Tick(actions, _cycles(module, body) - max(actions.values()))


def _cycles(module: Module, name: str) -> int:
    """Of a computation, of conditionals the most expensive branch."""

    def one(instruction: Instruction) -> int:
        if instruction.opcode == "conditional":
            return max(_cycles(module, called) for called in instruction.called)
        if instruction.opcode in CONTAINERS:
            turns = module.trip_count(instruction) if instruction.opcode == "while" else 1
            assert turns is not None, f"the program says how often {instruction.name} turns"
            return turns * sum(_cycles(module, called) for called in instruction.called)
        estimate = ESTIMATE.search(instruction.attributes)
        return 0 if estimate is None else int(estimate.group(1))

    return sum(map(one, module.computations[name].instructions.values()))


def _compiled(schedule: str, target: Target, width: int, backward: str) -> str:
    """The program of a Llama of this width, two layers and eight rows of 256 tokens a stage."""
    ranks, virtual = target.devices, _chunks(schedule)
    heads = max(width // 128, 1)
    config = load_config(
        "llama_1b",
        [
            "SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False",
            "TextData.sequence_length = 256", "Llama.context_length = 256",
            "Llama.vocab_size = 256", f"Llama.embed_dim = {width}", f"Llama.num_heads = {heads}",
            f"Llama.num_kv_heads = {heads}", f"Llama.mlp_dim = {4 * width}",
            f"Llama.num_layers = {2 * ranks}", "Attention.kernel = 'xla'", "Mesh.fsdp = 1",
            f"Mesh.pipe = {ranks}", f"Pipeline.schedule = '{schedule}'",
            f"Pipeline.virtual_stages = {virtual}", f"Pipeline.backward = '{backward}'",
            f"Pipeline.microbatches = {4 * ranks}", "Train.accumulation = 1",
            f"Train.global_batch_size = {32 * ranks}",
        ],
    )  # fmt: skip
    lowered = lower(config, target_layout(config, target))
    return lowered.compile(xla_options("tpu", kind=target.chip.device_kinds[0])).as_text() or ""


def _chunks(schedule: str) -> int:
    return 2 if schedule in ("interleaved", "dualpipe_v") else 1


def main() -> None:
    """Compiles a small Llama for each schedule; prints its cycles beside the ideal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="v5e:2x2", help="a TPU slice; all its chips are ranks")
    parser.add_argument("--schedule", action="append", choices=SCHEDULES)
    parser.add_argument("--backward", choices=("recompute", "residuals"), default="recompute")
    parser.add_argument("--width", type=int, default=1024, help="embed_dim, a multiple of 128")
    options = parser.parse_args()
    target = parse_target(options.target)
    if target.chip.name not in PEAK:
        parser.error(f"--target {target.name}: not a TPU (there are {', '.join(PEAK)})")
    table = Table(
        "schedule", "m", "kcycles of actions", "between", "Mcycles in lockstep", "ideal", "ratio",
        "ratio without between", title=f"{target.name}, width {options.width}",
    )  # fmt: skip
    for name in options.schedule or SCHEDULES:
        chunks = _chunks(name)
        text = _compiled(name, target, options.width, options.backward)
        for times in (2, 4, 8):
            schedule = make_schedule(
                name,
                ranks=target.devices,
                microbatches=times * target.devices,
                virtual_stages=chunks,
            )
            tick = tick_of(text, schedule)
            costs = {_COSTS[kind]: tick.actions[kind] for kind in _COSTS if kind in tick.actions}
            simulated = simulate(schedule, lockstep=True, **costs).makespan
            found, ideal = tick.lockstep(schedule), tick.ideal(schedule)
            table.add_row(
                name, str(schedule.microbatches),
                " ".join(f"{cost / 1e3:.0f}" for kind, cost in tick.actions.items() if kind),
                f"{tick.between / 1e3:.0f}", f"{found / 1e6:.2f}", f"{ideal / 1e6:.2f}",
                f"{found / ideal:.3f}", f"{simulated / ideal:.3f}",
            )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
