"""`Objective`: the interface of all objectives, their lookup by name, and baselines of metrics."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtrain.training.objectives
from jaxtrain.config.errors import UserError, nearest
from jaxtrain.config.registry import Named
from jaxtrain.config.values import is_required
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.models.model import Inputs, Model
from jaxtrain.nn.execution import Execution
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.objectives.losses import CONFUSION, Loss, Sums


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Baseline of a metric that a model must beat to have learned anything.

    Attributes:
      metric: its name among those of training, such as `loss`.
      label: its name, such as "the text's unigram entropy".
      value: its value of the metric.
    """

    metric: str
    label: str
    value: float


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """Presentation of an objective's metrics: units, panels and baselines.

    Attributes:
      unit: of the loss, such as 'nats per token'; '' if it has none.
      metrics: the other metrics that are drawn, each in a panel below the loss.
      baselines: of these metrics; the first is reported at a run's end.
      scale: of the loss's axis; 'log' if it spans several orders of magnitude.
    """

    unit: str = ""
    metrics: tuple[str, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    scale: Literal["linear", "log"] = "linear"

    def sentence(self, values: Mapping[str, Any]) -> str | None:
        """Return a summary such as `Held-out loss 2.1000 nats per token, against the text's unigram
        entropy 3.2500`; None without a baseline.

        Args:
          values: of an evaluation: each metric's name after `eval_`.
        """
        if not self.baselines:
            return None
        metric, label, baseline = dataclasses.astuple(self.baselines[0])
        unit = f" {self.unit}" if self.unit and metric == "loss" else ""
        found = values[f"eval_{metric}"]
        name = metric.replace("_", " ")
        return f"Held-out {name} {found:.4f}{unit}, against {label} {baseline:.4f}"


def text_entropy(facts: Mapping[str, Any], metric: str = "loss") -> tuple[Baseline, ...]:
    """Return the baseline of the text's unigram entropy, in nats per token; () if the data
    have none.
    """
    entropy = facts.get("unigram_entropy")
    label = "the text's unigram entropy"
    return () if entropy is None else (Baseline(metric, label, float(entropy)),)


def uniform_guess(classes: int) -> tuple[Baseline, ...]:
    """Return the cross entropy and the accuracy of a uniform guess over the classes."""
    label = f"a uniform guess among {classes} classes"
    return Baseline("loss", label, math.log(classes)), Baseline("accuracy", label, 1 / classes)


# Type of the trained modules.
M = TypeVar("M")


class Objective(abc.ABC, Generic[M]):
    """Training objective: validation of its batches, sums over a batch, and the metrics derived
    from them.

    Sums, not means: microbatches, stages and processes add theirs, and one division by the global
    batch's counts follows, so that all tokens have equal weight wherever they are. A sum has the
    name of its mean among the metrics.

    Attributes:
      name: its value of a model's `objective`.
      inputs: supported kinds of inputs; one of them must be the model's.
      minimized: the sums whose means are added up and differentiated, if the model returns them.
      draws: whether its models may use random numbers in training, for which rows are numbered.
      refers: whether its batches have a reference model's log-probabilities.
      evaluated: the counts whose means are reported for held-out examples.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[Inputs, ...]]
    minimized: ClassVar[tuple[str, ...]] = ("loss",)
    draws: ClassVar[bool] = False
    refers: ClassVar[bool] = False
    evaluated: ClassVar[tuple[str, ...]] = ("weight",)

    def __init_subclass__(cls, **settings: Any) -> None:
        """Raise TypeError if a subclass defines a check by its name of 0.2.0, which is no longer
        called."""
        super().__init_subclass__(**settings)
        for name in vars(cls):
            if name.partition("_")[0] == "refuse":
                raise TypeError(
                    f"{cls.__name__}.{name} is called validate{name[6:]} now: rename it"
                )

    def validate_model(self, model: Model) -> Iterator[str]:
        """Yield why a model that names this objective cannot be trained with it, such as other
        inputs.
        """
        yield from self.validate_inputs(model)

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """Return the dataset to train on: the opened one, or one with its examples in another form.

        Args:
          dataset: the opened data.
          model: the model's settings.

        Raises:
          UserError: the model does not support these data.
        """
        del model
        return dataset

    def of(self, model: Model) -> "Objective":
        """Return the objective with the settings that it takes from the model."""
        del model
        return self

    def builder(self, model: Model) -> Callable[[jax.Array], nnx.Module]:
        """Return the function that builds the module from a key: the model's own, or a wrapper of
        it.
        """
        return model.build

    def adapt_tuning(self, tuning: Tuning) -> Tuning:
        """Return the trainable/frozen partition for this objective, given the model's `tuning`."""
        return tuning

    def validate_run(self, model: Model, *, length: int) -> Iterator[str]:
        """Yield why a run cannot train with this objective.

        Args:
          model: the model's settings.
          length: of a row.
        """
        del model, length
        yield from ()

    @abc.abstractmethod
    def counts(self, batch: Batch) -> Sums:
        """Return the denominators of the sums over a batch, float32 scalars.

        They are `weight`, the total weight of its targets, and others by name.
        """

    @abc.abstractmethod
    def over(self, name: str) -> str:
        """Return the name of the count that divides a sum."""

    @abc.abstractmethod
    def sums(
        self,
        model: M,
        statistics: Any,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> tuple[Sums, Any]:
        """Run the forward pass: return float32 sums over a batch, and the new running statistics.

        Args:
          model: the module, its parameters in the compute dtype.
          statistics: its running statistics.
          batch: all rows, or a microbatch of them.
          execution: kernels, precision and dropout.
          settings: the loss's.
          train: whether the loss includes its training terms.
        """

    def arrange(self, batch: Batch, execution: Execution) -> Batch:
        """Return a batch sharded like activations; unchanged if only rows are split."""
        del execution
        return batch

    @abc.abstractmethod
    def validate(self, batch: Batch, model: Model, settings: Loss, layout: Layout) -> Iterator[str]:
        """Yield why a user-provided batch is invalid, apart from its number of rows.

        Args:
          batch: with any fields; see `own_batch` for what is checked.
          model: the model's settings.
          settings: the loss's.
          layout: where the batch goes.
        """

    def validate_loss(self, settings: Loss) -> Iterator[str]:
        """Yield errors for settings of the loss that this objective does not support."""
        del settings
        yield from ()

    @final
    def validate_reference(self, batch: Batch, named: str) -> Iterator[str]:
        """Yield an error for reference log-probabilities that are missing or not supported.

        Args:
          batch: arrays or their shapes.
          named: its source, such as 'Train.data=@TextData()'.
        """
        if self.refers and batch.reference is None:
            yield (
                f"{named} has no pairs of answers, which the objective {self.name!r} learns from; "
                "use Train.data=@PreferenceData(), or Train.objective=None"
            )
        if not self.refers and batch.reference is not None:
            yield (
                f"{named} has pairs of answers, which the objective {self.name!r} does not "
                "compare; use Train.objective=@DPO()"
            )

    def validate_targets(self, targets: Any, model: Model) -> Iterator[str]:
        """Yield why the data's targets of this shape and dtype cannot be predicted."""
        del targets, model
        yield from ()

    def more_of_evaluation(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return further evaluation metrics, computed from the means over `evaluated` by name."""
        del means
        return {}

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return units and baselines of the metrics, for the summary and the plots of a run.

        Args:
          model: the model's settings.
          facts: of the data, as in `Dataset`.
        """
        del model, facts
        return Yardstick()

    @final
    def evaluation(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return `eval_loss` and the task's metrics, from the sums and counts of all held-out
        examples.

        They are numbers, except the lists of `eval_confusion`.
        """
        kept = (*self.evaluated, CONFUSION)
        found = [n for n in sums if n not in kept and self.over(n) in self.evaluated]
        means = {name: sums[name] / sums[self.over(name)] for name in found}
        metrics = {**means, **self.more_of_evaluation(means)}
        if CONFUSION in sums:
            # Imported here: most objectives do not predict classes.
            from jaxtrain.training.objectives.classification import metrics_of

            metrics |= metrics_of(sums[CONFUSION])
        return {f"eval_{name}": value for name, value in metrics.items()}

    @final
    def validate_inputs(self, model: Model) -> Iterator[str]:
        """Yield an error for a model whose kind of input the objective does not support."""
        if model.inputs not in self.inputs:
            name, wanted = type(model).__name__, " or ".join(self.inputs)
            yield (
                f"{name}.objective={self.name!r} learns from {wanted}, but {name}.inputs="
                f"{model.inputs!r}; name another objective, or give {name} such inputs"
            )

    @final
    def total(self, sums: Sums, scales: Sums) -> jax.Array:
        """Return the scalar to minimize: the minimized sums times the scales of their counts.

        Args:
          sums: of the batch or of a part of it; sums that are only metrics are ignored.
          scales: for each count, a factor over the global batch's.
        """
        return sum(
            (sums[name] * scales[self.over(name)] for name in self.minimized if name in sums),
            start=jnp.zeros(()),
        )

    @final
    def means(self, sums: Sums, counts: Sums) -> Sums:
        """Return the metrics of a batch with these sums and counts; 0 where nothing counts."""
        return {name: value / at_least_one(counts[self.over(name)]) for name, value in sums.items()}


class LogitsObjective(abc.ABC, Generic[M]):
    """Interface of objectives whose models compute logits from their inputs alone."""

    @abc.abstractmethod
    def reading(self, inputs: Any) -> Batch:
        """Return a batch of these inputs, an array as the models read it, each row on its own."""

    @abc.abstractmethod
    def logits(self, model: M, statistics: Any, batch: Batch, execution: Execution) -> jax.Array:
        """Return the model's logits of a batch's inputs, in evaluation mode: float32 [B, ..., V].

        Args:
          model: as in `Objective.sums`.
          statistics: its running statistics.
          batch: from `reading`, or user-provided.
          execution: kernels, precision and dropout.
        """


def at_least_one(count: jax.Array) -> jax.Array:
    """Return the denominator for a sum of this count, at least 1: without targets the loss is 0."""
    return jnp.maximum(count, 1.0)


def objective_named(name: str) -> Objective:
    """Return the objective that a model's `objective` names, from this package or an imported
    module.

    Raises:
      UserError: none has this name, or it needs settings.
    """
    found = Named(Objective, jaxtrain.training.objectives)
    if name not in found:
        close = nearest(name, found)
        hint = f" (did you mean {close!r}?)" if close else ""
        raise UserError(
            f"objective {name!r}: there are {', '.join(sorted(found))}{hint}. One of your own is "
            "known once its module is imported: write `import my_module` into the .gin file and "
            "pass --allow-imports, or import it in Python"
        )
    return _instance(found[name])


@functools.cache
def _instance(cls: type[Objective]) -> Objective:
    """Return the single instance of a class without settings, so that compiled steps are reused."""
    settings: Any = cls
    if dataclasses.is_dataclass(settings) and any(map(is_required, dataclasses.fields(settings))):
        raise UserError(
            f"objective {settings.name!r} has settings without a default; use "
            f"Train.objective=@{settings.__name__}(), and set them"
        )
    return cls()


# -- validation of user-provided batches -----------------------------------------------------------
# The values of NumPy arrays are checked. Only shape and dtype of arrays on devices are checked:
# their values would have to be copied.

DTYPES = {"int32": jnp.integer, "float32": jnp.floating}


def validate_form(batch: Batch, name: str, dtype: str, shape: Sequence[int | str]) -> Iterator[str]:
    """Yield an error for each field that is not an array, or has another dtype or shape.

    Args:
      batch: the batch.
      name: the field.
      dtype: of `DTYPES`; integers and floats of other sizes are accepted too, as in JAX.
      shape: required dimensions; a letter means any size above 0.
    """
    x = getattr(batch, name)
    written = f"{dtype} [{', '.join(map(str, shape))}]"
    if not isinstance(x, np.ndarray | jax.Array):
        yield f"Batch.{name} is {_describe(x)}; use an array of NumPy or JAX, {written}"
    elif not jnp.issubdtype(x.dtype, DTYPES[dtype]):
        yield f"Batch.{name} has the dtype {x.dtype}; use {written}"
    elif not _fits(x.shape, shape):
        yield f"Batch.{name} has the shape {list(x.shape)}; use {written}"


def _describe(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def _fits(shape: tuple[int, ...], wanted: Sequence[int | str]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(n > 0 if isinstance(w, str) else n == w for n, w in zip(shape, wanted, strict=True))


def validate_values(
    batch: Batch, name: str, least: int, most: int | None, *, why: str = "", counted: bool = False
) -> Iterator[str]:
    """Yield an error with the first value of a field that is out of bounds.

    Args:
      batch: with valid dtypes and shapes.
      name: the field.
      least, most: the bounds; None is none, but values must be finite.
      why: where the bound comes from, such as ' (GPT.vocab_size=256)'.
      counted: whether values are arbitrary where the loss mask is 0; a mask on a device is not
        read, so nothing is checked then.
    """
    x = getattr(batch, name)
    if not isinstance(x, np.ndarray) or (counted and not isinstance(batch.loss_mask, np.ndarray)):
        return
    right = (x >= least) & (np.isfinite(x) if most is None else x <= most)
    if counted:
        right |= batch.loss_mask == 0
    if not right.all():
        index = np.unravel_index(np.argmin(right), x.shape)
        allowed = f"{least} or more, and finite" if most is None else f"{least} to {most}"
        where = ", ".join(map(str, index))
        yield f"Batch.{name}[{where}] is {x[index]}; use {allowed}{why}"
