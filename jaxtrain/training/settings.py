"""`Config`: the settings of a run, a frozen dataclass per section; what data implies."""

import dataclasses
import html
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import jaxtrain.data
import jaxtrain.models
import jaxtrain.training.objectives
import jaxtrain.training.optimizers
from jaxtrain.config import reader as gin_files
from jaxtrain.config import writer
from jaxtrain.config.buckets import BucketPath, to_path
from jaxtrain.config.errors import UserError, require_at_least, require_at_most
from jaxtrain.config.reader import configurable
from jaxtrain.config.registry import CONFIGURABLES
from jaxtrain.config.shipped import HUGGING_FACE, configs_folder, find_config
from jaxtrain.config.values import PathOr, settings_of
from jaxtrain.data.batch import Batch, kind_of
from jaxtrain.data.source import Dataset
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.models.model import Model, require_complete
from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.execution import Scan
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import Remat
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Sharding
from jaxtrain.training.corruption import Corruption
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.finetune.finetune import Finetune
from jaxtrain.training.guard import Guard
from jaxtrain.training.objectives.losses import Loss, settle
from jaxtrain.training.objectives.objective import Objective, objective_named
from jaxtrain.training.offload import Offload
from jaxtrain.training.optimizers.optimizer import Optimizer
from jaxtrain.training.optimizers.schedule import Schedule
from jaxtrain.training.optimizers.schedule import notes as notes_of_schedule
from jaxtrain.training.pipeline.schedules import Pipeline


def infer_settings(
    config: Any, bound: Collection[tuple[str, str]]
) -> Mapping[tuple[str, str], Any]:
    """Return settings inferred from a folder of class folders on this machine, if they are not
    bound.

    Args:
      config: with its defaults.
      bound: (section, setting) of what is bound.

    Returns:
      The number of classes and the channels, for the data and for the model; nothing for other
      data, or if the folder is not here.

    Raises:
      UserError: the folder is one level too high.
    """
    data, model = config.train.data, config.train.model
    if data is None or "ImageData" not in (base.__name__ for base in type(data).__mro__):
        return {}
    if "://" in data.source or "tfds:" in data.source:
        return {}
    wanted = {
        (type(one).__name__, name)
        for one in (data, model)
        for name in ("num_classes", "channels")
        if name in settings_of(type(one))
    } - set(bound)
    root = to_path(data.source)
    if not wanted or isinstance(root, BucketPath) or not _is_folder(root):
        return {}
    from jaxtrain.data.images.stores import look_into

    found = look_into(root)
    if found is None or len(found.class_names) < 2:
        return {}
    values = {"num_classes": len(found.class_names), "channels": found.channels}
    # What is set for the data holds for the model.
    values |= {name: getattr(data, name) for name in values if ("ImageData", name) in bound}
    return {(section, name): values[name] for section, name in sorted(wanted)}


def _is_folder(root: Path) -> bool:
    try:
        return root.is_dir()
    except OSError:  # too long a name, or no permission: opening the data reports it
        return False


