"""PyTorch's side of `gpu_vs_torch`: the same train steps and operations, in several settings."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks import torch_models
from benchmarks.gpu_rows import (
    BATCHES,
    LOSSES,
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
from benchmarks.torch_large import Llama, ResNet50

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclasses.dataclass(frozen=True)
class Setting:
    """How PyTorch runs a train step.

    Attributes:
      mode: of torch.compile; None runs eagerly.
      attention: 'flash' or 'cudnn'.
      autocast: torch.autocast; otherwise parameters are cast as a whole at the start of a step.
    """

    mode: str | None
    attention: str
    autocast: bool = True


SETTINGS = {
    "compile, cuDNN": Setting("default", "cudnn"),
    "compile, flash": Setting("default", "flash"),
    "compile, cuDNN, cast": Setting("default", "cudnn", autocast=False),
    "max-autotune, cuDNN, cast": Setting(
        "max-autotune-no-cudagraphs", "cudnn", autocast=False
    ),
    "eager, cuDNN": Setting(None, "cudnn"),
}  # fmt: skip


def run(task: Task) -> Iterator[dict[str, Any]]:
    """As `gpu_rows.results`."""
    return results(task, train, CELLS)


def synchronize(_: Any = None) -> None:
    """Waits for the GPU."""
    if CUDA:
        torch.cuda.synchronize()


def peak_bytes() -> int | None:
    """The most device memory that tensors have had since it was last asked."""
    if not CUDA:
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


# -- train steps -----------------------------------------------------------------------------------


def train(task: Task) -> dict[str, Any]:
    """Losses of the first steps, then seconds a step."""
    row, setting = task.train_row(), SETTINGS[task.setting or ""]
    attend_by(setting.attention)
    began = time.perf_counter()
    small = row.shallow()
    step = stepper(small, model_of(small, task.weights), setting, task)
    first, losses = 0.0, []
    for _ in range(LOSSES):
        losses.append(float(step()))
        first = first or time.perf_counter() - began
    if row.equal_layers is not None:
        del step
        torch.compiler.reset()
        step = stepper(row, model_of(row, None), setting, task)
    peak_bytes()
    seconds = timed(step, float, task.seconds)
    return {
        "losses": losses,
        "seconds": seconds,
        "first_step_seconds": first,
        "peak_bytes": peak_bytes(),
    }


def attend_by(backend: str) -> None:
    """Leaves one way to attend; a CPU has its own."""
    if CUDA:
        cuda: Any = torch.backends.cuda
        cuda.enable_math_sdp(False)
        cuda.enable_mem_efficient_sdp(False)
        cuda.enable_flash_sdp(backend == "flash")
        cuda.enable_cudnn_sdp(backend == "cudnn")


def model_of(row: TrainRow, weights_path: str | None) -> torch.nn.Module:
    """The row's model on the device, with our weights where there are any."""
    weights = {} if weights_path is None else dict(np.load(weights_path))
    dtype = torch.bfloat16 if row.params == "bfloat16" else torch.float32
    if row.family == "ResNet":
        model: Any = ResNet50(weights).to(memory_format=torch.channels_last)
    elif row.family == "GPT":
        model = torch_models.GPT(weights, recompute=row.remat)
    else:
        with torch.device(DEVICE):
            model = Llama(row.sizes, recompute=row.remat)
        if weights_path is not None:
            model.load(weights)
    return model.to(device=DEVICE, dtype=dtype)


