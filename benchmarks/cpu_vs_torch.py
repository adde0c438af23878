"""Our train step against PyTorch on the same CPU: same weights, same batches, equal losses first.

    python -m benchmarks.cpu_vs_torch [--rows gpt_char ...] [--rounds 15] [--also VARIANT]

Both sides use 2 threads and float32. Ours is `Trainer.step` with a shipped config and the bindings
of `cpu_rows`; PyTorch's is the loop of nanoGPT, eager and with torch.compile, over a model written
as the field writes it: transformers' own, or modules of `torch.nn`.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.cpu_rows import BATCHES, ROWS, Fields, Row
from benchmarks.side_by_side import Runner, Side

CPU = {"JAX_PLATFORMS": "cpu"}
# Threads that wait for each other by spinning take the time of others on a shared machine.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
COMPILED = "torch.compile"
# In the folder through which weights go from our side to the others.
WEIGHTS, PUBLISHED = "weights.npz", "published"


# -- the sides -------------------------------------------------------------------------------------


def ours(row: Row, extra: Sequence[str] = ()) -> Runner:
    """`Trainer.step` on batches in memory, on one device."""
    import jax  # noqa: PLC0415 - the other side must not have it

    from jaxtrain.run.generation.decoding import Sampling  # noqa: PLC0415
    from jaxtrain.run.trainer import Trainer  # noqa: PLC0415
    from jaxtrain.training.settings import load_config  # noqa: PLC0415

    config = load_config(row.config, [*row.all_bindings(), *extra])
    trainer = Trainer(config, devices=jax.devices()[:1])

    def save(folder: str) -> None:
        if row.published:
            trainer.export_huggingface(str(Path(folder) / PUBLISHED))
        else:
            weights = {name.replace("/", "."): x for name, x in trainer.weights().items()}
            np.savez(Path(folder) / WEIGHTS, **weights)

    if row.new_tokens:
        prompts = [fields["inputs"].tolist() for fields in row.batches()]

        def generate(i: int) -> list[list[int]]:
            found = trainer.answers(
                prompts[i % BATCHES],
                max_new_tokens=row.new_tokens,
                sampling=Sampling(temperature=0.0),
                batch_size=len(prompts[0]),
            )
            return [answer.tokens for answer in found]

        return Runner(step=generate, loss=lambda tokens: tokens, save=save)

    batches = [make_batch(fields) for fields in row.batches()]
    minimized = trainer.program.setup.objective.minimized
    return Runner(
        step=lambda i: trainer.step(batches[i % BATCHES]),
        loss=lambda metrics: sum(float(metrics[name]) for name in minimized if name in metrics),
        save=save,
    )


def make_batch(fields: Fields) -> Any:
    """Our batch of these fields."""
    from jaxtrain.data.batch import Batch  # noqa: PLC0415 - the other side must not have it

    inputs, targets = fields["inputs"], fields["targets"]
    made = {"loss_mask": np.ones(targets.shape, np.float32), **fields}
    if "source" in fields:
        made["segment_ids"] = np.ones(targets.shape, np.int32)
        made["source_segment_ids"] = np.ones(fields["source"].shape, np.int32)
    elif np.issubdtype(inputs.dtype, np.integer):
        places = np.arange(inputs.shape[1], dtype=np.int32)
        made["positions"] = np.broadcast_to(places, inputs.shape)
    return Batch(**made)


def theirs(row: Row, folder: str, *, backend: str | None = None) -> Runner:
    """PyTorch's step on batches in memory; images are channels last.

    Args:
      row: what is compared.
      folder: where our side has saved its weights.
      backend: torch.compile's, such as 'inductor'; None: eager.
    """
    import torch  # noqa: PLC0415 - the other side must not have it

    from benchmarks import torch_models  # noqa: PLC0415

    torch.set_num_threads(side_by_side.THREADS)
    published, weights = str(Path(folder) / PUBLISHED), Path(folder) / WEIGHTS
    model = row.make_peer(published if row.published else dict(np.load(weights)))
    model.train()
    batches = [
        {name: make_tensor(value) for name, value in fields.items()} for fields in row.batches()
    ]
    if batches[0]["inputs"].ndim == 4:
        model = model.to(memory_format=torch.channels_last)
    make_optimizer = {"sgd": torch_models.sgd, "adamw": torch_models.adamw}[row.optimizer]
    optimizer = make_optimizer(model, row.learning_rate, row.weight_decay)
    if backend is not None:
        model.compile(backend=backend)
    if row.new_tokens:
        return Runner(
            step=lambda i: model.generate(**batches[i % BATCHES], count=row.new_tokens),
            loss=lambda tokens: tokens.tolist(),
        )

    def step(i: int) -> Any:
        loss = model(**batches[i % BATCHES])
        loss.backward()
        torch_models.clip(model, row.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Runner(step=step, loss=float)


def make_tensor(value: np.ndarray) -> Any:
    """A tensor of PyTorch: integers of 64 bits; [B, H, W, C] as [B, C, H, W] without a copy."""
    import torch  # noqa: PLC0415 - the other side must not have it

    if np.issubdtype(value.dtype, np.integer):
        return torch.from_numpy(value.astype(np.int64))
    tensor = torch.from_numpy(value.copy())
    # The bytes of our images are channels last already.
    return tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor


# -- the comparison --------------------------------------------------------------------------------


def compare(
    name: str, *, rounds: int, round_seconds: float, peers: list[str], variants: list[str]
) -> dict[str, Any]:
    """One row: losses first, then times. A variant is ours with another binding or environment."""
    row, module = ROWS[name], ["benchmarks.cpu_vs_torch", "--row", name]
    with tempfile.TemporaryDirectory() as folder:
        own = Side("jaxtrain", [*module, "--side", "jaxtrain"], CPU)
        others = [Side(p, [*module, "--side", p, "--weights", folder], PASSIVE) for p in peers]
        sides = [own, *others, *(_variant(module, variant) for variant in variants)]
        with side_by_side.closing_all(sides):
            own.ask("save", path=folder)
            losses = {side.name: side.ask("losses", steps=10) for side in sides}
            apart = side_by_side.assert_equal_mathematics(losses, row.tolerance)
            seconds = side_by_side.interleave(sides, rounds=rounds, round_seconds=round_seconds)
    found = {}
    for side in sides:
        found[side.name] = {
            "step_ms": {k: 1e3 * v for k, v in side_by_side.spread(seconds[side.name]).items()},
            f"{row.unit}_per_second": row.units / float(np.median(seconds[side.name])),
            "first_step_seconds": side.first_step_seconds,
            "cpu_ms": 1e3 * side.cpu_seconds,
            "peak_mib": side.peak_bytes / 2**20,
        }
        if side is not own:
            ratios = np.array(seconds[side.name]) / np.array(seconds["jaxtrain"])
            found[side.name]["times_ours"] = side_by_side.spread(ratios.tolist())
    return {"row": row.title, "losses_apart": apart, "rounds": rounds, "sides": found}


def _variant(module: list[str], variant: str) -> Side:
    pairs = [part.strip().split("=", 1) for part in variant.split(";")]
    environment = {name: value for name, value in pairs if name.isupper()}
    bindings = [f"--binding={n}={value}" for n, value in pairs if not n.isupper()]
    return Side(variant, [*module, "--side", "jaxtrain", *bindings], {**CPU, **environment})


def table(results: list[dict[str, Any]]) -> Table:
    """The rows as they go into RESULTS.md."""
    out = Table(
        "row",
        "side",
        "ms a step (p10-p90)",
        "CPU ms",
        "a second",
        "peak MiB",
        "first step s",
        "ratio",
    )
    for result in results:
        for name, side in result["sides"].items():
            ms, rate = side["step_ms"], next(v for k, v in side.items() if k.endswith("second"))
            ratio = side.get("times_ours")
            out.add_row(
                result["row"],
                name,
                f"{ms['median']:.1f} ({ms['p10']:.1f}-{ms['p90']:.1f})",
                f"{side['cpu_ms']:.1f}",
                f"{rate:,.0f}",
                f"{side['peak_mib']:,.0f}",
                f"{side['first_step_seconds']:.1f}",
                f"{ratio['median']:.2f} ({ratio['p10']:.2f}-{ratio['p90']:.2f})" if ratio else "",
            )
    return out


def main() -> None:
    """Reads the command line; the hidden options are for the processes of the sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--round-seconds", type=float, default=2.0)
    parser.add_argument("--peers", nargs="*", default=["torch eager", COMPILED])
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="VARIANT",
        help="another side of ours: gin bindings and environment variables, joined by ';'",
    )
    parser.add_argument("--binding", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("cpu_vs_torch.json"))
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "jaxtrain":
        side_by_side.serve(lambda: ours(ROWS[options.row], options.binding))
        return
    if options.side:
        backend = "inductor" if options.side == COMPILED else None
        side_by_side.serve(lambda: theirs(ROWS[options.row], options.weights, backend=backend))
        return
    written = side_by_side.circumstances(
        ["jax", "jaxlib", "flax", "torch", "transformers", "numpy"]
    )
    written["results"], failed = [], {}
    for name in options.rows:
        try:
            result = compare(
                name,
                rounds=options.rounds,
                round_seconds=options.round_seconds,
                peers=options.peers,
                variants=options.also,
            )
        except SystemExit as error:  # losses apart, or a side that ended: the other rows go on
            failed[name] = str(error)
            continue
        written["results"].append(result)
        # After every row: a run that is stopped keeps what it has.
        options.json.write_text(json.dumps(written, indent=1))
    console = Console(width=140)
    console.print(table(written["results"]))
    console.print({k: v for k, v in written.items() if k != "results"})
    if failed:
        raise SystemExit("\n".join(f"{name}: {error}" for name, error in failed.items()))


if __name__ == "__main__":
    main()
