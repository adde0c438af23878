"""Which share of a step's communication its compiled program waits for, and of which collectives.

    python -m benchmarks.overlap [--row NAME] [--quick] [--also BINDINGS] [--flags NAME=VALUE,...]

Models of published sizes, on TPU slices in layouts that `jaxtrain plan --search` picks, and on
hosts of GPUs; none of the machines need be there. The target's own compiler compiles the step with
the options of a run; what its schedule puts beside a collective hides it, by the prices of `plan`
(`analysis/planning/compiled/schedule.py`).
"""

import argparse
import dataclasses
import re
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.compiled.compiled import lower, options_of, target_layout
from jaxtrain.analysis.planning.compiled.schedule import Schedule, simulate_schedule
from jaxtrain.analysis.planning.machines.targets import Target, compiler_options, parse_target
from jaxtrain.analysis.planning.timing.efficiency_factors import efficiency_of
from jaxtrain.analysis.planning.timing.timing import peak_flops, pieces, resolve_config
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config, load_config

_TEXT = ("SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False")
_LLAMA_70B = (
    "Llama.num_layers = 80", "Llama.embed_dim = 8192", "Llama.num_heads = 64",
    "Llama.mlp_dim = 28672", "Train.accumulation = 1",
)  # fmt: skip
_GPT_175B = (
    "GPT.num_layers = 96", "GPT.embed_dim = 12288", "GPT.num_heads = 96",
    "GPT.context_length = 2048", "TextData.sequence_length = 2048",
    "Train.global_batch_size = 1536", "Train.accumulation = 1",
)  # fmt: skip
_IN_TURN = (
    "Pipeline.schedule = 'interleaved'", "Pipeline.backward = 'residuals'",
    "Sharding.accumulate = 'local'", "Train.accumulation = 1",
)  # fmt: skip
_AROUND = ("Sharding.sequence_parallel = True", "Sharding.collective_matmul = True")
_TENSOR = ("Mesh.tensor = 8", *_AROUND)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on a machine.

    Attributes:
      config: a shipped config.
      target: the machine.
      bindings: of the published sizes, the batch, and the layout: on TPUs what the search picks,
        on GPUs the config's own, or a host's GPUs along `tensor`.
    """

    config: str
    target: str
    bindings: tuple[str, ...]


ROWS = {
    "llama_8b": Row(
        "llama_8b", "v5p:2x2x1", ("Train.global_batch_size = 8", "Train.accumulation = 1")
    ),
    "llama_70b v5p": Row("llama_8b", "v5p:8x8x8", (
        *_LLAMA_70B, *_IN_TURN, "Train.global_batch_size = 2048", "Mesh.pipe = 16",
        "Mesh.fsdp = 4", "Mesh.context = 8", "Attention.context_parallel = 'ulysses'",
        "Pipeline.virtual_stages = 5", "Remat.policy = 'elementwise'",
        # 512 places of 8192 are 64 a device: see benchmarks/RESULTS.md.
        "Pipeline.microbatches = 512", "Loss.chunk_size = 4096",
    )),
    # A loop goes through the layers: of 4 the program is that of 80, and what waits once a step is
    # twenty times as large a share.
    "llama_70b v6e": Row("llama_8b", "v6e:16x16", (
        *_LLAMA_70B, "Train.global_batch_size = 1024", "Mesh.fsdp = 256", "Llama.num_layers = 4",
        "Remat.offload = ('residual', 'query', 'key', 'value', 'attention')",
    )),
    "mixtral_8x7b v5p": Row("mixtral_8x7b", "v5p:4x4x4", (
        *_IN_TURN, "Mesh.pipe = 4", "Mesh.fsdp = 2", "Pipeline.virtual_stages = 8",
        "Remat.policy = 'elementwise'", "Pipeline.microbatches = 32",
    )),
    # Of a search whose best are compiled: see benchmarks/RESULTS.md.
    "mixtral_8x7b v6e": Row("mixtral_8x7b", "v6e:8x8", (
        "Mesh.fsdp = 8", "Mesh.expert = 8", "Train.accumulation = 2",
        "Remat.offload = ('residual', 'query', 'key', 'value', 'attention')",
    )),
    "mixtral_8x7b v6e, stages": Row("mixtral_8x7b", "v6e:8x8", (
        "Mesh.pipe = 8", "Mesh.fsdp = 1", "Mesh.expert = 8", "Pipeline.schedule = 'interleaved'",
        "Pipeline.virtual_stages = 4", "Sharding.zero = 0", "Pipeline.backward = 'residuals'",
        "Remat.save = ('attention',)", "Train.accumulation = 1", "Pipeline.microbatches = 64",
    )),
    "gpt3_175b v5p": Row("gpt2_124m", "v5p:8x8x8", (
        *_GPT_175B, *_IN_TURN, "Mesh.pipe = 16", "Mesh.data = 4", "Mesh.fsdp = 4",
        "Mesh.tensor = 2", *_AROUND, "Pipeline.virtual_stages = 6",
        "Remat.policy = 'dots'", "Pipeline.microbatches = 96",
    )),
    # As Llama 70B's, with 4 of 96 layers.
    "gpt3_175b v6e": Row("gpt2_124m", "v6e:16x16", (
        *_GPT_175B, "GPT.num_layers = 4", "Mesh.fsdp = 256", "Sharding.zero = 3",
        "Remat.policy = 'full'",
        "Remat.offload = ('residual', 'query', 'key', 'value', 'attention')",
    )),
    "llama_8b h100": Row("llama_8b", "h100:8x8", ("Train.accumulation = 1",)),
    "llama_70b h100": Row(
        "llama_8b", "h100:64x8", (*_LLAMA_70B, "Train.global_batch_size = 512", *_TENSOR)
    ),
    "mixtral_8x7b h100": Row("mixtral_8x7b", "h100:8x8", ("Train.accumulation = 1",)),
    "gpt3_175b h100": Row("gpt2_124m", "h100:64x8", (
        *_GPT_175B, *_TENSOR, "Train.global_batch_size = 512", "Mesh.data = 1",
        "Mesh.fsdp = 64", "Sharding.zero = 3", "Remat.policy = 'full'",
    )),
}  # fmt: skip


def read(config: Config, layout: Layout, target: Target, text: str, *, thorough: bool) -> Schedule:
    """A compiled step by its own schedule, attention's kernels by the closed form."""
    config = resolve_config(config, target.chip.kind)
    peak = peak_flops(config, target)
    assert peak is not None, "targets with a compiler and a peak"
    counted = pieces(config, layout, target, [], peak=peak, update_bytes=0)
    attention = counted.attention(efficiency_of(target))
    return simulate_schedule(config, layout, target, text, attention=attention, thorough=thorough)