def stepper(
    row: TrainRow, model: torch.nn.Module, setting: Setting, task: Task
) -> Callable[[], torch.Tensor]:
    """A function that takes the next step and gives its loss."""
    dtype = torch.bfloat16 if task.compute == "bfloat16" else torch.float32
    batches = []
    for inputs, targets in row.batches():
        x = torch.from_numpy(inputs.copy()).to(DEVICE)
        # The bytes of our images are channels last already.
        x = x.permute(0, 3, 1, 2) if row.length is None else x
        batches.append((x, torch.from_numpy(targets.astype(np.int64)).to(DEVICE)))
    if row.family == "ResNet":
        optimizer = torch_models.sgd(model, row.learning_rate)
    else:
        optimizer = torch_models.adamw(model, row.learning_rate)
    casts = not setting.autocast and row.params == "float32" and row.family != "ResNet"

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not casts:
            return model(x, y)
        cast = {name: p.to(dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, cast, (x, y))

    loss_of_batch: Any = loss_of
    if setting.mode is not None:
        # Tiny sizes try the code, not the code generator.
        if task.tiny:
            loss_of_batch = torch.compile(loss_of, backend="eager")
        else:
            loss_of_batch = torch.compile(loss_of, mode=setting.mode)
    autocasts = dtype != torch.float32 and row.params == "float32" and not casts
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        around = torch.autocast(DEVICE, dtype) if autocasts else contextlib.nullcontext()
        with around:
            loss = loss_of_batch(*batches[count % BATCHES])
        loss.backward()
        torch_models.clip(model, row.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1
        return loss.detach()

    return step


# -- single operations -----------------------------------------------------------------------------


def cell(
    case: str, setting: str, seconds: float, call: Callable[[], Any],
    check: Callable[[Any], list[float]] = lambda _: [], **more: Any,
) -> Cell:  # fmt: skip
    """Times a call; where memory does not suffice, or no kernel does it, that is its error."""
    peak_bytes()
    held = torch.cuda.memory_allocated() if CUDA else 0
    try:
        checked = check(call())
        took = timed(call, synchronize, seconds)
    except torch.OutOfMemoryError:
        return Cell(case=case, setting=setting, error="out of memory")
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return Cell(case=case, setting=setting, error="no such kernel for this")
    peak = peak_bytes()
    temporaries = None if peak is None else peak - held
    return Cell(case=case, setting=setting, seconds=took, bytes=temporaries, check=checked, **more)


def ceilings(tiny: bool, seconds: float) -> Iterator[Cell]:
    """What the chip gives to one product and to one copy."""
    one = torch.ones((), device=DEVICE)

    def in_float8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found: Any = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return found

    x = torch.zeros(2**12 if tiny else 2**30, device=DEVICE)
    yield cell("copy", "", seconds, lambda: x + 1, work=2 * x.nbytes, unit="B/s")
    for dtype, M, K, N in products(tiny):
        product = torch.matmul if dtype == "bfloat16" else in_float8
        a, b = (torch.from_numpy(block(i, *shape)).to(DEVICE, getattr(torch, dtype))
                for i, shape in enumerate(((M, K), (K, N))))  # fmt: skip
        if product is in_float8:
            # The library's own float8 product has its second matrix by columns.
            b = b.T.contiguous().T
        yield cell(f"{dtype} product {M} x {K} x {N}", "", seconds,
                   functools.partial(product, a, b), work=2 * M * K * N, unit="FLOP/s",
                   check=lambda found: [float(x) / K for x in found[0, :4]])  # fmt: skip # noqa: B023
    a, b = (torch.from_numpy(block(i, 128, 128) / 8).to(DEVICE, torch.bfloat16) for i in range(2))
    yield cell("chain of products 128^3", "", seconds,
               lambda: functools.reduce(lambda x, _: x @ b, range(launches(tiny)), a),
               work=launches(tiny), unit="kernels/s")  # fmt: skip


def attention_table(tiny: bool, seconds: float) -> Iterator[Cell]:
    """Forward and backward, causal; packed rows have no fast kernel but a mask in memory here."""
    for H, T, packed in attention_cases(tiny):
        B, N = attention_sizes(H, T, tiny)
        q, k, v = (
            torch.from_numpy(normal(i, B, T, N, H)).to(DEVICE, torch.bfloat16).transpose(1, 2)
            .detach().requires_grad_() for i in range(3)
        )  # fmt: skip
        ids = torch.arange(T, device=DEVICE) // (T // 4)
        seen = (ids[:, None] == ids[None]).tril()[None, None] if packed else None
        for backend in ("cudnn",) if packed else ("cudnn", "flash"):
            attend_by(backend)

            def both(seen: Any = seen, qkv: Any = (q, k, v)) -> Any:
                out = functional.scaled_dot_product_attention(
                    *qkv, attn_mask=seen, is_causal=seen is None
                )
                return (out, *torch.autograd.grad(out.float().sum(), qkv))

            case = f"head_dim {H}, T {T}{', packed' if packed else ''}"
            yield cell(case, backend, seconds, both, work=7 * B * N * T * T * H, unit="FLOP/s",
                       check=lambda found: [float(x[0, 0, -1, d].detach()) for x in found
                                            for d in range(4)])  # fmt: skip


def loss_head(tiny: bool, seconds: float) -> Iterator[Cell]:
    """Output matrix and cross entropy with their gradients, compiled."""
    B, T, D = loss_head_sizes(tiny)

    def loss(h: torch.Tensor, table: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy((h @ table.T).flatten(0, 1).float(), targets.flatten())

    compiled: Any = torch.compile(loss, backend="eager" if tiny else "inductor")
    for V in (96,) if tiny else (50304, 128256):
        h = torch.from_numpy(normal(0, B, T, D)).to(DEVICE, torch.bfloat16).requires_grad_()
        table = torch.from_numpy(0.02 * normal(1, V, D)).to(DEVICE, torch.bfloat16)
        table.requires_grad_()
        targets = torch.from_numpy(np.random.default_rng(2).integers(0, V, (B, T))).to(DEVICE)

        def both(arguments: Any = (h, table, targets)) -> Any:
            found = compiled(*arguments)
            return (found, *torch.autograd.grad(found, arguments[:2]))

        yield cell(f"vocabulary {V}", "compile", seconds, both, work=6 * B * T * D * V,
                   unit="FLOP/s", check=lambda found: [float(found[0].detach())])  # fmt: skip


CELLS: dict[str, Callable[[bool, float], Iterator[Cell]]] = {
    "ceilings": ceilings,
    "attention": attention_table,
    "loss_head": loss_head,
}
