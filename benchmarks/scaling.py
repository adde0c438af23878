"""What each mesh axis costs on simulated devices, and weak scaling as `plan` predicts it for TPUs.

    python -m benchmarks.scaling [--rounds 5] [--axes data fsdp ...] [--json FILE]

First table: one optimizer step on 8 simulated CPU devices against the same step on one, the same
global batch on the same cores, so that the ratio is what partitioning costs where nothing can be
won by it. Losses of 5 steps are asserted equal first. Second table: no measurement, but the closed
forms of `jaxtrain plan --no-compile` for Llama 8B on pods of TPU v5p, a fixed batch a chip.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.side_by_side import Runner, Side

STEPS, ROWS, LENGTH, VOCABULARY = 5, 16, 128, 256
TEXT = (
    "Train.data = @TextData()", "TextData.source = 'synthetic'",
    f"TextData.sequence_length = {LENGTH}", f"TextData.synthetic_vocab_size = {VOCABULARY}",
    f"Train.global_batch_size = {ROWS}", "Train.steps = 100000", "Schedule.warmup_steps = 0",
    "Precision.compute = 'float32'", "Attention.kernel = 'xla'", "Mesh.fsdp = 1",
    "Mesh.tensor = 1",
)  # fmt: skip
GPT = (
    "Train.model = @GPT()", f"GPT.vocab_size = {VOCABULARY}", "GPT.num_layers = 8",
    "GPT.embed_dim = 128", "GPT.num_heads = 8", f"GPT.context_length = {LENGTH}",
)  # fmt: skip
MIXTRAL = (
    "Train.model = @Mixtral()", f"Mixtral.vocab_size = {VOCABULARY}", "Mixtral.num_layers = 4",
    "Mixtral.embed_dim = 128", "Mixtral.num_heads = 8", "Mixtral.num_kv_heads = 8",
    "Mixtral.mlp_dim = 256", "Mixtral.num_experts = 8", f"Mixtral.context_length = {LENGTH}",
)  # fmt: skip
# What splits over 8 devices: the model, and the bindings beside 8 simulated devices.
AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data": (GPT, ("Mesh.data = 8",)),
    "fsdp, ZeRO 1": (GPT, ("Mesh.fsdp = 8", "Sharding.zero = 1")),
    "fsdp, ZeRO 2": (GPT, ("Mesh.fsdp = 8", "Sharding.zero = 2")),
    "fsdp, ZeRO 3": (GPT, ("Mesh.fsdp = 8",)),
    "tensor": (GPT, ("Mesh.tensor = 8",)),
    "tensor, sequence parallel": (GPT, ("Mesh.tensor = 8", "Sharding.sequence_parallel = True")),
    "context, ring": (GPT, ("Mesh.context = 8",)),
    "context, Ulysses": (GPT, ("Mesh.context = 8", "Attention.context_parallel = 'ulysses'")),
    "pipe, 1F1B, 16 microbatches": (
        GPT, ("Mesh.pipe = 8", "Pipeline.schedule = '1f1b'", "Pipeline.microbatches = 16"),
    ),
    "expert": (MIXTRAL, ("Mesh.expert = 8",)),
}  # fmt: skip
PODS = ("2x2x4", "4x4x4", "4x8x8", "8x8x16", "16x16x16")
# Of a chip and step: sequences, their tokens, accumulation steps. As `llama_8b` has on 64 chips;
# and as little as a chip may have before its weights take longer to come than to use.
PER_CHIP = ((8, 8192, 8), (1, 2048, 1))


def ours(bindings: list[str]) -> Runner:
    """Trainer.step on batches in memory, the same ones on every mesh."""
    from jaxtrain.data.batch import Batch  # noqa: PLC0415 - devices are simulated before JAX starts
    from jaxtrain.run.trainer import Trainer  # noqa: PLC0415
    from jaxtrain.training.settings import load_config  # noqa: PLC0415

    trainer = Trainer(load_config("gpt_quickstart", [*TEXT, *bindings]))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), inputs.shape)
        ones = np.ones(inputs.shape)
        batches.append(
            Batch(inputs, targets, ones.astype(np.float32), ones.astype(np.int32), positions)
        )
    return Runner(step=lambda i: trainer.step(batches[i % STEPS])["loss"], loss=float)


def compare(axis: str, rounds: int) -> dict[str, Any]:
    """One axis of 8 against one device."""
    model, bindings = AXES[axis]
    eight = ("Mesh.simulated_devices = 8", *bindings)
    sides = [
        Side(name, ["benchmarks.scaling", *(f"--binding={b}" for b in (*model, *more))], {})
        for name, more in (("one device", ()), (axis, eight))
    ]
    with side_by_side.closing_all(sides):
        losses = {side.name: side.ask("losses", steps=STEPS) for side in sides}
        apart = side_by_side.assert_equal_mathematics(losses, 1e-4)
        seconds = side_by_side.interleave(sides, rounds=rounds, round_seconds=1.0)
    ratios = np.array(seconds[axis]) / np.array(seconds["one device"])
    return {
        "axis": axis,
        "losses_apart": apart,
        "step_ms": {name: side_by_side.spread(1e3 * np.array(s)) for name, s in seconds.items()},
        "times_one_device": side_by_side.spread(ratios.tolist()),
    }


def predicted(rows: int, length: int, accumulation: int) -> list[dict[str, Any]]:
    """Weak scaling of Llama 8B, ZeRO 3 over all chips, in closed forms."""
    from jaxtrain import load_config, plan  # noqa: PLC0415

    found: list[dict[str, Any]] = []
    for pod in PODS:
        chips = int(np.prod([int(n) for n in pod.split("x")]))
        config = load_config(
            "llama_8b",
            [
                f"Train.global_batch_size = {rows * chips}",
                f"Train.accumulation = {accumulation}",
                f"TextData.sequence_length = {length}",
                "Attention.kernel = 'tpu'",
                "SOURCE = 'synthetic'",
            ],
        )
        report = plan(config, target=f"v5p:{pod}", compile=False)
        seconds = report.time.seconds
        assert seconds is not None, "the peak of a v5p is known"
        one = {
            "target": f"v5p:{pod}",
            "chips": chips,
            "tokens_per_chip": rows * length,
            "step_seconds": seconds,
            "mfu": report.time.mfu,
            "tokens_per_second_and_chip": rows * length / seconds,
            "fits": report.fits,
        }
        found.append({**one, "efficiency": (found or [one])[0]["step_seconds"] / seconds})
    return found


def main() -> None:
    """Reads the command line, prints and writes both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--axes", nargs="*", choices=AXES, default=list(AXES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("scaling.json"))
    parser.add_argument("--binding", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.binding:
        side_by_side.serve(lambda: ours(options.binding))
        return
    console = Console(width=120)
    written = side_by_side.circumstances(["jax", "jaxlib", "flax", "numpy"])
    written["axes"] = [compare(axis, options.rounds) for axis in options.axes]
    table = Table("axis of 8", "ms a step", "one device", "times one device (p10-p90)", "losses")
    for row in written["axes"]:
        ms, times = row["step_ms"], row["times_one_device"]
        table.add_row(
            row["axis"],
            f"{ms[row['axis']]['median']:.0f}",
            f"{ms['one device']['median']:.0f}",
            f"{times['median']:.2f} ({times['p10']:.2f}-{times['p90']:.2f})",
            f"{row['losses_apart']:.0e} apart",
        )
    console.print(table)
    written["predicted"] = [row for one in PER_CHIP for row in predicted(*one)]
    columns = ("chips", "tokens a chip", "s a step", "tokens/s and chip", "MFU", "efficiency")
    table = Table("predicted", *columns)
    for row in written["predicted"]:
        table.add_row(
            row["target"],
            str(row["chips"]),
            f"{row['tokens_per_chip']:,}",
            f"{row['step_seconds']:.2f}",
            f"{row['tokens_per_second_and_chip']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['efficiency']:.1%}",
        )
    console.print(table)
    options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