def _value(text: str) -> Any:
    """Of an XLA option: GPUs' take no text for numbers and truths."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def _columns(
    name: str, label: str, row: Row, also: list[str], flags: dict[str, Any], quick: bool
) -> list[str]:
    """The table's row of one compiled step."""
    target = parse_target(row.target)
    config = load_config(row.config, [*_TEXT, *row.bindings, *also])
    layout = target_layout(config, target)
    options: dict[str, Any] = options_of(config, layout) | flags
    if quick and target.chip.kind == "tpu":
        options |= {"exec_time_optimization_effort": -1.0}
    begin = time.perf_counter()
    try:
        compiled = lower(config, layout, options).compile({**options, **compiler_options(target)})
    except jax.errors.JaxRuntimeError as error:  # the other rows are worth having
        return [name, label, "refused", str(error).splitlines()[0]]
    seconds = time.perf_counter() - begin
    found = read(config, layout, target, compiled.as_text() or "", thorough=not quick)
    whole = found.compute + found.waited
    first = sorted(found.waits.items(), key=lambda one: -one[1][0])[:4]
    shares = "; ".join(
        f"{kind} over {axis} {waited / whole:.1%} (of {sent / whole:.1%})"
        for (kind, axis), (waited, sent) in first
        if waited > 0.0005 * whole
    )
    return [
        name, label, f"{whole:.2f}", f"{found.sent / whole:.1%}",
        f"{found.waited / (found.sent or 1):.0%}", f"{found.waited / whole:.1%}", shares,
        f"{seconds:.0f}",
    ]  # fmt: skip


def main() -> None:
    """Compiles each row; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", action="append", choices=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="compile as `plan` does")
    parser.add_argument("--also", action="append", default=[], help="bindings joined by ';'")
    parser.add_argument("--flags", action="append", default=[], help="XLA's, joined by ','")
    options = parser.parse_args()
    for flags in options.flags:
        if not all(re.fullmatch(r"\w+=[^=]+", one) for one in flags.split(",")):
            parser.error(f"--flags {flags}: write NAME=VALUE, joined by ','")
    table = Table(
        "row", "", "s, without bubble", "sent", "of it waited", "of the step waited",
        "waited for", "compiling, s",
    )  # fmt: skip
    for name in options.row or ROWS:
        for bindings in ["", *options.also]:
            also = [one for one in bindings.split(";") if one.strip()]
            for flags in ["", *options.flags]:
                pairs = [one.split("=") for one in flags.split(",") if one]
                own = {name: _value(value) for name, value in pairs}
                label = " ".join(part for part in (bindings, flags) if part)
                table.add_row(*_columns(name, label, ROWS[name], also, own, options.quick))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
