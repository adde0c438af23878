"""Holds `plan`'s memory against published runs: `python -m benchmarks.published_memory`.

Every run of the files of `benchmarks.predictions` ran. `published_memory.csv` says of some what
their sources state of memory and the bindings there, written for the step time, do not. Each line
has its source, and none of it changes a predicted step time:

- `gib`: the peak, in GiB of one device.
- `device`: a device's memory over that of the target's chip.
- `bindings`: what a layer keeps, on the device or on its host; dtypes of parameters and sums.
- `repeated`: the part of the layers that is repeated, the others keeping what they make.
- `offloaded`: the part of the activations that is in host memory.
- `first_moment`: the dtype of Adam's first moment, if the second has that of the parameters.
- `logits`: bytes of each logit in the loss; 'whole': all of them on every device of `tensor`.
- `sums`: 'float32' where whole gradients are summed so, 'whole' with the weights gathered too.

Two questions are asked. Does `plan` say that this program would fit, laid out as the run was? And
does the run fit by the same closed forms as its stack allocates (`allocate_as_stack`)? Programs may
have 94 % of a GPU, as published stacks have: PyTorch takes what is there, and NVIDIA's recipes for
JAX set XLA_PYTHON_CLIENT_MEM_FRACTION=0.94 (NVIDIA/dgxc-benchmarking, maxtext/configure.sh).
"""

import argparse
import csv
import dataclasses
import functools
import itertools
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxtrain import load_config
from jaxtrain.analysis.planning.machines.targets import Target, most_memory, parse_target
from jaxtrain.analysis.planning.search.variants import slices_of
from jaxtrain.analysis.planning.textbook.memory import Memory, memory
from jaxtrain.config.errors import UserError
from jaxtrain.parallel import chips
from jaxtrain.training import layouts
from jaxtrain.training.settings import Config

FILES = tuple(
    Path(__file__).with_name(name)
    for name in ("published_runs.csv", "held_out_runs.csv", "blind_runs.csv")
)
STATED = Path(__file__).with_name("published_memory.csv")

# These stacks make the logits of a sequence at once.
AT_ONCE = ("Loss.chunk_size = None",)
# ZeRO 1 of GPU stacks (Megatron's distributed optimizer, Apex's, DeepSpeed's, llm.c's) shards the
# float32 masters: docs.nvidia.com/megatron-core, "Distributed Optimizer".
_SHARDED = "Sharding.masters = 'sharded'"
# Their performance recipes reduce gradients in bfloat16: NVIDIA/dgxc-benchmarking,
# nemo_megatron/gpt3_175b_hydra.yaml and nemotron4-340b-synth.yaml (optim.grad_sync_dtype: bf16);
# NVIDIA-NeMo/Megatron-Bridge, the performance configurations (ddp.grad_reduce_in_fp32 = False).
_SHORT_SUMS = {"NeMo", "Megatron-Bridge"}
GIB = 2**30
# Stacks that add a microbatch's gradients to the sum where they are made: autograd's `.grad`, and
# Megatron's main_grad (gradient_accumulation_fusion). Our pipelines have those of a stage beside
# the sum; without a pipeline the loop over layers adds them in place too.
_ADD_IN_PLACE = {
    "Automodel", "KempnerForge", "Llama 3", "Megatron-Bridge", "Megatron-LM", "NeMo", "fms-fsdp",
    "lit-gpt", "llm-foundry", "llm.c", "nanoGPT", "torchtitan",
}  # fmt: skip
# PyTorch's FSDP casts the weights of a layer as it gathers them. Ours keeps a copy of all.
_CAST_BY_LAYER = {
    "Automodel", "KempnerForge", "fms-fsdp", "lit-gpt", "llm-foundry", "torchtitan",
}  # fmt: skip
# Under sequence parallelism each of Megatron's tensor ranks has copies of a part of the tokens, and
# whole experts. Here every tensor rank has all copies.
_SPLITS_COPIES = {"Megatron-Bridge", "Megatron-LM"}
# torchtitan's FSDP splits weights over the ranks of a sequence too (docs/fsdp.md, dp_shard_cp).
_SPLITS_OVER_CONTEXT = {"torchtitan"}
_OF_WEIGHTS = ("parameters", "optimizer", "gradients", "parameters in the compute dtype")
# CUDA's context, which nvidia-smi counts: 1,573 MiB on an A100, by BLOOM's chronicles.
_CONTEXT = 1573 * 2**20
# Written of rows whose MLP has two matrices and whose model here has three.
_STAND_IN = "as 3 of two thirds the width"


