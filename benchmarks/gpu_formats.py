"""Losses of a tiny GPT in every kernel and number format: those of a GPU against those of a CPU.

    python -m benchmarks.gpu_formats [--tiny]

Every setting trains five steps from the same weights on the same batches, on the GPU and on the
CPU, where attention is computed by the reference; a few processes a side run at once. Losses are
equal within what the format rounds to, or the setting is named. A setting that cannot run says why
and is passed over. `--tiny` has a CPU on both sides: a test of this code.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = 5
PROCESSES = 4  # of a side: most of their time is compiling


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is set over the tiny GPT, and how near its losses must be.

    Attributes:
      bindings: of gin, on both sides.
      tolerance: of the losses, relatively: a few roundings of the format.
      gpu: bindings on the GPU alone, where the CPU has no such thing.
    """

    bindings: tuple[str, ...] = ()
    tolerance: float = 5e-3
    gpu: tuple[str, ...] = ()


def _kernel(name: str) -> Setting:
    return Setting(gpu=(f"Attention.kernel = {name!r}",))


_EXPERTS = (
    "Train.model = @Mixtral()", "Mixtral.vocab_size = 256", "Mixtral.num_layers = 2",
    "Mixtral.embed_dim = 128", "Mixtral.num_heads = 2", "Mixtral.num_kv_heads = 1",
    "Mixtral.mlp_dim = 192", "Mixtral.num_experts = 4", "Mixtral.capacity_factor = None",
    "Mixtral.context_length = 128",
)  # fmt: skip
SETTINGS = {
    "float32": Setting(
        ("Precision.compute = 'float32'", "Precision.float32_products = 'float32'"), 1e-4
    ),
    "tf32": Setting(("Precision.compute = 'float32'", "Precision.float32_products = 'tf32'"), 2e-3),
    "bfloat16": Setting(),
    "cudnn": _kernel("cudnn"),
    "triton": _kernel("triton"),
    "xla": _kernel("xla"),
    "float16, dynamic scale": Setting(
        ("Precision.compute = 'float16'", "Precision.loss_scale = 'dynamic'"), 2e-3
    ),
    "float8": Setting(("Precision.matmul = 'float8'",), 3e-2),
    "int8": Setting(("Precision.matmul = 'int8'",), 3e-2),
    "bfloat16 parameters": Setting(("Precision.params = 'bfloat16'",), 1e-2),
    "remat": Setting(("Remat.policy = 'full'",)),
    "remat in host memory": Setting(gpu=("Remat.policy = 'offload'",)),
    "optimizer state in host memory": Setting(gpu=("Offload.optimizer_state = 'host'",)),
    "loss in chunks": Setting(("Loss.chunk_size = 32",)),
    "experts that take all": Setting(_EXPERTS),
    "experts in float8": Setting((*_EXPERTS, "Precision.matmul = 'float8'"), 3e-2),
}
_GPT = (
    "GPT.vocab_size = 256", "GPT.num_layers = 2", "GPT.embed_dim = 128", "GPT.num_heads = 2",
    "GPT.context_length = 128",
)  # fmt: skip
_BASE = (
    "TextData.sequence_length = 128", "TextData.source = 'synthetic'",
    "TextData.tokenizer = 'byte'", "TextData.separate_documents = False",
    "Train.global_batch_size = 8", "Train.accumulation = 1", "Train.seed = 0",
    "Mesh.data = 1", "Mesh.fsdp = 1", "Mesh.tensor = 1", "Sharding.zero = 0",
    "Precision.compute = 'bfloat16'", "Optimizer.learning_rate = 1e-3",
)  # fmt: skip


def config_of(bindings: tuple[str, ...]) -> Any:
    """The quickstart with these bindings; its GPT is tiny where they name no other model."""
    from jaxtrain import load_config  # noqa: PLC0415

    own = () if any(one.startswith("Train.model") for one in bindings) else _GPT
    return load_config("gpt_quickstart", [*own, *_BASE, *bindings])


def losses(bindings: tuple[str, ...]) -> list[float]:
    """Of the first steps, on the only device of this process."""
    import jax  # noqa: PLC0415 - it begins in the process that computes
    import numpy as np  # noqa: PLC0415

    from jaxtrain import Batch, Trainer  # noqa: PLC0415

    trainer = Trainer(config_of(bindings), devices=jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 256, (STEPS, 8, 129)).astype(np.int32)
    places = np.broadcast_to(np.arange(128, dtype=np.int32), (8, 128))
    found = []
    for rows in tokens:
        ones = np.ones((8, 128), np.float32)
        batch = Batch(rows[:, :-1], rows[:, 1:], ones, segment_ids=None, positions=places)
        found.append(float(trainer.step(batch)["loss"]))
    return found


