"""Our side of `gpu_vs_torch`: train steps through Trainer, and single operations."""

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_predictions import predicted
from benchmarks.gpu_rows import (
    BATCHES,
    LOSSES,
    TRAIN,
    Cell,
    Task,
    TrainRow,
    attention_cases,
    attention_sizes,
    block,
    launches,
    loss_head_sizes,
    normal,
    products,
    results,
    timed,
)
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.parallel.chips import CHIPS, peak_flops
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.objectives.losses import cross_entropy, over_chunks
from jaxtrain.training.settings import load_config

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def run(task: Task) -> Iterator[dict[str, Any]]:
    """As `gpu_rows.results`."""
    return results(task, train, CELLS)


# -- train steps ----------------------------------------------------------------------------------


def train(task: Task) -> dict[str, Any]:
    """Losses of the first steps, then seconds a step."""
    row, setting = task.train_row(), task.setting or ""
    small = row.shallow()
    began = time.perf_counter()
    trainer = Trainer(load_config(small.config, small.gin(task.compute, setting)))
    if setting == "":
        named = {name.replace("/", "."): x for name, x in trainer.weights().items()}
        np.savez(task.weights, **{name: x.astype(np.float32) for name, x in named.items()})
    batches = placed(small, trainer)
    first, losses = 0.0, []
    for i in range(LOSSES):
        losses.append(float(trainer.step(batches[i])["loss"]))
        first = first or time.perf_counter() - began
    if row.equal_layers is not None:
        del trainer, batches  # their memory is needed
        trainer = Trainer(load_config(row.config, row.gin(task.compute, setting)))
    seconds = time_steps(trainer, placed(row, trainer), task.seconds)
    flops = model_flops(trainer, row)
    peak = peak_flops(jax.devices()[0].device_kind)
    return {
        "losses": losses,
        "seconds": seconds,
        "first_step_seconds": first,
        "peak_bytes": peak_bytes(),
        "kernel": getattr(trainer.program.setup.execution, "kernel", None),
        "mfu": None if peak is None else flops / float(np.median(seconds)) / peak,
        "device": jax.devices()[0].device_kind,
        "planned": planned(trainer, task),
    }


def placed(row: TrainRow, trainer: Trainer) -> list[Batch]:
    """The row's batches on the device."""
    found = []
    for inputs, targets in row.batches():
        positions = None
        if row.length is not None:
            positions = np.broadcast_to(np.arange(row.length, dtype=np.int32), inputs.shape)
        mask = np.ones(targets.shape, np.float32)
        batch = Batch(inputs, targets.astype(np.int32), mask, None, positions)
        found.append(jax.device_put(batch, trainer.program.setup.batch_shardings(batch)))
    return found


def time_steps(trainer: Trainer, batches: list[Batch], seconds: float) -> list[float]:
    """Seconds a step, rounds of `seconds` together."""
    count = 0

    def step() -> Any:
        nonlocal count
        count += 1
        return trainer.step(batches[count % BATCHES])["loss"]

    return timed(step, jax.block_until_ready, seconds)


def model_flops(trainer: Trainer, row: TrainRow) -> float:
    """The model's FLOPs of a step, attention causal."""
    model = trainer.config.train.model
    if row.length is not None:
        return model.flops((row.length,)) / row.length * row.units
    size = row.sizes["image_size"]
    return model.flops((size, size, 3)) * row.units


def planned(trainer: Trainer, task: Task) -> dict[str, Any] | None:
    """What the closed forms of `plan` say of this step on this device, and what its schedule was
    said to take before (`gpu_predictions`); None for a device unknown."""
    kind = jax.devices()[0].device_kind
    chip = next((chip for chip in CHIPS.values() if kind in chip.device_kinds), None)
    if chip is None or chip.kind != "gpu":
        return None
    made = plan(trainer.config, f"{chip.name}:1x1", compile=False)
    before = None if task.tiny else predicted(task.row, task.setting or "", chip.name)
    return {"seconds": made.time.seconds, "bytes": made.total, "before": before}


