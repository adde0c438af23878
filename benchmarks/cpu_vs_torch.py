"""Our train step against PyTorch on the same CPU: same weights, same batches, equal losses first.

    python -m benchmarks.cpu_vs_torch [--rows gpt_char ...] [--rounds 15] [--also VARIANT]

Both sides use 2 threads and float32. Ours is `Trainer.step` with a shipped config and the bindings
below; PyTorch's is nanoGPT's loop (eager and torch.compile) or its with `torch.nn.LSTM`, or a
channels-last ResNet.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.side_by_side import Runner, Side

BATCHES = 10
CPU = {"JAX_PLATFORMS": "cpu"}
# Threads that wait for each other by spinning take the time of others on a shared machine.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
COMMON = (
    "Mesh.fsdp = 1", "Mesh.tensor = 1", "Precision.compute = 'float32'",
    "Schedule.warmup_steps = 0", "Schedule.name = 'constant'", "Train.steps = 1000000000",
    "Attention.kernel = 'blocked'", "Remat.policy = 'elementwise'",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      says: the row's name in the table.
      unit: what throughput counts.
      config: a shipped config.
      bindings: gin bindings over it.
      batch: rows of a batch.
      length: tokens a row; None for images.
      heads: attention heads; 0 for an LSTM.
      learning_rate: of both sides.
      clip_norm: of both sides.
      tolerance: how far the losses of 10 steps may be apart, relatively.
      pixels: of a side of the images.
      parts: of `torch_models.ConvNet`; empty: a ResNet.
      side: pixels of a side before its fully connected layers.
      activation: of that network.
    """

    says: str
    unit: str
    config: str
    bindings: tuple[str, ...]
    batch: int
    length: int | None = None
    heads: int = 0
    learning_rate: float = 1e-3
    clip_norm: float | None = 1.0
    tolerance: float = 1e-4
    pixels: int = 32
    parts: tuple[str, ...] = ()
    side: int = 0
    activation: str = "relu"

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets of the batches that both sides go round."""
        rng = np.random.default_rng(0)
        if self.length is None:
            return [
                (
                    rng.standard_normal((self.batch, self.pixels, self.pixels, 3), np.float32),
                    rng.integers(0, 10, self.batch, np.int32),
                )
                for _ in range(BATCHES)
            ]
        tokens = rng.integers(0, 65, (BATCHES, self.batch, self.length + 1), np.int32)
        return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def _text(length: int, batch: int) -> tuple[str, ...]:
    return (
        "TextData.source = 'synthetic'", "TextData.synthetic_vocab_size = 65",
        f"TextData.sequence_length = {length}", "TextData.separate_documents = False",
        f"Train.global_batch_size = {batch}", "Optimizer.learning_rate = 1e-3",
    )  # fmt: skip


def _gpt(says: str, layers: int, dim: int, heads: int, length: int, batch: int) -> Row:
    bindings = (
        *COMMON,
        f"GPT.num_layers = {layers}", f"GPT.embed_dim = {dim}", f"GPT.num_heads = {heads}",
        f"GPT.context_length = {length}", "GPT.vocab_size = 65", *_text(length, batch),
    )  # fmt: skip
    return Row(says, "tokens", "gpt_quickstart", bindings, batch, length, heads)


def _lstm(says: str, layers: int, dim: int, length: int, batch: int) -> Row:
    bindings = (
        *COMMON[:-2], "Mesh.data = 1",
        f"LSTM.num_layers = {layers}", f"LSTM.embed_dim = {dim}", "LSTM.vocab_size = 65",
        *_text(length, batch),
    )  # fmt: skip
    return Row(says, "tokens", "lstm_quickstart", bindings, batch, length)


_IMAGES = (
    *COMMON[2:-2], "Mesh.fsdp = 1", "ImageData.channels = 3", "ImageData.source = 'synthetic'",
    "ImageData.mean = (0.5, 0.5, 0.5)", "ImageData.std = (0.25, 0.25, 0.25)",
    "Optimizer.name = 'sgd'", "Optimizer.learning_rate = 0.01", "Optimizer.weight_decay = 5e-4",
    "Optimizer.clip_norm = None",
)  # fmt: skip


def _convnet(
    says: str, config: str, bindings: tuple[str, ...], batch: int, pixels: int,
    parts: str, side: int, activation: str = "relu",
) -> Row:  # fmt: skip
    # Batch norms on random images are chaotic: larger steps drift apart within ten of them.
    rate = 1e-4
    sizes = (
        f"ImageData.image_size = {pixels}", f"Train.global_batch_size = {batch}",
        f"Optimizer.learning_rate = {rate}",
    )  # fmt: skip
    return Row(
        says, "images", config, (*_IMAGES, *sizes, *bindings), batch,
        learning_rate=rate, clip_norm=None, pixels=pixels, parts=tuple(parts.split()), side=side,
        activation=activation,
    )  # fmt: skip


_VGG11 = "c1.1 m2.2 c1.1 m2.2 c1.1 c1.1 m2.2 c1.1 c1.1 m2.2 c1.1 c1.1 m2.2"
_VGG = ("VGG.width = 64", "VGG.head_width = 512", "VGG.channels = 3", "VGG.dropout = 0.0")

ROWS = {
    "gpt_char": _gpt("nanoGPT char: 4 layers x 128, T 64, batch 12", 4, 128, 4, 64, 12),
    "gpt_256": _gpt("GPT 4 layers x 256, T 256, batch 8", 4, 256, 8, 256, 8),
    "gpt_384": _gpt("GPT 6 layers x 384, T 256, batch 4", 6, 384, 6, 256, 4),
    "lstm": _lstm("LSTM 2 layers x 256, T 64, batch 32", 2, 256, 64, 32),
    "resnet20": Row(
        "ResNet-20, 32 x 32, batch 64",
        "images",
        "resnet_digits",
        (
            *_IMAGES, "ResNet.width = None", "ResNet.channels = 3",
            "ImageData.image_size = 32", "ImageData.crop = 'resized'",
            "Train.global_batch_size = 64",
        ),
        64,
        learning_rate=0.01,
        clip_norm=None,
    ),
    "lenet": _convnet(
        "LeNet, 32 x 32, batch 128", "lenet_mnist5k",
        ("LeNet.channels = 3", "LeNet.padding = 0"),
        128, 32, "c1.0 m2.2 c1.0 m2.2", 5,
    ),
    "alexnet": _convnet(
        "AlexNet, 224 x 224, batch 16", "alexnet_mnist5k",
        ("AlexNet.width = 64", "AlexNet.head_width = 4096", "AlexNet.channels = 3",
         "AlexNet.dropout = 0.0"),
        16, 224, "c4.2 m3.2 c1.2 m3.2 c1.1 c1.1 c1.1 m3.2", 6,
    ),
    "vgg11": _convnet(
        "VGG-11, 32 x 32, batch 32", "vgg11_mnist5k", (*_VGG, "VGG.norm = None"),
        32, 32, _VGG11, 7,
    ),
    "vgg11_norm": _convnet(
        "VGG-11 with batch norms, 32 x 32, batch 32", "vgg11_mnist5k", _VGG, 32, 32, _VGG11, 7,
    ),
}  # fmt: skip


# -- the sides -------------------------------------------------------------------------------------


def ours(row: Row, extra: list[str]) -> Runner:
    """Trainer.step on batches in memory."""
    import jax  # noqa: PLC0415 - the other side must not have it

    from jaxtrain.data.batch import Batch  # noqa: PLC0415
    from jaxtrain.run.trainer import Trainer  # noqa: PLC0415
    from jaxtrain.training.settings import load_config  # noqa: PLC0415

    trainer = Trainer(load_config(row.config, [*row.bindings, *extra]))
    batches = []
    for inputs, targets in row.batches():
        positions = None
        if row.length is not None:
            positions = np.broadcast_to(np.arange(row.length, dtype=np.int32), inputs.shape)
        batches.append(Batch(inputs, targets, np.ones(targets.shape, np.float32), None, positions))

    def save(path: str) -> None:
        leaves, _ = jax.tree.flatten_with_path(trainer.state.params)
        np.savez(path, **{parameter_name(keys): np.asarray(x) for keys, x in leaves})

    return Runner(step=lambda i: trainer.step(batches[i % BATCHES])["loss"], loss=float, save=save)


def parameter_name(keys: tuple[Any, ...]) -> str:
    names = [str(getattr(key, "key", getattr(key, "name", "value"))) for key in keys]
    # The last is the array of a parameter, which may itself be called so.
    return ".".join(names[:-1] if names[-1] == "value" else names)


def theirs(row: Row, weights_path: str, *, compiled: bool) -> Runner:
    """nanoGPT's step, an LSTM's or a channels-last ResNet's, on batches in memory."""
    import torch  # noqa: PLC0415 - the other side must not have it

    from benchmarks import torch_models  # noqa: PLC0415

    torch.set_num_threads(side_by_side.THREADS)
    weights = dict(np.load(weights_path))
    batches = [
        (torch.from_numpy(inputs.copy()), torch.from_numpy(targets.astype(np.int64)))
        for inputs, targets in row.batches()
    ]
    if row.length is None:
        net = (
            torch_models.ConvNet(weights, row.parts, row.side, row.activation)
            if row.parts
            else torch_models.ResNet(weights)
        )
        model: Any = net.to(memory_format=torch.channels_last)
        # The bytes of our images are channels last already.
        batches = [(x.permute(0, 3, 1, 2), y) for x, y in batches]
        optimizer = torch_models.sgd(model, row.learning_rate)
    else:
        model = torch_models.GPT(weights, row.heads) if row.heads else torch_models.LSTM(weights)
        optimizer = torch_models.adamw(model, row.learning_rate)
    run = torch.compile(model) if compiled else model

    def step(i: int) -> Any:
        loss = run(*batches[i % BATCHES])
        loss.backward()
        torch_models.clip(model, row.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Runner(step=step, loss=float)


# -- the comparison --------------------------------------------------------------------------------


def compare(
    name: str, *, rounds: int, round_seconds: float, peers: list[str], variants: list[str]
) -> dict[str, Any]:
    """One row: losses first, then times. A variant is ours with another binding or environment."""
    row, module = ROWS[name], ["benchmarks.cpu_vs_torch", "--row", name]
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.npz")
        own = Side("jaxtrain", [*module, "--side", "jaxtrain"], CPU)
        others = [Side(p, [*module, "--side", p, "--weights", weights], PASSIVE) for p in peers]
        sides = [own, *others, *(_variant(module, variant) for variant in variants)]
        with side_by_side.closing_all(sides):
            own.ask("save", path=weights)
            losses = {side.name: side.ask("losses", steps=10) for side in sides}
            apart = side_by_side.assert_equal_mathematics(losses, row.tolerance)
            seconds = side_by_side.interleave(sides, rounds=rounds, round_seconds=round_seconds)
    units = row.batch * (row.length or 1)
    found = {}
    for side in sides:
        found[side.name] = {
            "step_ms": {k: 1e3 * v for k, v in side_by_side.spread(seconds[side.name]).items()},
            f"{row.unit}_per_second": units / float(np.median(seconds[side.name])),
            "first_step_seconds": side.first_step_seconds,
            "cpu_ms": 1e3 * side.cpu_seconds,
            "peak_mib": side.peak_bytes / 2**20,
        }
        if side is not own:
            ratios = np.array(seconds[side.name]) / np.array(seconds["jaxtrain"])
            found[side.name]["times_ours"] = side_by_side.spread(ratios.tolist())
    return {"row": row.says, "losses_apart": apart, "rounds": rounds, "sides": found}


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
    parser.add_argument("--peers", nargs="*", default=["torch eager", "torch.compile"])
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
        compiled = options.side == "torch.compile"
        side_by_side.serve(lambda: theirs(ROWS[options.row], options.weights, compiled=compiled))
        return
    written = side_by_side.circumstances(["jax", "jaxlib", "flax", "torch", "numpy"])
    written["results"] = []
    for name in options.rows:
        result = compare(
            name,
            rounds=options.rounds,
            round_seconds=options.round_seconds,
            peers=options.peers,
            variants=options.also,
        )
        written["results"].append(result)
        # After every row: a run that is stopped keeps what it has.
        options.json.write_text(json.dumps(written, indent=1))
    console = Console(width=140)
    console.print(table(written["results"]))
    console.print({k: v for k, v in written.items() if k != "results"})


if __name__ == "__main__":
    main()