for _package in (
    jaxtrain.models, jaxtrain.data, jaxtrain.training.optimizers, jaxtrain.training.objectives
):  # fmt: skip
    CONFIGURABLES.add_package(_package)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpointing: retention, asynchronous saves, and local (multi-tier) checkpoints.

    Attributes:
      keep: number of newest checkpoints kept; at least 1.
      keep_every: steps that are multiples of this are never deleted; None keeps only the newest.
      asynchronous: write to disk while the next steps run; False waits for the disk.
      mtbf: device-hours per interruption, for Train.save_every='auto' and `jaxtrain plan`; None is
        the median of published rates, about 50,000. Spot machines have far less.
      max_failed_saves: a run continues after a failed save, and stops after this many in a row.
      local_directory: a folder on each host's own disk or in its memory, such as '/dev/shm/run',
        for frequent checkpoints between those of Train.save_every; environment variables are
        expanded. A run resumes from the newest state that all hosts have. None writes none.
      local_interval: steps between two local checkpoints.
      local_keep: number of newest local checkpoints kept; at least 2, since hosts may fail while
        one is written. Another one takes space during the write.
    """

    keep: int = 3
    keep_every: int | None = None
    asynchronous: bool = True
    mtbf: float | None = None
    max_failed_saves: int = 3
    local_directory: str | None = None
    local_interval: int = 20
    local_keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"Checkpoint.keep = {self.keep}: at least 1 checkpoint must be kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(
                f"Checkpoint.keep_every = {self.keep_every}: a number of steps of at least 1, "
                "or None to keep only the newest"
            )
        if self.mtbf is not None and not (math.isfinite(self.mtbf) and self.mtbf > 0):
            raise UserError(
                f"Checkpoint.mtbf={self.mtbf:g}; use device-hours per interruption, a finite "
                "number above 0, such as 50000, or None for that of published runs"
            )
        if self.max_failed_saves < 1:
            raise UserError(
                f"Checkpoint.max_failed_saves = {self.max_failed_saves}: a run stops after 1 "
                "failed save in a row or more"
            )
        require_at_least(1, self, "local_interval")
        require_at_least(2, self, "local_keep")
        if self.local_directory is not None:
            self._validate_local_directory(self.local_directory)

    @staticmethod
    def _validate_local_directory(name: str) -> None:
        if "://" in name or not name.startswith(("/", "$", "~")):
            raise UserError(
                f"Checkpoint.local_directory={name!r}: use an absolute path on each host's own "
                "disk or in its memory, such as '/dev/shm/run' or '$TMPDIR/run', or None"
            )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """Best-checkpoint tracking and early stopping: a metric's best checkpoint stays with the
    newest.

    Attributes:
      metric: a value of metrics.jsonl's evaluation lines, such as 'eval_loss' or 'eval_accuracy'; a
        better one than all before is saved at once. None compares nothing.
      order: which value is better: the 'lowest' or the 'highest'.
      patience: the run ends after this many evaluations in a row that were not better; 0 never.
    """

    metric: str | None = None
    order: Literal["lowest", "highest"] = "lowest"
    patience: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "patience")
        if self.patience and self.metric is None:
            raise UserError(
                f"Best.patience={self.patience} with Best.metric=None: nothing is compared; use "
                "Best.metric='eval_loss', or Best.patience=0"
            )
        if self.metric is not None and "accuracy" in self.metric and self.order == "lowest":
            raise UserError(
                f"Best.metric={self.metric!r} with Best.order='lowest' would keep the worst; use "
                "Best.order='highest'"
            )


def validate_best(settings: Best, train: "Train") -> Iterator[str]:
    """Yield an error message if there is no evaluation to choose the best from."""
    if settings.metric is not None and train.eval_every == 0:
        yield (
            f"Best.metric={settings.metric!r} with Train.eval_every=0: only the end of the run "
            "is evaluated; set Train.eval_every, such as 100"
        )


def validate_automatic_saves(settings: Checkpoint, train: "Train") -> Iterator[str]:
    """Yield an error if automatic saves would meet the steps to keep only by chance."""
    if train.save_every == "auto" and settings.keep_every is not None:
        yield (
            f"Checkpoint.keep_every={settings.keep_every} with Train.save_every='auto': the "
            "saved steps are multiples of it only by chance; set Checkpoint.keep_every=None or "
            f"Train.save_every={settings.keep_every}"
        )


# A median of fewer says little: caches are cold, the first batches are still being prefetched.
SAMPLES = 5

# Regular work: a step takes what the last one took, so its history may lower the deadline. The
# others wait for disks and networks, where a median of nothing says nothing about the next wait:
# their history may only raise it.
REGULAR = ("step", "evaluation")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeout of each phase, after which the process counts as stalled; 0 disables one.

    A phase's deadline is the number given here until 5 of its times are known. Then it is
    `factor` times the median of the last 64, but at least `minimum_seconds` for steps and
    evaluation batches, and at least the number given here for the others. A process that was
    stopped (SIGSTOP) past its deadline counts as stalled when it wakes.

    Attributes:
      start: seconds to set up devices, data and model.
      restore: seconds to read a checkpoint.
      compile: seconds to compile the step.
      data: seconds to wait for one batch.
      step: seconds for one optimizer step.
      evaluation: seconds for one batch of an evaluation.
      save: seconds to write a checkpoint, or to wait for the one being written.
      factor: learned deadlines are this many times the median.
      minimum_seconds: no learned deadline is shorter.
    """

    start: float = 1800.0
    restore: float = 1800.0
    compile: float = 3600.0
    data: float = 300.0
    step: float = 300.0
    evaluation: float = 300.0
    save: float = 1800.0
    factor: float = 10.0
    minimum_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self._phases():
            if self._seconds_of(name) < 0:
                raise UserError(
                    f"Timeouts.{name}={self._seconds_of(name)}; use seconds above 0, or 0 for no "
                    "limit"
                )
        if self.factor < 1:
            raise UserError(f"Timeouts.factor={self.factor}; use at least 1")
        if self.minimum_seconds <= 0:
            raise UserError(
                f"Timeouts.minimum_seconds={self.minimum_seconds}; use more than 0 seconds"
            )

    def of(self, phase: str, recent: Sequence[float]) -> float | None:
        """Return the seconds that a phase may last now; None is indefinitely.

        Args:
          phase: its name; `idle` has no deadline.
          recent: how many seconds it took the last times.
        """
        given = self._seconds_of(phase) if phase in self._phases() else 0.0
        if given == 0:
            return None
        if len(recent) < SAMPLES:
            return given
        least = self.minimum_seconds if phase in REGULAR else given
        return max(least, self.factor * statistics.median(recent))

    def longest(self) -> float | None:
        """Return the longest of the given seconds; None if all deadlines are disabled."""
        return max(map(self._seconds_of, self._phases())) or None

    def check_seconds(self) -> float:
        """Return the polling interval: a tenth of the shortest deadline, at most one second."""
        given = [self._seconds_of(name) for name in self._phases() if self._seconds_of(name)]
        return min([1.0, *(seconds / 10 for seconds in (*given, self.minimum_seconds))])

    def _phases(self) -> tuple[str, ...]:
        """Return the phases that have a deadline."""
        about = ("factor", "minimum_seconds")
        return tuple(name for name in vars(self) if name not in about)

    def _seconds_of(self, phase: str) -> float:
        return vars(self)[phase]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracker:
    """Experiment tracker: receives the metrics of a run, besides metrics.jsonl and TensorBoard.

    Attributes:
      name: 'wandb' (Weights & Biases, with jaxtrain[wandb]) or 'mlflow' (jaxtrain[mlflow]), each of
        which finds its server by its own environment variables; None: none.
      project: Weights & Biases' project, or MLflow's experiment.
      run_name: what the run is called there; None: as its folder.
    """

    name: Literal["wandb", "mlflow"] | None = None
    project: str = "jaxtrain"
    run_name: str | None = None


