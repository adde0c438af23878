"""The whole configuration of a run: one frozen dataclass a section, and where configs are found."""

import dataclasses
import html
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jaxtrain.data
import jaxtrain.models
from jaxtrain import config as gin_files
from jaxtrain.attempts.watchdog import Deadlines
from jaxtrain.attention import Attention
from jaxtrain.buckets import on_disk
from jaxtrain.checkpoint import Checkpoint
from jaxtrain.config import configurable
from jaxtrain.corruption import Corruption
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import UserError, did_you_mean, refuse_below
from jaxtrain.exchange import Exchange
from jaxtrain.files import refused_path
from jaxtrain.guard import Guard
from jaxtrain.layers import Scan
from jaxtrain.loss import Loss
from jaxtrain.mesh import Mesh
from jaxtrain.models import Model
from jaxtrain.optimizer import Optimizer, Schedule
from jaxtrain.pipeline.schedules import Pipeline
from jaxtrain.precision import Precision
from jaxtrain.remat import Remat
from jaxtrain.sharding import Sharding

# JAX would take a longer one's last 32 bits without a word.
MAX_SEED = 2**32 - 1


@runtime_checkable
class Data(Protocol):
    """What the trainer needs of a data source's settings."""

    def open(self, *, seed: int) -> Dataset:
        """Reads the source."""
        ...

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """The shapes of a batch, without reading anything."""
        ...


@runtime_checkable
class TextSource(Protocol):
    """What generation needs of a data source's settings: the tokenizer without the text."""

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        ...


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """What is trained on what, and for how long; periods are in optimizer steps, 0 is never.

    Attributes:
      model: `@GPT()`, `@Llama()`, `@ResNet()`, ...
      data: `@TextData()`, `@ImageData()`, ...
      steps: optimizer steps of the whole run.
      global_batch_size: sequences or images in one optimizer step, over all devices.
      accumulation: microbatches that one optimizer step is made of, one after the other.
      seed: seed of the parameters, of the data order and of the augmentation; under 2**32.
      log_every: how often metrics are written.
      eval_every: how often the held-out examples are evaluated; the end always is.
      eval_batches: held-out batches in one evaluation; None takes them all.
      save_every: how often a checkpoint is written; the end always is.
      bad_records: how many examples may be unreadable; each is replaced by a row that weighs
        nothing. 0 stops at the first.
    """

    model: Model
    data: Data
    steps: int
    global_batch_size: int
    accumulation: int = 1
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int | None = None
    save_every: int = 0
    bad_records: int = 0

    def __post_init__(self) -> None:
        refuse_below(1, self, "steps", "global_batch_size", "accumulation", "log_every")
        refuse_below(0, self, "seed", "eval_every", "save_every", "bad_records")
        if self.seed > MAX_SEED:
            raise UserError(f"Train.seed={self.seed}; use at most {MAX_SEED}")
        if self.eval_batches is not None and self.eval_batches < 1:
            raise UserError(f"Train.eval_batches={self.eval_batches}; use None or at least 1")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run: each field is one section of a gin file, but for the modules it imports."""

    train: Train
    mesh: Mesh
    sharding: Sharding
    exchange: Exchange
    pipeline: Pipeline
    precision: Precision
    remat: Remat
    scan: Scan
    attention: Attention
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule
    checkpoint: Checkpoint
    guard: Guard
    corruption: Corruption
    deadlines: Deadlines
    imports: tuple[str, ...] = ()

    def to_gin(self) -> str:
        """Every value as gin text; reading it again gives an equal configuration."""
        return gin_files.to_gin(self)

    def operative(self) -> str:
        """The same for the run's folder: the paths on this machine hold from any folder."""
        return gin_files.to_gin(self, absolute=True)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.to_gin(), quote=False)}</pre>"


def configs_folder() -> Path:
    """The folder of shipped configs: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """The .gin file that `name` means: a path, or a shipped config without its ending.

    Raises:
      UserError: there is no such file, or no such user's home.
    """
    path = on_disk(name)
    shipped = {p.stem: p for p in configs_folder().glob("*.gin")}
    if path.suffix == ".gin":
        with refused_path(f"config {name!r}", needs="use a .gin file that can be read"):
            if path.is_file():
                return path
            beside = [str(p) for p in path.parent.glob("*.gin")]
            known = [path.stem] if path.stem in shipped else [*beside, *shipped]
        raise UserError(f"config {name!r}: no such file{did_you_mean(name, known)}")
    if name in shipped:
        return shipped[name]
    raise UserError(f"config {name!r}: no .gin file and not shipped{did_you_mean(name, shipped)}")


def load_config(
    name: str | Path, bindings: Sequence[str] = (), *, allow_imports: bool = False
) -> Config:
    """The configuration of a .gin file with bindings over it, checked name by name.

    Args:
      name: a path to a .gin file, or the name of a shipped one.
      bindings: gin bindings such as "Mesh.tensor = 2", the later over the earlier.
      allow_imports: let the file import modules from outside jaxtrain.

    Raises:
      UserError: a file that is not there, an unknown name, a wrong type, an unused binding.
    """
    for package in (jaxtrain.models, jaxtrain.data):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    file = find_config(str(name))
    found: Any = gin_files.load(
        Config, file, bindings, search_path=configs_folder(), allow_imports=allow_imports
    )
    return found
