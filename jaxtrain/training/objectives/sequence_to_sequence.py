"""Sequence-to-sequence: target tokens given a source.

Source: Sutskever et al. 2014 (arXiv 1409.3215). Letters: B batch, S source length, T target length,
D embed, V vocab.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Inputs, Model, TokenModel, pair_model
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer.language_model import PairModule, logits, padded_logits, vocabulary
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.objectives.losses import Loss, Sums, losses, perplexity
from jaxtrain.training.objectives.objective import (
    LogitsObjective,
    Objective,
    Yardstick,
    validate_form,
    validate_values,
)


class SequenceToSequence(Objective[PairModule], LogitsObjective[PairModule]):
    """Sequence-to-sequence: cross entropy of the target's tokens in nats, and perplexity.

    Counts: `weight`, the targets that count; `rows`, those in which any does.
    """

    name: ClassVar[str] = "sequence_to_sequence"
    inputs: ClassVar[tuple[Inputs, ...]] = ("pairs",)
    draws: ClassVar[bool] = True
    evaluated: ClassVar[tuple[str, ...]] = ("weight", "rows")

    def counts(self, batch: Batch) -> Sums:
        """Return `weight` and `rows`."""
        counted_B = (batch.loss_mask != 0).any(-1)
        return {"weight": batch.loss_mask.sum(), "rows": counted_B.sum(dtype=jnp.float32)}

    def over(self, name: str) -> str:
        """Return `rows` for exact matches, `weight` for all other sums."""
        return "rows" if name in ("rows", "exact_match") else "weight"

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return nats per token, and the accuracy of tokens and of whole targets."""
        del model, facts
        return Yardstick("nats a token", ("accuracy", "exact_match"))

    def more_of_evaluation(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return `perplexity`."""
        return {"perplexity": perplexity(means["loss"])}

    def sums(
        self,
        model: PairModule,
        statistics: Any,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> tuple[Sums, Any]:
        """Return the sums as in `Objective`: those of the hidden states.

        A held-out row with several answers is an exact match if all targets of any one of them are
        predicted: greedy decoding then writes that one.
        """
        memory = _read(model, batch, execution)
        h_BTD = _generate(model, batch, memory, execution)
        found = self.of_hidden(model, h_BTD, batch, settings, train=train)
        if batch.answers is not None and not train:
            exact_B = _exact_matches(_right(padded_logits(model, h_BTD), model, batch), batch)
            for answer in _answers(batch):
                h_BTD = _generate(model, answer, memory, execution)
                exact_B |= _exact_matches(
                    _right(padded_logits(model, h_BTD), model, answer), answer
                )
            # A row without counted targets is padding of the batch.
            exact_B &= (batch.loss_mask != 0).any(-1)
            found["exact_match"] = exact_B.sum(dtype=jnp.float32)
        return found, statistics

    def of_hidden(
        self, model: PairModule, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return the sums of `loss`, `accuracy` (targets with the highest logit) and `exact_match`.

        An exact match is a row whose targets all have the highest logit, which greedy decoding
        reproduces.
        """
        mask_BT = batch.loss_mask
        with jax.named_scope("loss"):
            # A non-finite hidden state at a masked position would reach the output
            # matrix's gradient as 0 x NaN.
            h_BTD = jnp.where(mask_BT[..., None] != 0, h_BTD, 0)
            logits_BTV, size = padded_logits(model, h_BTD), vocabulary(model)
            losses_BT = losses(
                logits_BTV, batch.targets, mask_BT, settings, train=train, classes=size
            )
            right_BT = _right(logits_BTV, model, batch)
        return {
            "loss": losses_BT.sum(),
            "accuracy": (right_BT * mask_BT).sum(),
            "exact_match": _exact_matches(right_BT, batch).sum(dtype=jnp.float32),
        }

    def reading(self, inputs: Any) -> Batch:
        """Raise UserError: logits need a target, not only a source."""
        raise UserError(
            f"objective {self.name!r} reads pairs: give a Batch with source, source_segment_ids, "
            "inputs and segment_ids"
        )

    def logits(
        self, model: PairModule, statistics: Any, batch: Batch, execution: Execution
    ) -> jax.Array:
        """Return the logits of the token at each target position, float32 [B, T, V]."""
        del statistics
        return logits(model, hidden_states(model, batch, execution)).astype(jnp.float32)

    def validate(self, batch: Batch, model: Model, settings: Loss, layout: Layout) -> Iterator[str]:
        """Yield errors unless targets are [B, T] and sources [B, S], of tokens in the
        vocabulary.
        """
        found = list(validate_form(batch, "inputs", "int32", ("B", "T")))
        if not found:
            shape = batch.inputs.shape
            found += validate_form(batch, "targets", "int32", shape)
            found += validate_form(batch, "loss_mask", "float32", shape)
            found += validate_form(batch, "segment_ids", "int32", shape)
            found += validate_form(batch, "source", "int32", (shape[0], "S"))
        if batch.positions is not None:
            found.append(
                "Batch.positions is not None; the tokens of a pair have their own positions"
            )
        if not found:
            assert batch.source is not None, "looked at before"
            found += validate_form(batch, "source_segment_ids", "int32", batch.source.shape)
        if not found:
            found += _validate_tokens(batch, pair_model(model))
        if not found and batch.answers is not None:
            found += validate_answers(layout)
            for answer in _answers(batch):
                found += self.validate(answer, model, settings, layout)
        yield from found


class Seen(NamedTuple):
    """Attention masks of a batch: source, target, and target to source."""

    source: Mask
    target: Mask
    of_memory: Mask


def masks_of(batch: Batch) -> Seen:
    """Return the attention masks of a batch of pairs, without position biases."""
    own_BT, of_source_BS = batch.segment_ids, batch.source_segment_ids
    return Seen(
        Mask(causal=False, segment_ids_BT=of_source_BS, segment_ids_BS=of_source_BS),
        Mask(segment_ids_BT=own_BT, segment_ids_BS=own_BT),
        Mask(causal=False, segment_ids_BT=own_BT, segment_ids_BS=of_source_BS),
    )


def hidden_states(model: PairModule, batch: Batch, execution: Execution) -> jax.Array:
    """Return the final hidden states of the targets, [B, T, D]."""
    return _generate(model, batch, _read(model, batch, execution), execution)


def _read(model: PairModule, batch: Batch, execution: Execution) -> Any:
    assert batch.source is not None, "a batch of pairs has sources"
    return model.encode(batch.source, masks_of(batch).source, execution)


def _generate(model: PairModule, batch: Batch, memory: Any, execution: Execution) -> jax.Array:
    masks = masks_of(batch)
    return model.decode(batch.inputs, memory, masks.target, masks.of_memory, execution)


def _right(logits_BTV: jax.Array, model: PairModule, batch: Batch) -> jax.Array:
    """Return whether each target has the highest logit, bool [B, T]."""
    real_V = jnp.arange(logits_BTV.shape[-1]) < vocabulary(model)
    return jnp.where(real_V, logits_BTV, -jnp.inf).argmax(-1) == batch.targets


def _exact_matches(right_BT: jax.Array, batch: Batch) -> jax.Array:
    """Return whether each row has targets that count, all of them predicted correctly, bool [B]."""
    counts_BT = batch.loss_mask != 0
    return (right_BT | ~counts_BT).all(-1) & counts_BT.any(-1)


def _answers(batch: Batch) -> Iterator[Batch]:
    """Yield the batch with each of its further answers as targets."""
    sources = {"source": batch.source, "source_segment_ids": batch.source_segment_ids}
    return (dataclasses.replace(answer, **sources) for answer in batch.answers or ())


def validate_answers(layout: Layout) -> Iterator[str]:
    """Yield why several answers for a source are not supported on a mesh."""
    if layout.mesh.shape["pipe"] > 1:
        yield (
            f"Mesh.pipe={layout.mesh.shape['pipe']}: a pipeline uses only the first answer of "
            "each source, and there are sources with several; use Mesh.pipe=1, or give each "
            "one answer"
        )


def _validate_tokens(batch: Batch, model: TokenModel) -> Iterator[str]:
    name, last = type(model).__name__, model.vocab_size - 1
    why = f" ({name}.vocab_size={model.vocab_size})"
    for field in ("inputs", "source"):
        length = getattr(batch, field).shape[1]
        if length > model.context_length:
            yield (
                f"Batch.{field} has rows of {length} tokens; use at most {model.context_length} "
                f"({name}.context_length)"
            )
        yield from validate_values(batch, field, 0, last, why=why)
    yield from validate_values(batch, "targets", 0, last, why=why, counted=True)
    yield from validate_values(batch, "loss_mask", 0, None)
    # A recurrent decoder resumes from the states after its row's one source.
    most = 1 if model.attention is None else None
    why = f" ({name} reads one pair a row)" if most else ""
    yield from validate_values(batch, "segment_ids", 0, most, why=why)
    yield from validate_values(batch, "source_segment_ids", 0, most, why=why)