# JAX would take a longer one's last 32 bits without a word.
MAX_SEED = 2**32 - 1
MAX_STEPS = 2**31 - 1  # TrainState counts them in an int32


@runtime_checkable
class Data(Protocol):
    """Interface that the trainer needs of a data source's settings."""

    def open(self, *, seed: int) -> Dataset:
        """Read the source."""
        ...

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes of a batch, without reading anything."""
        ...


@runtime_checkable
class TextSource(Protocol):
    """Interface that generation needs of a data source: the tokenizer without the text."""

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        ...


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The training run: model, data, objective, batch size and length; periods in optimizer steps,
    0 is never.

    Attributes:
      model: `@GPT()`, `@Llama()`, `@ResNet()`, ...
      data: `@TextData()`, `@ImageData()`, ...
      objective: what is minimized, such as `@DPO()`; None is the model's own.
      steps: optimizer steps of the whole run.
      global_batch_size: sequences or images in one optimizer step, over all devices.
      accumulation: microbatches that one optimizer step is made of, one after the other.
      fill_batch: whether to pad a global batch that does not divide over the devices and
        microbatches with zero-weight rows (wasted computation); False rejects such a batch.
      seed: seed of the parameters, of the data order and of the augmentation; under 2**32.
      log_every: how often metrics are written.
      eval_every: how often the held-out examples are evaluated; the end always is.
      eval_batches: held-out batches in one evaluation; None takes them all.
      save_every: how often a checkpoint is written; the end always is. 'auto' chooses the interval
        from the measured cost of a save and `Checkpoint.mtbf`, again at each save.
      bad_records: how many examples may be unreadable; each is replaced by a zero-weight row. 0
        stops at the first.
      noise_scale_every: how often the gradient noise scale (arXiv 1812.06162) is measured: roughly
        the batch size in rows above which additional rows are wasted. Each measurement processes
        one extra microbatch.
      start_from: what a run takes its first parameters and running statistics from, and nothing
        else: another run's folder, its newest checkpoint, or a Hugging Face folder. None draws
        them from the seed.
      gpu_memory_fraction: the part of each GPU's memory that JAX takes at the start, such as 0.94;
        None leaves it to XLA_CLIENT_MEM_FRACTION, else 0.9, and 0.94 of 80 GB or more. TPUs and
        CPUs have no such part.
    """

    model: Model
    data: Data
    steps: int
    global_batch_size: int
    objective: Objective | None = None
    accumulation: int = 1
    fill_batch: bool = False
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int | None = None
    save_every: int | Literal["auto"] = 0
    bad_records: int = 0
    noise_scale_every: int = 0
    start_from: Annotated[str | None, PathOr()] = None
    gpu_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "steps", "global_batch_size", "accumulation", "log_every")
        require_at_least(0, self, "seed", "eval_every", "bad_records", "noise_scale_every")
        if isinstance(self.save_every, str):
            if self.save_every != "auto":
                raise UserError(
                    f"Train.save_every={self.save_every!r}; use a number of steps, 0 or 'auto'"
                )
        else:
            require_at_least(0, self, "save_every")
        require_at_most(MAX_SEED, self, "seed")
        require_at_most(MAX_STEPS, self, "steps")
        if self.eval_batches is not None and self.eval_batches < 1:
            raise UserError(f"Train.eval_batches={self.eval_batches}; use None or at least 1")
        part = self.gpu_memory_fraction
        if part is not None and not 0 < part <= 1:
            raise UserError(
                f"Train.gpu_memory_fraction={part:g}; use above 0 and at most 1, such as 0.94"
            )
        require_complete(self.model)

    @property
    def task(self) -> Objective:
        """The training objective of the model: `objective`, or else the model's own."""
        objective = self.objective
        if objective is None:
            objective = objective_named(self.model.objective)
        return objective.of(self.model)


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of a run: each field is one section of a gin file, except the last two.

    Attributes:
      imports: the modules that it imports.
      notes: what was not taken as it was written, a sentence each; the commands print them once.
    """

    train: Train
    mesh: Mesh
    sharding: Sharding
    exchange: Exchange
    pipeline: Pipeline
    precision: Precision
    remat: Remat
    offload: Offload
    scan: Scan
    attention: Attention
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule
    checkpoint: Checkpoint
    best: Best
    guard: Guard
    corruption: Corruption
    timeouts: Timeouts
    finetune: Finetune
    tracker: Tracker
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def to_gin(self) -> str:
        """Return all values as gin text; reading it again gives an equal configuration."""
        return writer.to_gin(self)

    def operative(self) -> str:
        """Return gin text for the run's folder, with absolute paths on this machine."""
        return writer.to_gin(self, absolute=True)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.to_gin(), quote=False)}</pre>"