def answers(side: str, settings: Mapping[str, Setting] = SETTINGS) -> Iterator[dict[str, Any]]:
    """What each setting gives on a side: {"setting", "losses"} or {"setting", "error"}."""
    for name, setting in settings.items():
        bindings = (*setting.bindings, *(setting.gpu if side == "gpu" else ()))
        try:
            yield {"setting": name, "losses": losses(bindings)}
        except Exception as error:  # noqa: BLE001 - whatever fails is what is to be known
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield {"setting": name, "error": said[:300]}


def side_of(side: str, *, on_cpu: bool, seconds: float) -> dict[str, dict[str, Any]]:
    """The answers of PROCESSES processes, by setting; those that they gave before they ended."""
    chunks = [list(SETTINGS)[start::PROCESSES] for start in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = pool.map(lambda names: _answers_of(side, names, on_cpu, seconds), chunks)
    found = {name: answer for part in parts for name, answer in part.items()}
    return {name: found[name] for name in SETTINGS}


def _answers_of(
    side: str, names: Sequence[str], on_cpu: bool, seconds: float
) -> dict[str, dict[str, Any]]:
    """The answers of one process that is ended after so many seconds."""
    # The processes share one GPU: each takes the memory that it needs.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if on_cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    words = [sys.executable, "-m", "benchmarks.gpu_formats", "--side", side, "--settings", *names]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=seconds,
            check=False,
        )  # fmt: skip
        said, end = done.stdout, f"ended with status {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        said, end = out.decode() if isinstance(out, bytes) else out, "out of time"
    lines = (json.loads(line) for line in said.splitlines() if line.startswith('{"setting"'))
    found = {line["setting"]: line for line in lines}
    return {name: found.get(name, {"error": end}) for name in names}


def compare(*, tiny: bool, seconds: float) -> dict[str, Any]:
    """Both sides at once, for so long; as `compared`."""
    with ThreadPoolExecutor(2) as pool:
        gpu, cpu = pool.map(
            lambda side: side_of(side, on_cpu=side == "cpu" or tiny, seconds=seconds),
            ("gpu", "cpu"),
        )
    return compared(gpu, cpu, SETTINGS)


def compared(
    gpu: Mapping[str, dict[str, Any]],
    cpu: Mapping[str, dict[str, Any]],
    settings: Mapping[str, Setting],
) -> dict[str, Any]:
    """{"settings": {name: {"apart" or "error", ...}}, "wrong": those that are too far, in words}.

    Args:
      gpu: `answers` of a GPU, by setting.
      cpu: those of a CPU.
      settings: the settings.
    """
    table: dict[str, Any] = {}
    for name, setting in settings.items():
        ours, reference = gpu[name], cpu[name]
        if "losses" in ours and "losses" in reference:
            pairs = zip(ours["losses"], reference["losses"], strict=True)
            apart = max(abs(a - b) / abs(b) for a, b in pairs)
            table[name] = {"apart": apart, "tolerance": setting.tolerance, "losses": ours["losses"]}
        else:
            table[name] = {"error": ours.get("error") or f"on the CPU: {reference['error']}"}
    wrong = [
        f"{name}: {one['apart']:.1e} apart, {one['tolerance']:.0e} allowed"
        for name, one in table.items()
        if "apart" in one and not one["apart"] <= one["tolerance"]
    ]
    return {"settings": table, "wrong": wrong}


def main() -> int:
    """Reads the command line; `--side` is for the processes of the sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="a CPU on both sides")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a side, then it is ended")
    parser.add_argument("--side", choices=("gpu", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    options = parser.parse_args()
    if options.side:
        asked = {name: SETTINGS[name] for name in options.settings}
        for answer in answers(options.side, asked):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        return 0
    found = compare(tiny=options.tiny, seconds=options.seconds)
    for name, one in found["settings"].items():
        words = f"{one['apart']:.1e} apart" if "apart" in one else one["error"]
        sys.stdout.write(f"{name:32} {words}\n")
    for words in found["wrong"]:
        sys.stdout.write(f"too far: {words}\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
