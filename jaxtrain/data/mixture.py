"""`Mixture`: several text sources with mixture weights that may change over training."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import jax
import numpy as np

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.mixture_sampler import Mixing, Source, shares_by_size
from jaxtrain.data.source import Dataset, HasDocuments, WholeBatches, digest_of, merge_facts
from jaxtrain.data.text.fill_in_middle import fill_in_middle
from jaxtrain.data.text.source import SOURCE, TextData
from jaxtrain.data.tokenization.tokenizer import Tokenizer

_NEAR = 1e-6  # tolerance of the weights' sum


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Mixture of several text sources in one run, each row from one of them.

    Batch k is a function of the seed, k and the weights; each source has its own
    epochs and its own held-out loss.

    Attributes:
      data: `@TextData()`, the settings that all sources share; its source is not used.
      sources: name -> a value of `TextData.source`.
      weights: name -> its share of the rows; they sum to 1. None: proportional to sizes.
      stages: first step -> the weights from there on, for instance to end on the best text.
      interpolation: 'jump' keeps a stage's weights until the next; 'linear' interpolates from those
        of one stage to those of the next, which has its own at its first step.
      single_epoch: sources that leave the mixture after one epoch; the rest
        start their next epoch.
    """

    data: TextData
    sources: Annotated[dict[str, str], SOURCE]
    weights: dict[str, float] | None = None
    stages: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    interpolation: Literal["jump", "linear"] = "jump"
    single_epoch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("Mixture.sources = {}: name at least one, such as {'code': 'src'}")
        for name in self.sources:
            if not name.isidentifier():
                raise UserError(
                    f"Mixture.sources: {name!r} is used in names of metrics; use letters, digits "
                    "and underscores"
                )
        if self.data.source != TextData().source:
            raise UserError(
                f"TextData.source = {self.data.source!r} is not used with Mixture.sources; add it "
                "to them"
            )
        if self.data.packing == "padded":
            raise UserError(
                "Mixture.data: rows of mixed sources have one length, and TextData."
                "packing = 'padded' gives several; use 'stream' or 'best_fit'"
            )
        for name in self.single_epoch:
            if name not in self.sources:
                raise UserError(
                    f"Mixture.single_epoch: {name!r} is not a "
                    f"source{did_you_mean(name, self.sources)}"
                )
        for setting, weights in self._all_weights():
            self._check(setting, weights)
        for step in self.stages:
            if step < 1:
                raise UserError(
                    f"Mixture.stages: a stage begins at step {step}; use 1 or more, for "
                    "Mixture.weights are those from the beginning"
                )
        if self.interpolation == "linear" and not self.stages:
            raise UserError(
                "Mixture.interpolation = 'linear' goes from Mixture.weights to Mixture.stages, of "
                "which there is none; add one, such as {1000: {...}}"
            )
        if self.weights is None:
            self._validate_only_once("Mixture.weights", dict.fromkeys(self.sources, 1.0))

    def _all_weights(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        if self.weights is not None:
            yield "Mixture.weights", self.weights
        for step, weights in self.stages.items():
            yield f"Mixture.stages[{step}]", weights

    def _check(self, setting: str, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            if name not in self.sources:
                raise UserError(
                    f"{setting}: {name!r} is not a source{did_you_mean(name, self.sources)}"
                )
            if not 0 <= weight <= 1:
                raise UserError(f"{setting}[{name!r}] = {weight}: use a fraction from 0 to 1")
        missing = [name for name in self.sources if name not in weights]
        if missing:
            raise UserError(
                f"{setting} has no share for {', '.join(map(repr, missing))}; give each source "
                "one, 0 for none"
            )
        total = math.fsum(weights.values())
        if abs(total - 1) > _NEAR:
            scaled = {name: round(weight / total, 4) for name, weight in weights.items() if total}
            hint = f", such as {scaled}" if scaled else ""
            raise UserError(f"{setting} sum to {total:g}; they are shares that sum to 1{hint}")
        self._validate_only_once(setting, weights)

    def _validate_only_once(self, setting: str, weights: Mapping[str, float]) -> None:
        if all(name in self.single_epoch for name, weight in weights.items() if weight):
            raise UserError(
                f"{setting} samples only sources that Mixture.single_epoch ends; remove one that "
                "may repeat from it"
            )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the shared tokenizer: all ids are below it."""
        return max(self._of(name).vocab_size for name in self.sources)

    @property
    def tokenizer(self) -> str:
        """Tokenizer, as in `TextData`."""
        return self.data.tokenizer

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer shared by all sources, as in `TextData`."""
        real = [name for name, source in self.sources.items() if source != "synthetic"]
        return self._of((real or list(self.sources))[0]).open_tokenizer()

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes of a batch, as in `TextData`."""
        return self.data.abstract_batch(global_batch_size)

    def open(self, *, seed: int) -> Dataset:
        """Open all sources.

        Raises:
          UserError: as in `TextData`.
        """
        opened = {name: self._of(name).open(seed=seed) for name in self.sources}
        sources = tuple(
            Source(name, len(one.train), int(one.facts["train_tokens"]), len(one.heldout))
            for name, one in opened.items()
        )
        by_size = shares_by_size({source.name: source.rows for source in sources})
        shares = {0: by_size if self.weights is None else self.weights, **self.stages}
        stages = tuple(
            (step, tuple(shares[step][name] for name in self.sources)) for step in sorted(shares)
        )
        once = tuple(name in self.single_epoch for name in self.sources)
        header: dict[str, object] = {
            "kind": "mixture",
            "names": list(opened),
            "stages": stages,
            "once": once,
        }
        if self.interpolation != "jump":  # omitted by default, so that older digests stay valid
            header["between"] = self.interpolation
        first = next(iter(opened.values()))
        mixed = Dataset(
            Concatenated(tuple(_is_whole(one.train) for one in opened.values())),
            Concatenated(tuple(_is_whole(one.heldout) for one in opened.values())),
            digest_of(header, (one.digest for one in opened.values())),
            self._facts(opened),
            first.tokenizer,
            "tokens",
            Mixing(sources, stages, once, self.interpolation == "linear"),
        )
        middle = self.data.fill_in_middle
        return mixed if middle is None else fill_in_middle(mixed, middle)

    def _of(self, name: str) -> TextData:
        # Transformations of drawn rows apply to all sources.
        return dataclasses.replace(self.data, source=self.sources[name], fill_in_middle=None)

    def _facts(self, opened: Mapping[str, Dataset]) -> dict[str, float | int | str]:
        facts: dict[str, float | int | str] = {"source": ", ".join(self.sources.values())}
        for name in ("documents", "train_tokens", "heldout_tokens"):
            facts[name] = sum(int(one.facts[name]) for one in opened.values())
        facts["vocab_size"] = self.vocab_size
        facts |= merge_facts({name: one.facts for name, one in opened.items()})
        # For a model that knows the source, and its token frequencies.
        nats = sum(
            float(one.facts["unigram_entropy"]) * int(one.facts["heldout_tokens"])
            for one in opened.values()
        )
        facts["unigram_entropy"] = nats / int(facts["heldout_tokens"])
        return facts


def _is_whole(examples: object) -> WholeBatches:
    assert isinstance(examples, WholeBatches), "text is"
    return examples


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Concatenated examples of several sources; implements WholeBatches."""

    parts: tuple[WholeBatches, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each document, over all sources that have documents."""
        found = [part.document_lengths() for part in self.parts if isinstance(part, HasDocuments)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return example `index`, counted over all sources."""
        for part in self.parts:
            if index < len(part):
                return part.example(index, rng)
            index -= len(part)
        raise IndexError(index)

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the examples `indices`, stacked; each source is read once."""
        ends = np.cumsum([len(part) for part in self.parts])
        of = np.searchsorted(ends, indices, side="right")
        order, found = list[np.ndarray](), list[Batch]()
        for number in np.unique(of).tolist():
            part, rows = self.parts[number], np.flatnonzero(of == number)
            order.append(rows)
            found.append(part.examples(indices[rows] - (ends[number] - len(part))))
        back = np.argsort(np.concatenate(order))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *found)
