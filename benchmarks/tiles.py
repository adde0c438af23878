"""What fsdp moves beside the textbook's bytes, and what tiles add to the state at rest.

    python -m benchmarks.tiles [--models llama_8b ...] [--targets v5p:4x4x4 ...]

Two layers of the published widths under ZeRO 3, compiled by the target's own compiler as `plan`
does. None of the machines need be there; GPUs' rows need `jaxtrain[cuda13]`.
"""

import argparse

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.compiled.collectives import Collective, collectives
from jaxtrain.analysis.planning.compiled.compiled import compile_step, target_layout
from jaxtrain.analysis.planning.machines.links import names_of
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.textbook.facts import Expected
from jaxtrain.analysis.planning.textbook.formulas import wire_bytes
from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.analysis.planning.textbook.traffic import expect_traffic
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import load_config

_TEXT = ("SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False")
# One row of the batch a device, of 512 places: what fsdp moves does not depend on either.
_SHORT = ("TextData.sequence_length = 512", "Train.accumulation = 1", "Mesh.data = 1")
MODELS = {
    "gpt2_124m": ("gpt2_124m", ("GPT.num_layers = 2", "Sharding.zero = 3")),
    "llama_1b": ("llama_1b", ("Llama.num_layers = 2",)),
    "llama_8b": ("llama_8b", ("Llama.num_layers = 2",)),
    "llama_70b": ("llama_8b", (
        "Llama.num_layers = 2", "Llama.embed_dim = 8192", "Llama.num_heads = 64",
        "Llama.mlp_dim = 28672",
    )),
}  # fmt: skip
TARGETS = {
    "v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256, "v5p:2x2x2": 8, "v5p:2x2x4": 16,
    "v5p:2x4x4": 32, "v5p:4x4x4": 64, "v5p:4x4x8": 128, "v5p:4x8x8": 256, "v5p:8x8x8": 512,
    "v6e:2x4": 8, "v6e:4x8": 32, "v6e:8x8": 64, "v6e:16x16": 256, "h100:1x8": 8, "h100:8x8": 64,
}  # fmt: skip


def wire(moved: list[Collective] | list[Expected], layout: Layout) -> float:
    """Bytes that a device sends along fsdp in a step."""
    return sum(
        wire_bytes(one.kind, one.total_bytes, layout.size(tuple(names_of(one.axis))))
        for one in moved
        if "fsdp" in one.axis
    )


def summed_whole(found: list[Collective]) -> list[str]:
    """Shapes of the matrices that are summed whole along fsdp, to be cut."""
    return sorted(
        {
            "x".join(map(str, one.shape))
            for one in found
            if one.kind == "all-reduce" and "fsdp" in one.axis and one.bytes >= 2**20
        }
    )


def measured(name: str, machine: str) -> list[str]:
    """The columns of a row: MiB on the wire, what is beside the textbook's and beside the layout's
    own bytes, and what is summed whole."""
    target, (config, sizes), devices = parse_target(machine), MODELS[name], TARGETS[machine]
    batch = (f"Train.global_batch_size = {devices}", f"Mesh.fsdp = {devices}")
    loaded = load_config(config, [*_TEXT, *sizes, *_SHORT, *batch])
    layout = target_layout(loaded, target)
    compiled = compile_step(loaded, layout, target)
    found = collectives(compiled.text, layout.mesh)
    moved, textbook = wire(found, layout), wire(expect_traffic(loaded, layout), layout)
    padding = compiled.argument_bytes / argument_bytes(loaded, layout).total - 1
    return [
        f"{moved / 2**20:,.0f}", f"{moved / textbook - 1:+.1%}", f"{padding:+.1%}",
        "; ".join(summed_whole(found)) or "none",
    ]  # fmt: skip


def main() -> None:
    """Compiles each row; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    options = parser.parse_args()
    table = Table(
        "model", "target", "MiB on the wire", "over the textbook", "padding of the state",
        "summed whole",
    )  # fmt: skip
    for name in options.models:
        for machine in options.targets:
            table.add_row(name, machine, *measured(name, machine))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
