"""What `gpu_vs_torch` compares: rows, their sizes on a GPU and tiny, and how a call is timed."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

BATCHES = 10
LOSSES = 10
ROUNDS = 5
COMMON = (
    "Mesh.data = 1", "Mesh.fsdp = 1", "Mesh.tensor = 1", "Mesh.expert = 1", "Sharding.zero = 0",
    "Schedule.warmup_steps = 0", "Schedule.name = 'constant'", "Train.steps = 1000000000",
    "Train.accumulation = 1", "Train.eval_every = 0", "Train.save_every = 0",
)  # fmt: skip
TEXT = (
    # 'elementwise' moves the least bytes in a loop over layers: see RESULTS.md.
    "Remat.policy = 'elementwise'",
    "SOURCE = 'synthetic'", "TOKENIZER = 'byte'", "TextData.separate_documents = False",
    "Loss.chunk_size = None",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One train step against PyTorch's.

    Attributes:
      says: the row's name in the table.
      config: a shipped config.
      family: what the PyTorch side builds.
      sizes: settings of the model, by their gin names.
      batch: rows of a batch.
      length: tokens a row; None for images.
      tiny: `sizes`, `batch`, `length` and perhaps `learning_rate` on a CPU.
      bindings: gin bindings over config, sizes and batch; {quarter} and {eighth} are of `length`.
      ours: name -> further bindings: our settings that are tried.
      params: the dtype of parameters and moments on both sides.
      remat: whether both sides recompute every layer.
      equal_layers: the losses are compared with as many layers; None: with all of them.
      narrow_losses: how many of the ten losses are compared in bfloat16: batch norm makes of its
        rounding another run within a few steps (float32 keeps all ten, `tests`).
      learning_rate: of both sides.
      clip_norm: of both sides.
      anchor: published figures, for the table's reader.
    """

    says: str
    config: str
    family: Literal["GPT", "Llama", "Mixtral", "ResNet"]
    sizes: Mapping[str, Any]
    batch: int
    length: int | None
    tiny: Mapping[str, Any]
    bindings: tuple[str, ...] = ()
    ours: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: {"": ()})
    params: str = "float32"
    remat: bool = False
    equal_layers: int | None = None
    narrow_losses: int = 10
    learning_rate: float = 3e-4
    clip_norm: float | None = 1.0
    anchor: str = ""

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return "images" if self.length is None else "tokens"

    @property
    def units(self) -> int:
        """Tokens or images of a step."""
        return self.batch * (self.length or 1)

    def made_tiny(self) -> "TrainRow":
        """The same row in sizes that a CPU runs in seconds."""
        tiny = dict(self.tiny)
        batch, length = tiny.pop("batch"), tiny.pop("length", None)
        # A tiny model's losses must move within ten steps.
        rate = tiny.pop("learning_rate", self.learning_rate)
        layers = None if self.equal_layers is None else 1
        return dataclasses.replace(
            self, sizes={**self.sizes, **tiny}, batch=batch, length=length, equal_layers=layers,
            learning_rate=rate,
        )  # fmt: skip

    def shallow(self) -> "TrainRow":
        """The row whose losses are compared."""
        if self.equal_layers is None:
            return self
        return dataclasses.replace(self, sizes={**self.sizes, "num_layers": self.equal_layers})

    def gin(self, compute: str, setting: str = "") -> list[str]:
        """Every binding over the shipped config, with those of one of `ours`."""
        sizes = [f"{self.family}.{k} = {v!r}" for k, v in self.sizes.items() if k != "image_size"]
        own = [
            *COMMON, *(TEXT if self.length else ()),
            f"Train.global_batch_size = {self.batch}", f"Precision.compute = {compute!r}",
            f"Precision.params = {self.params!r}", f"Optimizer.clip_norm = {self.clip_norm}",
            f"Optimizer.learning_rate = {self.learning_rate}",
        ]  # fmt: skip
        if self.remat:
            own.append("Remat.policy = 'full'")
        if self.length is None:
            size, classes = self.sizes["image_size"], self.sizes["num_classes"]
            own += [
                f"ImageData.image_size = {size}", f"ImageData.num_classes = {classes}",
                "ImageData.source = 'synthetic'", "ImageData.heldout_split = None",
            ]  # fmt: skip
        else:
            own += [
                f"TextData.sequence_length = {self.length}",
                f"{self.family}.context_length = {self.length}",
                f"TextData.synthetic_vocab_size = {self.sizes['vocab_size']}",
            ]  # fmt: skip
        length = self.length or 0
        more = (*self.bindings, *self.ours[setting])
        return [*sizes, *own, *(b.format(quarter=length // 4, eighth=length // 8) for b in more)]

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets of the batches that both sides go round."""
        rng = np.random.default_rng(0)
        if self.length is None:
            size, classes = self.sizes["image_size"], self.sizes["num_classes"]
            shape = (self.batch, size, size, 3)
            return [
                (rng.standard_normal(shape, np.float32), rng.integers(0, classes, self.batch))
                for _ in range(BATCHES)
            ]
        shape = (BATCHES, self.batch, self.length + 1)
        # A skewed vocabulary: there is something to learn in ten steps.
        tokens = (self.sizes["vocab_size"] * rng.random(shape) ** 3).astype(np.int32)
        return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


_LLAMA = {"rope_scaling": 1.0, "rope_theta": 500000.0, "norm_eps": 1e-5}
_TINY_GPT = {
    "vocab_size": 96, "num_layers": 2, "embed_dim": 32, "num_heads": 2, "batch": 4, "length": 32,
}  # fmt: skip
_TINY_LLAMA = {**_TINY_GPT, "num_kv_heads": 1, "mlp_dim": 48}
_TINY_MIXTRAL = {**_TINY_LLAMA, "num_experts": 4, "learning_rate": 3e-4}
_CHUNKED = "Loss.chunk_size = {quarter}"
_OURS = {
    "": (_CHUNKED,),
    "unrolled": (_CHUNKED, "Scan.layers_per_iteration = 0"),
    "unrolled, all kept": (
        _CHUNKED, "Scan.layers_per_iteration = 0", "Remat.policy = 'none'",
    ),
    "whole loss": (),
}  # fmt: skip

TRAIN = {
    "gpt2_124m": TrainRow(
        says="GPT-2 124M, 64 x 1024", config="gpt2_124m", family="GPT", batch=64, length=1024,
        sizes={"vocab_size": 50304, "num_layers": 12, "embed_dim": 768, "num_heads": 12},
        tiny=_TINY_GPT, ours=_OURS,
        anchor="350k (H100, torch), 463k (H100, llm.c) tokens/s",
    ),
    "llama_8b": TrainRow(
        says="Llama 8B, 8 x 4096, all bfloat16, every layer recomputed", config="llama_8b",
        family="Llama", batch=8, length=4096,
        sizes={
            "vocab_size": 128256, "num_layers": 32, "embed_dim": 4096, "num_heads": 32,
            "num_kv_heads": 8, "mlp_dim": 14336, "tie_embeddings": False, **_LLAMA,
        },
        tiny=_TINY_LLAMA, params="bfloat16", remat=True, equal_layers=2, learning_rate=1e-4,
        bindings=("Loss.chunk_size = {eighth}",),
        # PyTorch's moments have the parameters' dtype.
        ours={"": ("Optimizer.moments = 'bfloat16'",), "float32 moments": ()},
        anchor="10,471 tokens/s (H200, KempnerForge, float32 masters)",
    ),
    "llama_1b": TrainRow(
        says="Llama 1B, 2 x 8192", config="llama_1b", family="Llama", batch=2, length=8192,
        sizes={
            "vocab_size": 128256, "num_layers": 16, "embed_dim": 2048, "num_heads": 32,
            "num_kv_heads": 8, "mlp_dim": 8192, "tie_embeddings": True, **_LLAMA,
        },
        tiny=_TINY_LLAMA, ours=_OURS, learning_rate=1e-5,
        anchor="45.5k tokens/s (H100, MPT-1B at 2048)",
    ),
    "llama_3b": TrainRow(
        says="Llama 3B, 4 x 4096, every layer recomputed", config="llama_1b", family="Llama",
        batch=4, length=4096,
        sizes={
            "vocab_size": 128256, "num_layers": 28, "embed_dim": 3072, "num_heads": 24,
            "num_kv_heads": 8, "mlp_dim": 8192, "tie_embeddings": True, **_LLAMA,
        },
        tiny=_TINY_LLAMA, bindings=(_CHUNKED,), remat=True, equal_layers=2, learning_rate=1e-4,
        anchor="27.0k tokens/s (one of 8 H100, MPT-3B at 1024)",
    ),
    # What a token's layers multiply is 0.2 billion of 0.8 billion weights.
    "mixtral": TrainRow(
        says="Mixtral, 8 experts that take all who come, 8 x 2048", config="mixtral_8x7b",
        family="Mixtral", batch=8, length=2048,
        sizes={
            "vocab_size": 32000, "num_layers": 8, "embed_dim": 1024, "num_heads": 16,
            "num_kv_heads": 4, "mlp_dim": 3584, "num_experts": 8, "experts_per_token": 2,
            "tie_embeddings": False, "rope_theta": 1000000.0, "norm_eps": 1e-5,
        },
        tiny=_TINY_MIXTRAL, equal_layers=2, learning_rate=1e-5,
        bindings=(
            _CHUNKED, "Mixtral.capacity_factor = None", "Mixtral.balance_weight = 0.0",
            "Mixtral.router_z_weight = 0.0",
        ),
        ours={"": (), "unrolled": ("Scan.layers_per_iteration = 0",)},
    ),
    "gpt2_1558m": TrainRow(
        says="GPT-2 1.5B, 16 x 1024", config="gpt2_124m", family="GPT", batch=16, length=1024,
        sizes={"vocab_size": 50304, "num_layers": 48, "embed_dim": 1600, "num_heads": 25},
        tiny=_TINY_GPT, bindings=(_CHUNKED,), learning_rate=1e-5,
        anchor="40k (H100, torch), 48.6k (H100, llm.c) tokens/s",
    ),
    "resnet50": TrainRow(
        says="ResNet-50, 224, batch 256", config="resnet50_imagenet", family="ResNet",
        sizes={"depth": 50, "num_classes": 1000, "image_size": 224}, batch=256, length=None,
        tiny={"width": 8, "num_classes": 8, "image_size": 32, "batch": 8},
        bindings=("Loss.label_smoothing = 0.0", "Optimizer.weight_decay = 5e-4"),
        narrow_losses=3, learning_rate=0.05, clip_norm=None, anchor="2,470-3,660 (A100) images/s",
    ),
}  # fmt: skip
# Rows of single operations and of variants of our own step: see gpu_ours and gpu_torch.
CELLS = ("ceilings", "attention", "loss_head", "eight_bits", "remat", "loader")
# The headline first: a run that is cut short has it.
ROWS = ("ceilings", "gpt2_124m", "llama_1b", "llama_3b", "llama_8b", "eight_bits", "resnet50",
        "attention", "loss_head", "remat", "mixtral", "gpt2_1558m", "loader")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
      row: of ROWS.
      side: 'jaxtrain' or 'torch'.
      setting: of `TrainRow.ours` or `gpu_torch.SETTINGS`; None for rows of cells.
      tiny: whether to run in tiny sizes.
      compute: the compute dtype of train steps.
      seconds: of timing.
      weights: the file that our side writes its weights to and PyTorch's reads.
    """

    row: str
    side: str
    setting: str | None
    tiny: bool
    compute: str
    seconds: float
    weights: str

    def train_row(self) -> TrainRow:
        """The train row in its size."""
        row = TRAIN[self.row]
        return row.made_tiny() if self.tiny else row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One operation in one setting of one side.

    Attributes:
      case: what is compared, such as "head_dim 64, T 1024".
      setting: how, such as "cudnn".
      seconds: of one call, one for each round.
      work: operations or bytes of one call, for a rate; None shows no rate.
      unit: of the rate.
      bytes: peak temporaries or memory; None where it is not known.
      check: numbers that every side must agree on.
      error: why there is no time.
    """

    case: str
    setting: str
    seconds: Sequence[float] = ()
    work: float | None = None
    unit: str = ""
    bytes: int | None = None
    check: Sequence[float] = ()
    error: str = ""


def results(
    task: Task,
    train: Callable[[Task], dict[str, Any]],
    cells: Mapping[str, Callable[[bool, float], Iterator[Cell]]],
) -> Iterator[dict[str, Any]]:
    """What a side has of a task, for JSON: of single operations so far, whenever one is done.

    Args:
      task: what is asked.
      train: makes the result of a train row.
      cells: of the other rows, whether in tiny sizes and seconds of each -> its operations.
    """
    if task.row in TRAIN:
        yield train(task)
        return
    done = []
    for one in cells[task.row](task.tiny, task.seconds / 10):
        done.append(dataclasses.asdict(one))
        yield {"cells": done}


def timed(call: Callable[[], Any], wait: Callable[[Any], None], seconds: float) -> list[float]:
    """Seconds a call in each of ROUNDS rounds; calls are queued and waited for once a round."""
    for _ in range(2):
        wait(call())
    begin = time.perf_counter()
    wait(call())
    one = time.perf_counter() - begin
    calls = max(1, round(seconds / ROUNDS / max(one, 1e-6)))
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(calls):
            handle = call()
        wait(handle)
        found.append((time.perf_counter() - begin) / calls)
    return found


def normal(seed: int, *shape: int) -> np.ndarray:
    """The float32 numbers that both sides of an operation start from."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def attention_cases(tiny: bool) -> list[tuple[int, int, bool]]:
    """(head_dim, length, packed)."""
    lengths = (64,) if tiny else (512, 2048, 8192, 32768)
    cases = [(H, T, packed) for H in (64, 128) for T in lengths for packed in (False, True)]
    # What most models are trained with comes first: a row that is out of time has it.
    return sorted(cases, key=lambda case: (case[1] not in (2048, 8192), case[2]))


def attention_sizes(head_dim: int, length: int, tiny: bool) -> tuple[int, int]:
    """Rows and heads: 16k tokens of a model 2048 wide, or one row."""
    return (1, 2) if tiny else (max(1, 16384 // length), 2048 // head_dim)


def products(tiny: bool) -> list[tuple[str, int, int, int]]:
    """(dtype, M, K, N) of products [M, K] x [K, N]: squares, then those of models' layers."""
    squares = [(dtype, n, n, n) for n in ((64,) if tiny else (8192, 4096))
               for dtype in ("bfloat16", "float8_e4m3fn")]  # fmt: skip
    layers = [
        (65536, 768, 3072), (65536, 768, 768), (16384, 768, 50304), (16384, 2048, 8192),
        (16384, 4096, 14336), (2048, 4096, 4096), (256, 4096, 4096),
    ]  # fmt: skip
    return squares + ([] if tiny else [("bfloat16", *sizes) for sizes in layers])


def block(seed: int, rows: int, columns: int) -> np.ndarray:
    """Float32 numbers [rows, columns] that repeat: drawn in a moment however large the matrix."""
    one = normal(seed, min(rows, 512), min(columns, 512))
    times = (-(-rows // one.shape[0]), -(-columns // one.shape[1]))
    return np.tile(one, times)[:rows, :columns]


def launches(tiny: bool) -> int:
    """Products of 128 x 128 in a chain: what starting a kernel costs."""
    return 4 if tiny else 256


def loss_head_sizes(tiny: bool) -> tuple[int, int, int]:
    """Rows, length, width."""
    return (2, 32, 16) if tiny else (8, 1024, 2048)
