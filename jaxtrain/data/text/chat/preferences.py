"""`PreferenceData`: prompts with a chosen and a rejected answer (DPO).

Letter: T row length.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, WholeBatches, digest
from jaxtrain.data.text.chat.conversations import Template, Templated, format_answer
from jaxtrain.data.text.formats.json_lines import BadLineError
from jaxtrain.data.text.packing import token_counts
from jaxtrain.data.tokenization.tokenizer import Tokenizer

CHOSEN, REJECTED = 1, 2  # the documents of a row

# Tokens of both texts of a pair, and which of them belong to an answer.
Pair = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceData(Templated):
    """Preference data for `Train.objective = @DPO()`. Records have a `prompt`, the `chosen` answer
    and the `rejected` one, all three text or lists of messages. A row is a pair: the prompt with
    one answer, then with the other, masked from each other; texts are truncated if both do not fit
    in a row, each to at least half of it.
    """

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, self.sequence_length)
        tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
        floats: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(tokens, tokens, floats, tokens, tokens, reference=floats)

    def open(self, *, seed: int) -> Dataset:
        """Read, format and tokenize the pairs; nothing depends on `seed`.

        Raises:
          UserError: as in `Templated.split`; or no answers of a split fit into a row.
        """
        del seed
        tokenizer = self.open_tokenizer()
        template: Template = functools.cache(self.open_template)
        *splits, left_out = self.split(lambda record: _pair(record, template, tokenizer))
        train, heldout = (self._rows(split) for split in splits)
        header = {
            "kind": "preferences",
            "tokenizer": tokenizer.digest,
            "sequence_length": self.sequence_length,
        }
        parts = [
            array for one in (train, heldout) for pair in one.pairs for text in pair
            for array in (text[0], text[1].astype(np.uint8))
        ]  # fmt: skip
        facts = {
            "source": self.source,
            "documents": sum(map(len, splits)),
            "train_documents": len(train),
            "heldout_documents": len(heldout),
            "train_tokens": int(train.document_lengths().sum()),
            "heldout_tokens": int(heldout.document_lengths().sum()),
            "cut_documents": train.cut + heldout.cut,
            "vocab_size": tokenizer.vocab_size,
            "unigram_entropy": _unigram_entropy((train, heldout), tokenizer.vocab_size),
            **left_out,
        }
        return Dataset(train, heldout, digest(header, parts), facts, tokenizer, "tokens")

    def _rows(self, pairs: list[Pair]) -> "Pairs":
        fitted = [_truncate(pair, self.sequence_length) for pair in pairs]
        kept = [pair for pair in fitted if all(answer_mask[1:].any() for _, answer_mask in pair)]
        if not kept:
            raise UserError(
                f"PreferenceData.source = {self.source!r}: no two answers of a split begin within "
                f"PreferenceData.sequence_length = {self.sequence_length} tokens; use a longer one"
            )
        cut = sum(
            len(ids) > len(less)
            for pair, short in zip(pairs, fitted, strict=True)
            for (ids, _), (less, _) in zip(pair, short, strict=True)
        )
        return Pairs(kept, self.sequence_length, cut)


@dataclasses.dataclass(frozen=True)
class Pairs(WholeBatches):
    """Rows of two texts each.

    Attributes:
      pairs: the tokens of the chosen and of the rejected text, and which belong to an answer.
      sequence_length: T, in tokens.
      cut: number of truncated texts.
      reference: float32 [pairs, T], a reference model's log-probability of each target; None: they
        are unknown, and 0.
    """

    pairs: list[Pair]
    sequence_length: int
    cut: int
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each text, int64 [2 x pairs]."""
        return np.array([len(ids) for pair in self.pairs for ids, _ in pair], np.int64)

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the pairs `indices`, stacked: tokens [len(indices), T]."""
        shape = (len(indices), self.sequence_length)
        inputs, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
        loss_mask = np.zeros(shape, np.float32)
        for row, index in enumerate(indices.tolist()):
            position = 0
            for document, (ids, answer_mask) in zip(
                (CHOSEN, REJECTED), self.pairs[index], strict=True
            ):
                here = slice(position, position + len(ids) - 1)
                inputs[row, here], targets[row, here] = ids[:-1], ids[1:]
                loss_mask[row, here], segment_ids[row, here] = answer_mask[1:], document
                positions[row, here] = np.arange(len(ids) - 1)
                position = here.stop
        reference = (
            np.zeros(shape, np.float32) if self.reference is None else self.reference[indices]
        )
        return Batch(inputs, targets, loss_mask, segment_ids, positions, reference=reference)


def _pair(record: dict[str, Any], template: Template, tokenizer: Tokenizer) -> Pair:
    for name in ("prompt", "chosen", "rejected"):
        if name not in record:
            raise BadLineError(f"no field {name!r}{did_you_mean(name, record)}")
    chosen, rejected = (
        format_answer(record, name, template).encode(tokenizer) for name in ("chosen", "rejected")
    )
    return chosen, rejected


def _truncate(pair: Pair, length: int) -> Pair:
    """Truncate both texts to fit into a row, in which each has at least half."""
    sizes = [len(ids) - 1 for ids, _ in pair]
    half = length // 2
    first = min(sizes[0], max(half, length - sizes[1]))
    second = min(sizes[1], length - first)
    (chosen, of_chosen), (rejected, of_rejected) = pair
    return (
        (chosen[: first + 1], of_chosen[: first + 1]),
        (rejected[: second + 1], of_rejected[: second + 1]),
    )


def _unigram_entropy(splits: tuple["Pairs", "Pairs"], vocab_size: int) -> float:
    """Return nats per held-out token for a model that only knows the tokens' frequencies."""
    counts = [
        token_counts(np.concatenate([ids for pair in one.pairs for ids, _ in pair]), vocab_size)
        for one in splits
    ]
    corpus, answers = sum(counts[1:], counts[0]), counts[1]
    seen = answers > 0
    return float(-(answers[seen] * np.log(corpus[seen] / corpus.sum())).sum() / answers.sum())