def load_config(
    source: str | Path | Config | Sequence[Any],
    bindings: Sequence[str] = (),
    *,
    allow_imports: bool = False,
) -> Config:
    """Return the configuration of files and bindings, with all names checked.

    Args:
      source: a path to a .gin file, or the name of a shipped one; gin text, which is a `str` of
        more than one line; a `Config`; sections of one, such as `[Train(...), Mesh(fsdp=4)]`:
        those that are left out have their defaults; or `hf:DIR` with a Hugging Face folder, whose
        model it then is and whose parameters it starts from.
      bindings: gin bindings such as "Mesh.tensor = 2", the later over the earlier.
      allow_imports: let the file or the text import modules from outside jaxtrain.

    Raises:
      UserError: a file that is not there, an unknown name, a wrong type, an unused binding, an
        object that is no section.
    """
    imports: Sequence[str] = ()
    if isinstance(source, str) and "\n" in source:
        file = gin_files.Text(source, "text")
    elif isinstance(source, str) and source.startswith(HUGGING_FACE):
        from jaxtrain.training.published import config_text

        file = gin_files.Text(config_text(source), source)
    elif isinstance(source, str | Path):
        file = find_config(str(source))
    else:
        given: Sequence[Any] = (
            [getattr(source, name) for name in gin_files.sections(Config)]
            if isinstance(source, Config)
            else source
        )
        file, imports = _of_sections(given), _own_modules(given)
    found: Any = gin_files.load(
        Config,
        file,
        bindings,
        search_path=configs_folder(),
        allow_imports=allow_imports,
        implied=infer_settings,
    )
    return settle_settings(dataclasses.replace(found, imports=(*imports, *found.imports)))


def _of_sections(given: Sequence[Any]) -> gin_files.Text:
    """Return sections as the text of a gin file.

    Raises:
      UserError: one is no section of a configuration, or there are two of a kind.
    """
    known = {cls.__name__: cls for cls in gin_files.sections(Config).values()}
    for section in given:
        if type(section) is not known.get(type(section).__name__):
            raise UserError(
                f"load_config: {section!r} is not a section of a configuration; choose from: "
                f"{', '.join(sorted(known))} (a model and data belong to Train)"
            )
    names = [type(section).__name__ for section in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"load_config: there are two {twice[0]}(...) sections; give one of each")
    return gin_files.Text(writer.format_gin(given), "<settings>")


def _own_modules(given: Sequence[Any]) -> list[str]:
    """Return the modules of user-defined classes among sections and their values."""
    found: dict[str, None] = {}
    for one in given:
        module = type(one).__module__
        if module.split(".")[0] not in ("jaxtrain", "__main__"):
            found[module] = None
        values = [getattr(one, field.name) for field in dataclasses.fields(one)]
        found |= dict.fromkeys(_own_modules([v for v in values if dataclasses.is_dataclass(v)]))
    return list(found)


def settle_settings(config: Config) -> Config:
    """Return the configuration with obviously intended values, and a note where they differ."""
    notes = [*config.notes, *notes_of_schedule(config.schedule, config.train.steps)]
    loss, batch = config.loss, config.train.data.abstract_batch(1)
    if kind_of(batch) == "tokens":
        # A context of -1 is known with the devices: preflight then has the word.
        context = max(config.mesh.context, 1)
        loss, more_notes = settle(loss, length=batch.inputs.shape[1], context=context)
        notes += more_notes
    return dataclasses.replace(config, loss=loss, notes=tuple(notes))