def as_its_stack(row: dict[str, str]) -> list[str]:
    """Bindings that a run's stack implies beyond those of its row."""
    if "Sharding.zero=1" not in row["bindings"] or chips.CHIPS[row["chip"]].kind != "gpu":
        return []
    return [_SHARDED, *["Precision.gradients = 'bfloat16'"] * (row["stack"] in _SHORT_SUMS)]


def parse_bindings(words: str) -> list[str]:
    """The bindings among arguments of `jaxtrain plan`."""
    split = shlex.split(words)
    return [word for flag, word in zip(split, split[1:], strict=False) if flag == "-b"]


@functools.cache
def statements() -> dict[str, dict[str, str]]:
    """The lines of `published_memory.csv`, by id."""
    with STATED.open(newline="") as stream:
        return {row["id"]: row for row in csv.DictReader(stream)}


@dataclasses.dataclass(frozen=True)
class Held:
    """A published run's memory, in bytes of one device.

    Attributes:
      name: its id.
      stack, family, chip: of the run.
      layout: 'zero 1' of GPUs, whose masters are sharded, or 'other'.
      needed: by closed forms, of this program.
      parts: of it.
      allocated: by closed forms, as the stack allocates.
      room: that programs have by default.
      most: that they have at Train.gpu_memory_fraction=0.94, as the published stacks have.
      published: the peak that the source states; None: it states none.
    """

    name: str
    stack: str
    family: str
    chip: str
    layout: str
    needed: int
    parts: dict[str, int]
    allocated: int
    room: int
    most: int
    published: int | None

    @property
    def kind(self) -> str:
        """Of its chip: "tpu" or "gpu"."""
        return chips.CHIPS[self.chip].kind


def read_memory(row: dict[str, str]) -> Held:
    """Return the memory of a row of a file.

    Raises:
      UserError: this program cannot run what was published.
    """
    name, *words = shlex.split(row["bindings"])
    options = dict(itertools.pairwise(words))
    network = float(options["--network"]) if "--network" in options else None
    machine = parse_target(options["--target"], network=network)
    more = statements().get(row["id"], {})
    implied = as_its_stack(row)
    bindings = [*parse_bindings(row["bindings"]), *implied]
    config = load_config(name, [*AT_ONCE, *bindings, *parse_bindings(more.get("bindings", ""))])
    found = _estimate(config, machine)
    parts = parts_of(found)
    if more.get("repeated"):
        parts = _mixed(config, machine, float(more["repeated"]))
    parts = as_published(row, parts, more)
    needed = sum(parts.values())
    room = machine.chip.hbm_bytes or 0
    most = most_memory(machine) or room
    scale = float(more.get("device") or 1)
    return Held(
        row["id"], row["stack"], row["family"], row["chip"], "zero 1" if implied else "other",
        needed, parts, allocate_as_stack(row, config, machine, parts, more, found.logits),
        round(scale * room), round(scale * most),
        round(float(more["gib"]) * GIB) if more.get("gib") else None,
    )  # fmt: skip


def _estimate(config: Config, machine: Target) -> Memory:
    layout = layouts.abstract_layout(config, machine.devices * slices_of(config, machine))
    return memory(config, layout, machine.chip.kind)


def parts_of(found: Memory) -> dict[str, int]:
    """All parts of an estimate, in bytes of one device."""
    held = found.arguments
    return {
        "parameters": held.params, "optimizer": held.optimizer, "batch": held.other,
        "gradients": found.gradients, **found.parts,
    }  # fmt: skip