def peak_bytes() -> int | None:
    """The most device memory that this process has had; None where the device does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


# -- single operations ----------------------------------------------------------------------------


def cell(
    case: str, setting: str, seconds: float, function: Callable[..., Any], *arguments: Any,
    check: Callable[[Any], list[float]] = lambda _: [], **more: Any,
) -> Cell:  # fmt: skip
    """Compile and time `function(*arguments)`; an out-of-memory or other error is recorded."""
    try:
        compiled = jax.jit(function).lower(*arguments).compile()
        stats: Any = compiled.memory_analysis()
        checked = check(compiled(*arguments))
        took = timed(lambda: compiled(*arguments), jax.block_until_ready, seconds)
    except UserError as error:
        return Cell(case=case, setting=setting, error=str(error).splitlines()[0])
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        return Cell(case=case, setting=setting, error="out of memory")
    temporaries = stats.temp_size_in_bytes
    return Cell(case=case, setting=setting, seconds=took, bytes=temporaries, check=checked, **more)


def ceilings(tiny: bool, seconds: float) -> Iterator[Cell]:
    """What the chip gives to one product and to one copy."""

    def product(a: Any, b: Any) -> Any:
        return jnp.matmul(a, b, preferred_element_type=jnp.bfloat16)

    def chain(x: Any, b: Any) -> Any:
        for _ in range(launches(tiny)):
            x = product(x, b)
        return x

    x = jnp.zeros((2**12 if tiny else 2**30,), jnp.float32)
    yield cell("copy", "", seconds, lambda x: x + 1, x, work=2 * x.nbytes, unit="B/s")
    for dtype, M, K, N in products(tiny):
        a, b = (jnp.asarray(block(i, *shape), dtype) for i, shape in enumerate(((M, K), (K, N))))
        yield cell(f"{dtype} product {M} x {K} x {N}", "", seconds, product, a, b,
                   work=2 * M * K * N, unit="FLOP/s",
                   check=lambda found: [float(x) / K for x in found[0, :4]])  # fmt: skip # noqa: B023
    a, b = (jnp.asarray(block(i, 128, 128) / 8, jnp.bfloat16) for i in range(2))
    yield cell("chain of products 128^3", "", seconds, chain, a, b, work=launches(tiny),
               unit="kernels/s")  # fmt: skip


def attention_table(tiny: bool, seconds: float) -> Iterator[Cell]:
    """Forward and backward, causal, of 16k tokens; packed rows hold documents of a quarter."""
    dtype = jnp.bfloat16
    for H, T, packed in attention_cases(tiny):
        B, N = attention_sizes(H, T, tiny)
        q, k, v = (jnp.asarray(normal(i, B, T, N, H), dtype) for i in range(3))
        ids = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) // (T // 4), (B, T))
        for kernel in ("cudnn", "triton", "xla", *(("blocked",) if tiny else ())):

            def both(q: Any, k: Any, v: Any, kernel: str = kernel, ids: Any = ids) -> Any:
                segments = ids if packed else None  # noqa: B023 - called in this turn
                mask = Mask(segment_ids_BT=segments, segment_ids_BS=segments)

                def total(q: Any, k: Any, v: Any) -> Any:
                    out = attention(q, k, v, mask, kernel=kernel)
                    return out.astype(jnp.float32).sum(), out

                return jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)

            case = f"head_dim {H}, T {T}{', packed' if packed else ''}"
            # 2 products forward and 5 backward, half of them under the mask.
            yield cell(case, kernel, seconds, both, q, k, v, work=7 * B * N * T * T * H,
                       unit="FLOP/s", check=sample_of)  # fmt: skip


def sample_of(found: Any) -> list[float]:
    """A few numbers of output and gradients."""
    gradients, out = found
    return [float(x[0, -1, 0, d]) for x in (out, *gradients) for d in range(4)]


def loss_head(tiny: bool, seconds: float) -> Iterator[Cell]:
    """Output matrix and cross entropy with their gradients, whole and in chunks."""
    B, T, D = loss_head_sizes(tiny)
    for V in (96,) if tiny else (50304, 128256):
        h = jnp.asarray(normal(0, B, T, D), jnp.bfloat16)
        table = jnp.asarray(0.02 * normal(1, V, D), jnp.bfloat16)
        targets = jnp.asarray(np.random.default_rng(2).integers(0, V, (B, T)), jnp.int32)
        for chunks in (1, 4, 16):

            def loss(h: Any, table: Any, targets: Any, chunks: int = chunks) -> Any:
                if chunks == 1:
                    return cross_entropy(jnp.einsum("BTD,VD->BTV", h, table), targets).mean()

                def losses(logits: Any, targets: Any, mask: Any) -> Any:
                    return mask * cross_entropy(logits, targets)

                mask = jnp.ones((B, T))
                return over_chunks(losses, T // chunks, h, table, targets, mask) / (B * T)

            yield cell(f"vocabulary {V}", f"{chunks} chunks" if chunks > 1 else "whole", seconds,
                       jax.value_and_grad(loss, (0, 1)), h, table, targets,
                       work=6 * B * T * D * V, unit="FLOP/s",
                       check=lambda found: [float(found[0])])  # fmt: skip


# -- variants of our own step ---------------------------------------------------------------------


def step_cells(row: TrainRow, settings: Mapping[str, list[str]], seconds: float) -> Iterator[Cell]:
    """The step of a row with further bindings."""
    for setting, bindings in settings.items():
        try:
            trainer = Trainer(load_config(row.config, [*row.gin("bfloat16"), *bindings]))
            stats: Any = trainer.lower().compile().memory_analysis()
            batches = placed(row, trainer)
            losses = [float(trainer.step(batches[i])["loss"]) for i in range(3)]
            took = time_steps(trainer, batches, 10 * seconds)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            yield Cell(case=row.says, setting=setting, error="out of memory")
        else:
            yield Cell(case=row.says, setting=setting, seconds=took, work=float(row.units),
                       unit=f"{row.unit}/s", bytes=stats.temp_size_in_bytes,
                       check=losses)  # fmt: skip
        trainer = None


def remat(tiny: bool, seconds: float) -> Iterator[Cell]:
    """What recomputing costs and saves, and what the loop over layers does."""
    row = TRAIN["llama_1b"].made_tiny() if tiny else TRAIN["llama_1b"]
    policies = ("none", "elementwise", "dots", "full")
    ladder = {f"remat {p!r}": [f"Remat.policy = {p!r}"] for p in policies}
    loops = {f"{n} layers an iteration": [f"Scan.layers_per_iteration = {n}"] for n in (2, 0)}
    return step_cells(row, {**ladder, **loops}, seconds)


def eight_bits(tiny: bool, seconds: float) -> Iterator[Cell]:
    """Products of 8 bits in a step: Llama 8B's widths with as many layers as an H100 has room for,
    in float32 masters."""
    row = TRAIN["llama_8b"].made_tiny() if tiny else TRAIN["llama_8b"]
    layers = 2 if tiny else 8
    row = dataclasses.replace(
        row, says=f"{row.says}, {layers} layers", sizes={**row.sizes, "num_layers": layers},
        params="float32", ours={"": ()},
    )  # fmt: skip
    kinds = {"bfloat16": "compute", "float8": "float8", "int8": "int8"}
    return step_cells(row, {name: [f"Precision.matmul = {k!r}"] for name, k in kinds.items()},
                      seconds)  # fmt: skip


def loader(tiny: bool, seconds: float) -> Iterator[Cell]:
    """`Trainer.train` on text from a file against steps on batches that lie on the device."""
    row = TRAIN["gpt2_124m"].made_tiny() if tiny else TRAIN["gpt2_124m"]
    row = dataclasses.replace(row, sizes={**row.sizes, "vocab_size": 50304 if not tiny else 256})
    yield from step_cells(row, {"batches on the device": []}, seconds)
    letters = random.Random(0).choices("abcdefghijklmnop \n", k=20_000 if tiny else 20_000_000)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text("".join(letters))
        for every in (50, 1):
            own = [f"SOURCE = {str(file)!r}", f"Train.log_every = {every}",
                   "Train.eval_batches = 1", "TextData.heldout_fraction = 0.05"]  # fmt: skip
            trainer = Trainer(load_config(row.config, [*row.gin("bfloat16"), *own]))
            trainer.train(steps=2)
            begin = time.perf_counter()
            trainer.train(steps=2)
            short = max(time.perf_counter() - begin, 1e-3)
            steps = max(4, min(200, round(10 * seconds / short)))
            took = []
            for _ in range(3):
                marks = [time.perf_counter()]
                for length in (steps, 3 * steps):
                    trainer.train(steps=length)
                    marks.append(time.perf_counter())
                # What happens once a call, such as the evaluation at its end, is in neither.
                took.append((marks[2] - marks[1] - (marks[1] - marks[0])) / (2 * steps))
            yield Cell(case=row.says, setting=f"text from a file, logged every {every}",
                       seconds=took, work=float(row.units), unit="tokens/s")  # fmt: skip


CELLS: dict[str, Callable[[bool, float], Iterator[Cell]]] = {
    "ceilings": ceilings,
    "attention": attention_table,
    "loss_head": loss_head,
    "eight_bits": eight_bits,
    "remat": remat,
    "loader": loader,
}
