"""Base of token objectives: forward pass through the layers, and token loss.

Letters: B batch, T length, D embed, V vocab.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import nearest_multiple
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import (
    Inputs,
    Model,
    TokenModel,
    features_of,
    token_model,
    tokens_per_position,
)
from jaxtrain.nn.attention.context import along_context, split_before
from jaxtrain.nn.attention.mask import Mask, apply_softcap
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import operands
from jaxtrain.nn.transformer.language_model import (
    LOGITS,
    Transformer,
    head_operands,
    hidden_states,
    logits,
    padded_logits,
    vocabulary,
)
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.objectives.losses import Loss, Sums, losses, over_chunks, perplexity
from jaxtrain.training.objectives.objective import (
    LogitsObjective,
    Objective,
    Yardstick,
    objective_named,
    text_entropy,
    validate_form,
    validate_values,
)

RESIDUAL = ("batch", "residual_length", "embed")


class TokenObjective(Objective[Transformer], LogitsObjective[Transformer]):
    """Base of objectives over the final hidden states of a `Transformer`.

    Its methods are also used by pipelines. Counts: `weight`, the targets that count,
    for its own sums; `tokens`, those of documents, for the layers' sums,
    since every token passes through them whether its target counts or not.

    Attributes:
      causal: whether a token sees only previous ones.
      own: the sums of `of_hidden`; all others are the layers'.
      reserved: number of last tokens of the model's vocabulary that do not occur in the data.
      labels: whether targets are labels instead of tokens.
      multi_token_prediction: whether modules that predict tokens after the next one are trained.
    """

    inputs: ClassVar[tuple[Inputs, ...]] = ("tokens",)
    minimized: ClassVar[tuple[str, ...]] = ("loss", "auxiliary_loss")
    causal: ClassVar[bool]
    own: ClassVar[tuple[str, ...]] = ("loss",)
    reserved: ClassVar[int] = 0
    labels: ClassVar[bool] = False
    multi_token_prediction: ClassVar[bool] = False

    @abc.abstractmethod
    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return the objective's own sums, from the last layer's output."""

    def of_more_layers(
        self,
        model: Any,
        h_BTD: jax.Array,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> Sums:
        """Return the sums of extra layers after the last, if the objective has any."""
        del model, h_BTD, batch, execution, settings, train
        return {}

    @final
    def of_finished(
        self,
        model: Transformer,
        h_BTD: jax.Array,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> Sums:
        """Return all sums of the final hidden states."""
        more = self.of_more_layers(model, h_BTD, batch, execution, settings, train=train)
        return {**self.of_hidden(model, h_BTD, batch, settings, train=train), **more}

    def in_order(self, batch: Batch) -> Batch:
        """Return a batch in the order of its text, with what can be computed in that order
        alone."""
        return batch

    @final
    def validate_model(self, model: Model) -> Iterator[str]:
        """Yield errors for a model that the objective does not support.

        It must read tokens, its attention must be causal if the objective's mask is, and it must
        not have modules that would not be trained.
        """
        yield from self.validate_inputs(model)
        name = type(model).__name__
        if not self.multi_token_prediction:
            per_position = tokens_per_position(model)
            if per_position > 1:
                yield (
                    f"{name}.predicted_tokens={per_position}, but the objective {self.name!r} "
                    f"trains no module that predicts further tokens; use {name}.predicted_tokens=1"
                )
        if model.attention is not None and model.attention.causal != self.causal:
            yield (
                f"{name}.attention has causal={model.attention.causal}, but {name}.objective="
                f"{self.name!r} has causal={self.causal}; let both be the same"
            )

    @final
    def mask(self, batch: Batch) -> Mask:
        """Return the attention mask: tokens attend within their own document."""
        return Mask(
            causal=self.causal, segment_ids_BT=batch.segment_ids, segment_ids_BS=batch.segment_ids
        )

    @final
    def arrange(self, batch: Batch, execution: Execution) -> Batch:
        """Arrange a batch as in `Objective`: rows, and positions over the mesh axis `context`."""
        method = execution.context_parallel
        per_token = dataclasses.replace(self.in_order(batch), rows=None)
        arranged = jax.tree.map(lambda x_BT: along_context(x_BT, method), per_token)
        return dataclasses.replace(arranged, rows=batch.rows)

    def weight(self, batch: Batch) -> jax.Array:
        """Return the weight of a batch: the sum of its loss mask."""
        return batch.loss_mask.sum()

    @final
    def counts(self, batch: Batch) -> Sums:
        """Return `weight` and `tokens`."""
        return {"weight": self.weight(batch), "tokens": _tokens(batch)}

    @final
    def over(self, name: str) -> str:
        """Return `weight` for the objective's own sums, `tokens` for those of the layers."""
        return "weight" if name in self.own else "tokens"

    def class_count(self, model: TokenModel) -> tuple[str, int]:
        """Return the setting that holds the number of classes of a target, and that number."""
        return "vocab_size", model.vocab_size

    def more_of_evaluation(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return `perplexity`."""
        return {"perplexity": perplexity(means["loss"])}

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return nats per token, and the baseline of the text's unigram entropy."""
        del model
        return Yardstick("nats a token", baselines=text_entropy(facts))

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
        """Return the sums as in `Objective`: those of the hidden states and of the layers."""
        batch = self.arrange(batch, execution)
        assert batch.positions is not None, "a batch of text has positions"
        h_BTD, _, of_layers = hidden_states(
            model, batch.inputs, batch.positions, self.mask(batch), execution
        )
        own = self.of_finished(model, h_BTD, batch, execution, settings, train=train)
        return add_sums(of_layers, own), statistics

    @final
    def reading(self, inputs: Any) -> Batch:
        """Return a batch of rows of tokens or vectors, each one text from its start."""
        shape = inputs.shape if np.issubdtype(inputs.dtype, np.integer) else inputs.shape[:-1]
        positions = np.arange(shape[-1] if shape else 1, dtype=np.int32)
        targets = np.zeros(shape, np.int32) if self.labels else inputs
        position_BT = np.array(np.broadcast_to(positions, shape))
        return Batch(inputs, targets, np.ones(shape, np.float32), None, position_BT)

    @final
    def logits(
        self, model: Transformer, statistics: Any, batch: Batch, execution: Execution
    ) -> jax.Array:
        """Return the next-token logits at each position, float32 [B, T, V]."""
        del statistics
        assert batch.positions is not None, "a batch of text has positions"
        mask = self.mask(batch)
        h_BTD, _, _ = hidden_states(model, batch.inputs, batch.positions, mask, execution)
        return logits(model, h_BTD).astype(jnp.float32)

    @final
    def validate(self, batch: Batch, model: Model, settings: Loss, layout: Layout) -> Iterator[str]:
        """Yield errors unless the five fields are [B, T], segment_ids optional, with tokens in the
        vocabulary.

        Inputs are checked everywhere, in padding too; targets where they count.
        """
        features = features_of(model)
        dtype = "int32" if features is None else "float32"
        feature_shape = () if features is None else (features,)
        found = list(validate_form(batch, "inputs", dtype, ("B", "T", *feature_shape)))
        if not found:
            shape = batch.inputs.shape[:2]
            found += validate_form(batch, "targets", "int32", shape)
            found += validate_form(batch, "loss_mask", "float32", shape)
            found += validate_form(batch, "positions", "int32", shape)
            if batch.segment_ids is not None:
                found += validate_form(batch, "segment_ids", "int32", shape)
            found += self.validate_reference(batch, "Batch")
            if batch.reference is not None:
                found += validate_form(batch, "reference", "float32", shape)
        if not found:
            length = batch.inputs.shape[1]
            found += _validate_length(length, token_model(model), settings, layout)
        if not found:
            found += _validate_tokens(
                batch, token_model(model), self.class_count(token_model(model))
            )
        yield from found


def _validate_length(
    length: int, model: TokenModel, settings: Loss, layout: Layout
) -> Iterator[str]:
    message = f"Batch.inputs has sequences of {length} tokens"
    if length > model.context_length:
        name = type(model).__name__
        yield f"{message}; use at most {model.context_length} ({name}.context_length)"
    for of, parts in (
        ("the devices that split a sequence", layout.size(layout.activation(RESIDUAL)[1])),
        ("Loss.chunk_size", settings.chunk_size or 1),
    ):
        if length % parts:
            nearest = nearest_multiple(length, parts)
            yield f"{message}, no multiple of {parts} ({of}); the nearest is {nearest}"


def _validate_tokens(
    batch: Batch, model: TokenModel, per_position: tuple[str, int]
) -> Iterator[str]:
    name, last, (setting, count) = type(model).__name__, model.vocab_size - 1, per_position
    of_targets = f" ({name}.{setting}={count})"
    of_vocabulary = f" ({name}.vocab_size={model.vocab_size})"
    of_context = f" ({name}.context_length={model.context_length})"
    yield from validate_values(batch, "loss_mask", 0, None)
    if features_of(model) is None:
        yield from validate_values(batch, "inputs", 0, last, why=of_vocabulary)
    elif isinstance(batch.inputs, np.ndarray) and not np.isfinite(batch.inputs).all():
        yield "Batch.inputs has a value that is not finite; use finite ones, in padding too"
    yield from validate_values(batch, "targets", 0, count - 1, why=of_targets, counted=True)
    yield from validate_values(batch, "positions", 0, model.context_length - 1, why=of_context)
    yield from validate_values(batch, "segment_ids", 0, None)


def reserved_tokens(model: Model) -> int:
    """Return the number of last tokens of a model's vocabulary that its data do not have."""
    objective = objective_named(model.objective)
    return objective.reserved if isinstance(objective, TokenObjective) else 0


def token_loss(
    model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
) -> jax.Array:
    """Return the summed cross entropy of a batch's targets: output matrix and softmax."""
    mask_BT, classes, softcap = batch.loss_mask, vocabulary(model), model.logit_softcap()

    def of_products(x_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        return of_logits(apply_softcap(x_BTV, softcap), targets_BT, mask_BT)

    def of_logits(logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        return losses(logits_BTV, targets_BT, mask_BT, settings, train=train, classes=classes)

    with jax.named_scope("loss"):
        # A non-finite hidden state at a masked position would reach the output matrix's
        # gradient as 0 x NaN.
        h_BTD = jnp.where(mask_BT[..., None] != 0, h_BTD, 0)
        if settings.chunk_size is None:
            return of_logits(padded_logits(model, h_BTD), batch.targets, mask_BT).sum()
        h_BTD, matrix_VD, _ = operands(LOGITS, *head_operands(model, h_BTD))
        bias = model.output_bias()
        bias_V = None if bias is None else gather(bias).astype(h_BTD.dtype)
        return over_chunks(
            of_products, settings.chunk_size // split_before(), h_BTD, matrix_VD, batch.targets,
            mask_BT, bias_V,
        )  # fmt: skip


def add_sums(total: Sums, more: Sums) -> Sums:
    """Add two sets of sums by name; integers stay integers."""
    return {**total, **{name: value + total.get(name, 0) for name, value in more.items()}}


def _tokens(batch: Batch) -> jax.Array:
    """Return the number of tokens that belong to a document."""
    if batch.segment_ids is None:
        return jnp.asarray(batch.loss_mask.size, jnp.float32)
    return (batch.segment_ids != 0).sum(dtype=jnp.float32)