def _mixed(config: Config, machine: Target, repeated: float) -> dict[str, int]:
    """The parts of a run that repeats a part of its layers and keeps what the others make."""

    def with_policy(policy: str) -> dict[str, int]:
        remat = dataclasses.replace(config.remat, policy=policy)
        return parts_of(_estimate(dataclasses.replace(config, remat=remat), machine))

    some, every = with_policy("full"), with_policy("elementwise")
    return {
        name: round(repeated * some.get(name, 0) + (1 - repeated) * every.get(name, 0))
        for name in {**some, **every}
    }


def as_published(
    row: dict[str, str], parts: dict[str, int], more: dict[str, str]
) -> dict[str, int]:
    """Return the parts of an estimate with what the run's source states and no binding expresses.

    That is a part of the layers whose activations are offloaded, Adam's first moment in bfloat16,
    and an MLP of two matrices, which has one wide activation in place of two.

    Args:
      row: of a file.
      parts: the estimate's.
      more: the line of `published_memory.csv`.
    """
    kept = 1 - float(more.get("offloaded") or 0)
    scale = {name: kept for name in parts if name.startswith("activations")}
    if more.get("first_moment"):
        scale["optimizer"] = 3 / 4  # of two moments of 4 bytes one has 2
    if _STAND_IN in row["notes"]:
        # Gate and up of two thirds the width each, for one of the whole width.
        scale["activations: mlp"] = scale.get("activations: mlp", 1.0) * 3 / 4
        scale["one layer's backward pass"] = 4 / 5
    return {name: round(scale.get(name, 1.0) * size) for name, size in parts.items()}


# Parts by the phase in which they are alive; all others are alive all the time.
_OF_THE_HEAD = ("hidden states of the head", "logits", "collective buffers: embedding")
_OF_A_LAYER = ("one layer's", "collective buffers: one layer's")


