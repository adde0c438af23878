"""`ChatData`: conversations, with the loss on the assistant's answers.

Letter: T row length.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, WholeBatches, digest
from jaxtrain.data.text.chat.conversations import Templated, format_conversation
from jaxtrain.data.text.packing import BestFit, token_counts
from jaxtrain.data.tokenization.tokenizer import Tokenizer

# Tokens of a text, and which of them count in the loss.
Encoded = tuple[np.ndarray, np.ndarray]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatData(Templated):
    """Conversations for supervised fine-tuning (SFT): the loss covers answers alone. Records
    have `messages` of a role and its content, or a `prompt` and a `completion`. Whole conversations
    are packed into rows, masked from each other; a conversation longer than a row is truncated.

    Attributes:
      messages_field: the field or column with the messages.
    """

    messages_field: str = "messages"

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, self.sequence_length)
        tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(tokens, tokens, mask, tokens, tokens)

    def open(self, *, seed: int) -> Dataset:
        """Read, format, tokenize and pack the conversations; nothing depends on `seed`.

        Raises:
          UserError: as in `Templated.split`; or no answer of a split begins within a row.
        """
        del seed
        tokenizer, template = self.open_tokenizer(), functools.cache(self.open_template)

        def encode(record: dict[str, Any]) -> Encoded:
            return format_conversation(record, template, self.messages_field).encode(tokenizer)

        *splits, left_out = self.split(encode)
        train, heldout = (self._pack(split, tokenizer) for split in splits)
        header = {
            "kind": "chat",
            "tokenizer": tokenizer.digest,
            "sequence_length": self.sequence_length,
        }
        parts = [part for one in (train, heldout) for part in one.parts]
        facts = {
            "source": self.source,
            "documents": sum(map(len, splits)),
            "train_documents": len(splits[0]),
            "heldout_documents": len(splits[1]),
            "train_tokens": len(train.rows.tokens),
            "heldout_tokens": len(heldout.rows.tokens),
            "answer_tokens": int(np.asarray(train.answer_mask.tokens).sum()),
            "cut_documents": train.cut + heldout.cut,
            "vocab_size": tokenizer.vocab_size,
            "unigram_entropy": _unigram_entropy(train, heldout, tokenizer.vocab_size),
            "train_padding": train.rows.padding,
            **left_out,
        }
        return Dataset(train, heldout, digest(header, parts), facts, tokenizer, "tokens")

    def _pack(self, texts: Sequence[Encoded], tokenizer: Tokenizer) -> "Answers":
        most = self.sequence_length + 1
        kept = [(ids[:most], answer_mask[:most]) for ids, answer_mask in texts]
        kept = [(ids, answer_mask) for ids, answer_mask in kept if answer_mask[1:].any()]
        if not kept:
            raise UserError(
                f"ChatData.source = {self.source!r}: no answer of a split begins within "
                f"ChatData.sequence_length = {self.sequence_length} tokens; use a longer one"
            )
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in kept])]).astype(np.int64)
        tokens = np.concatenate([ids for ids, _ in kept]).astype(tokenizer.dtype)
        answer_mask = np.concatenate([answer_mask for _, answer_mask in kept]).astype(np.uint8)
        cut = sum(len(ids) > most for ids, _ in texts)
        length = self.sequence_length
        return Answers(BestFit(tokens, offsets, length), BestFit(answer_mask, offsets, length), cut)


@dataclasses.dataclass(frozen=True)
class Answers(WholeBatches):
    """Rows of packed conversations in which only answers count.

    Attributes:
      rows: the tokens, packed.
      answer_mask: 1 for tokens of an answer, which count in the loss, 0 elsewhere; packed alike.
      cut: number of truncated conversations.
    """

    rows: BestFit
    answer_mask: BestFit
    cut: int

    @property
    def parts(self) -> list[np.ndarray]:
        """Arrays that define the rows."""
        return [
            np.asarray(self.rows.tokens),
            self.rows.offsets,
            np.asarray(self.answer_mask.tokens),
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each conversation, int64 [conversations]."""
        return self.rows.document_lengths()

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`, stacked: tokens [len(indices), T]."""
        batch = self.rows.examples(indices)
        # The targets' marks determine whether a position's target belongs to an answer.
        counts = self.answer_mask.examples(indices).targets
        return dataclasses.replace(batch, loss_mask=batch.loss_mask * counts.astype(np.float32))


def _unigram_entropy(train: Answers, heldout: Answers, vocab_size: int) -> float:
    """Return nats per held-out target for a model that only knows the tokens' frequencies."""
    corpus = token_counts(train.rows.tokens, vocab_size)
    corpus += token_counts(heldout.rows.tokens, vocab_size)
    answer_mask = np.asarray(heldout.answer_mask.tokens) > 0
    answer_mask[heldout.rows.offsets[:-1]] = False
    targets = token_counts(np.asarray(heldout.rows.tokens)[answer_mask], vocab_size)
    seen = targets > 0
    log_p = np.log(corpus[seen] / corpus.sum())
    return float(-(targets[seen] * log_p).sum() / targets.sum())
