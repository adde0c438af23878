"""Distillation: a student learns a frozen teacher's next-token distribution.

Source: Hinton et al. 2015 (arXiv 1503.02531), section 2. Letters: B batch, T length, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.buckets import to_path
from jaxtrain.config.errors import UserError, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.config.shipped import HUGGING_FACE
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model, TokenModel, reads_tokens
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer.language_model import Transformer, hidden_states, logits
from jaxtrain.parallel.sharding import by_name
from jaxtrain.training.finetune.tuning import TEACHER, Tuning
from jaxtrain.training.objectives.losses import (
    Loss,
    Sums,
    cross_entropy,
    perplexity,
    validate_unread,
)
from jaxtrain.training.objectives.objective import Yardstick, text_entropy
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.settings import load_config


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation(TokenObjective):
    """Knowledge distillation from a frozen teacher (arXiv 1503.02531).

    The loss is (1 - share) cross entropy + share temperature^2 KL(teacher || model), both softened
    by the temperature, the mean over the targets that count. Metrics: `cross_entropy` and
    `divergence`, the two parts.

    Attributes:
      teacher: the folder of a run, its newest checkpoint, or a Hugging Face folder; it has the
        model's tokenizer.
      temperature: divisor of both models' logits.
      share: weight of the divergence, 0 to 1.
      teacher_zero: ZeRO stage of the teacher's parameters: 3 splits them over fsdp, 0 does not;
        None: as the model's.
    """

    teacher: Annotated[str | None, PathOr()] = None
    temperature: float = 2.0
    share: float = 0.5
    teacher_zero: int | None = None

    name: ClassVar[str] = "distillation"
    causal: ClassVar[bool] = True
    own: ClassVar[tuple[str, ...]] = ("loss", "cross_entropy", "divergence")

    def __post_init__(self) -> None:
        require_positive(self, "temperature")
        if not 0 <= self.share <= 1:
            raise UserError(f"Distillation.share={self.share}; use 0 to 1, such as 0.5")
        if self.teacher_zero not in (None, 0, 1, 2, 3):
            raise UserError(
                f"Distillation.teacher_zero={self.teacher_zero}; use None, or 0 to 3, such as 3"
            )

    @functools.cached_property
    def sizes(self) -> TokenModel:
        """Teacher's settings, as read from its folder.

        Raises:
          UserError: there is none, or it is not a token model.
        """
        if self.teacher is None:
            raise UserError(
                "Distillation.teacher has no value: bind it to the folder of a run, or of Hugging "
                "Face"
            )
        file = to_path(self.teacher) / "config.gin"
        source = str(file) if file.is_file() else f"{HUGGING_FACE}{self.teacher}"
        model = load_config(source).train.model
        if not reads_tokens(model):
            raise UserError(
                f"Distillation.teacher={self.teacher!r} reads {model.inputs}; name one that reads "
                "tokens"
            )
        return model

    def with_teacher_of(self, sizes: TokenModel) -> "Distillation":
        """Return the objective with a randomly initialized teacher of these sizes."""
        other = dataclasses.replace(self)
        vars(other)["sizes"] = sizes
        return other

    def builder(self, model: Model) -> Callable[[jax.Array], nnx.Module]:
        """Return the function that builds the model with its teacher."""
        return _WithTeacher(model.build, self.sizes.build)

    def adapt_tuning(self, tuning: Tuning) -> Tuning:
        """Return the partition with the teacher frozen."""
        shapes = nnx.state(nnx.eval_shape(lambda: self.sizes.build(jax.random.key(0))), nnx.Param)
        names = frozenset(f"{TEACHER}/{name}" for name in by_name(shapes))
        return dataclasses.replace(
            tuning, frozen=tuning.frozen | names, teacher_zero=self.teacher_zero
        )

    def validate_loss(self, settings: Loss) -> Iterator[str]:
        """Yield errors for settings that only a plain cross entropy uses."""
        yield from validate_unread(settings, "Train.objective=@Distillation()")

    def validate_run(self, model: Model, *, length: int) -> Iterator[str]:
        """Yield errors for another vocabulary, and for features that do not support a teacher."""
        theirs, origin = self.sizes, f"Distillation.teacher={self.teacher!r}"
        if reads_tokens(model) and theirs.vocab_size != model.vocab_size:
            yield (
                f"{origin} has {theirs.vocab_size} tokens, but "
                f"{type(model).__name__}.vocab_size={model.vocab_size}; teacher and student "
                "need the same tokenizer and number of logits"
            )
        if theirs.context_length < length:
            yield (
                f"{origin} reads {theirs.context_length} tokens at most, and rows have {length}; "
                "use shorter ones"
            )
        if theirs.attention is not None and not theirs.attention.causal:
            yield f"{origin} sees the tokens that it should predict; use a causal model"

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return the two parts of the loss; the cross entropy has the text's baseline."""
        del model
        metrics = ("cross_entropy", "divergence")
        return Yardstick(metrics=metrics, baselines=text_entropy(facts, "cross_entropy"))

    def more_of_evaluation(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return `perplexity`, from the cross entropy."""
        return {"perplexity": perplexity(means["cross_entropy"])}

    def sums(
        self,
        model: Transformer,
        statistics: Any,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> tuple[Sums, Any]:
        """Return the sums as in `Objective`: those of both models' hidden states, and of the
        model's layers.
        """
        del settings, train
        batch = self.arrange(batch, execution)
        assert batch.positions is not None, "a batch of text has positions"
        teacher, arguments = _teacher_of(model), (batch.inputs, batch.positions, self.mask(batch))
        with jax.named_scope("teacher"):
            # It is not differentiated: its layers are neither saved nor recomputed.
            h_of_teacher, _, _ = hidden_states(teacher, *arguments, execution)
        h_BTD, _, of_layers = hidden_states(model, *arguments, execution)
        with jax.named_scope("loss"):
            counts_BT = batch.loss_mask != 0

            def logits_of(by: Transformer, h: jax.Array) -> jax.Array:
                return logits(by, jnp.where(counts_BT[..., None], h, 0)).astype(jnp.float32)

            logits_BTV = logits_of(model, h_BTD)
            of_teacher = jax.lax.stop_gradient(logits_of(teacher, h_of_teacher))
            own_BT = cross_entropy(logits_BTV, jnp.where(counts_BT, batch.targets, 0))
            both_BT = divergence(of_teacher, logits_BTV, self.temperature)

            def total(x_BT: jax.Array) -> jax.Array:
                return (jnp.where(counts_BT, x_BT, 0.0) * batch.loss_mask).sum()

            own, both = total(own_BT), total(both_BT)
        whole = (1 - self.share) * own + self.share * self.temperature**2 * both
        return {"loss": whole, "cross_entropy": own, "divergence": both, **of_layers}, statistics

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Raise an error: the loss needs the teacher's hidden states too."""
        raise AssertionError("a pipeline is rejected")


@dataclasses.dataclass(frozen=True)
class _WithTeacher:
    """Builder of a model that contains its teacher.

    Attributes:
      model: key -> the model.
      teacher: key -> the other.
    """

    model: Callable[[jax.Array], nnx.Module]
    teacher: Callable[[jax.Array], nnx.Module]

    def __call__(self, key: jax.Array) -> nnx.Module:
        """Build the model; it draws the same parameters from `key` as without a teacher."""
        made = self.model(key)
        setattr(made, TEACHER, self.teacher(key))
        return made


def _teacher_of(model: Any) -> Transformer:
    return getattr(model, TEACHER)


def divergence(teacher: jax.Array, model: jax.Array, temperature: float) -> jax.Array:
    """Return KL(softmax(teacher / temperature) || softmax(model / temperature)), in nats.

    Args:
      teacher, model: logits, float32 [B, T, V]; V may be sharded.
      temperature: above 0.
    """
    p_BTV, log_p_BTV = _soften(teacher, temperature)
    _, log_q_BTV = _soften(model, temperature)
    return (p_BTV * (log_p_BTV - log_q_BTV)).sum(-1)


def _soften(logits_BTV: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Return probabilities and their logarithms, softened by the temperature."""
    x_BTV = logits_BTV / temperature
    x_BTV = x_BTV - jax.lax.stop_gradient(x_BTV.max(-1, keepdims=True))
    log_BTV = x_BTV - jnp.log(jnp.exp(x_BTV).sum(-1, keepdims=True))
    return jnp.exp(log_BTV), log_BTV