def allocate_as_stack(
    row: dict[str, str],
    config: Config,
    machine: Target,
    parts: dict[str, int],
    more: dict[str, str],
    logits: int,
) -> int:
    """Bytes of a run as its stack allocates them, where that is known to differ from this program.

    Args:
      row: of a file.
      config: of the memory's estimate.
      machine: the target.
      parts: the estimate's.
      more: the line of `published_memory.csv`.
      logits: of one microbatch on a device.
    """
    parts, stack = dict(parts), row["stack"]
    sizes = config.mesh.sizes(machine.devices * slices_of(config, machine))
    pipe, pipeline = sizes["pipe"], config.pipeline
    compute, summed, stored = (
        jax.numpy.dtype(name).itemsize
        for name in (config.precision.compute, config.precision.gradients, config.precision.params)
    )
    if stack in _ADD_IN_PLACE and pipe > 1:
        stages = pipeline.virtual_stages
        parts["gradients"] = parts["gradients"] * summed * stages // (summed * stages + compute)
    if stack in _CAST_BY_LAYER and config.sharding.zero == 3:
        parts["parameters in the compute dtype"] = 0
    if pipe > 1 and pipeline.schedule == "1f1b":
        # In lockstep twice as many microbatches wait, but for one.
        for name in parts:
            if name.startswith("activations"):
                parts[name] = round(pipe / (2 * pipe - 1) * parts[name])
    if stack in _SPLITS_COPIES and config.train.model.experts is not None:
        model: Any = config.train.model
        wide, narrow = model.embed_dim, getattr(model, "expert_mlp_dim", model.mlp_dim)
        inside = 2 * narrow / sizes["tensor"]
        share = (wide / sizes["tensor"] + inside) / (wide + inside)
        parts["activations: experts"] = round(share * parts.get("activations: experts", 0))
    if stack in _SPLITS_OVER_CONTEXT:
        parts |= {name: parts.get(name, 0) // sizes["context"] for name in _OF_WEIGHTS}
    own = parts["parameters"] // stored * (sizes["fsdp"] if config.sharding.zero == 3 else 1)
    if more.get("sums"):
        parts["gradients"] = 4 * own
    if more.get("sums") == "whole":
        parts["parameters in the compute dtype"] = compute * own
    head = sum(size for name, size in parts.items() if name.startswith(_OF_THE_HEAD))
    layer = sum(size for name, size in parts.items() if name.startswith(_OF_A_LAYER))
    always = sum(parts.values()) - head - layer
    if more.get("logits"):
        each, *whole = more["logits"].split()
        times = sizes["tensor"] if whole else 1
        head += logits * int(each) // compute * times - parts.get("logits", 0)
    return always + max(head, layer) + ("nvidia-smi" in more.get("source", "")) * _CONTEXT


def read_all(say: Callable[[str], None], start: str = "") -> list[Held]:
    """The rows of the three files whose ids start so; says which this program cannot run."""
    found = []
    for row in itertools.chain.from_iterable(map(_rows, FILES)):
        if not row["id"].startswith(start):
            continue
        try:
            found.append(read_memory(row))
        except (UserError, ValueError) as error:
            say(f"{row['id']}: not counted: {str(error).splitlines()[0][:120]}")
    return found


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


# -- the tables ------------------------------------------------------------------------------------


def unfit(points: Sequence[Held]) -> str:
    """Runs that ran and do not fit by the estimate, as Markdown."""
    lines = [
        "| chips | layout | runs | do not fit | nor at Train.gpu_memory_fraction=0.94 "
        "| nor as their stacks allocate |",
        "|---|---|---|---|---|---|",
    ]
    for kind, layout in (("tpu", "other"), ("gpu", "other"), ("gpu", "zero 1"), (None, None)):
        some = [p for p in points if kind is None or (p.kind, p.layout) == (kind, layout)]
        name = "all" if kind is None else kind.upper()
        lines.append(
            f"| {name} | {layout or ''} | {len(some)} | {sum(p.needed > p.room for p in some)} | "
            f"{sum(p.needed > p.most for p in some)} | {sum(p.allocated > p.most for p in some)} |"
        )
    return "\n".join(lines)


def against_peaks(points: Sequence[Held]) -> str:
    """Estimates over published peaks, stack by stack, as Markdown."""
    lines = [
        "| stack | runs with a peak | median estimate / published | as the stack allocates "
        "| within 15% | range |",
        "|---|---|---|---|---|---|",
    ]
    with_peak = [point for point in points if point.published]
    for stack in [*dict.fromkeys(point.stack for point in with_peak), None]:
        ours, ratios = (
            [size / (point.published or 1) for point, size in some]
            for some in zip(
                *(
                    ((point, point.needed), (point, point.allocated))
                    for point in with_peak
                    if stack in (None, point.stack)
                ),
                strict=True,
            )
        )
        within = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
        lines.append(
            f"| {stack or 'all'} | {len(ratios)} | {statistics.median(ours):.2f} | "
            f"{statistics.median(ratios):.2f} | {within} | {min(ratios):.2f}-{max(ratios):.2f} |"
        )
    return "\n".join(lines)


def each(points: Sequence[Held]) -> str:
    """Runs that do not fit at 0.94 and those with a peak, with their largest parts."""
    lines = [
        "| run | needs, GiB | as its stack | has | peak | needs / has | largest parts, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        if point.needed <= point.most and point.published is None:
            continue
        largest = sorted(point.parts.items(), key=lambda part: -part[1])[:5]
        words = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        peak = f"{point.published / GIB:.1f}" if point.published else ""
        lines.append(
            f"| {point.name} | {point.needed / GIB:.1f} | {point.allocated / GIB:.1f} | "
            f"{point.most / GIB:.1f} | {peak} | "
            f"{point.needed / point.most:.2f} | {words} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print each run that does not fit")
    parser.add_argument("--only", default="", help="ids that begin so")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    say = Console(width=120, highlight=False).out
    points = read_all(say, options.only)
    say(f"{unfit(points)}\n")
    if any(point.published for point in points):
        say(against_peaks(points))
    if options.rows:
        say(f"\n{each(points)}")


if __name__ == "__main__":
    main()
