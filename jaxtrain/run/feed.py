"""Input pipeline of a run: its dataset, training and held-out batches, placed on devices.

A large text is tokenized once, into a token store in the cache folder (`with_stores`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import cache_folder
from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.batch import Batch, on_host
from jaxtrain.data.loader import Prefetcher, batches, heldout_batches, process_rows, to_device
from jaxtrain.data.source import Dataset, Part, is_store, part_digest
from jaxtrain.data.text.source import TextData
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.compiled_step import Stepper
from jaxtrain.training.layouts import rows_held, with_filling_rows
from jaxtrain.training.settings import Config
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import Step


class RunData:
    """The data of a run."""

    def __init__(
        self,
        config: Config,
        step: Step,
        workdir: AnyPath | None,
        *,
        writes: bool,
        report: Callable[[str], None],
    ) -> None:
        """Open nothing yet.

        Args:
          config: names the source.
          step: its objective uses the data.
          workdir: the run's folder; None: it has none.
          writes: whether results computed from the data are stored there.
          report: called with each line to print.
        """
        self._config, self._step, self._workdir = config, step, workdir
        self._writes, self._report = writes, report

    @functools.cached_property
    def opened(self) -> Dataset:
        """The data for the objective, without reference log-probabilities.

        Raises:
          UserError: the source cannot be read.
        """
        train = self._config.train
        opened = with_stores(train.data, self._report).open(seed=train.seed)
        return self._step.setup.objective.dataset(opened, train.model)

    def dataset(self, stepper: Stepper, steps_done: int) -> Dataset:
        """Return the data, for a new run with what its first model says of them; that is computed
        here.

        Args:
          stepper: has the state.
          steps_done: optimizer steps that it has taken.
        """
        if not self._step.setup.objective.refers:
            return self.opened
        from jaxtrain.run.reference import first_reference, stored_reference

        if steps_done:
            return stored_reference(self.opened, self._workdir)
        keep = self._workdir if self._writes else None
        state = self._step.eval_state(stepper.state)
        return first_reference(self.opened, self._step.setup, state, keep, report=self._report)


class Feed:
    """Reads each process's rows of every batch and moves them to its devices ahead of time."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        step: Step,
        bad_records: BadRecords,
    ) -> None:
        """Args: config: the data and batch sizes. bad_records: counts unreadable records."""
        self._config, self._train = config, config.train
        self._layout, self._step = layout, step
        self._held = rows_held(config, layout)
        split = step.setup.layout
        self._sharding = split.sharding_of(split.activation(("batch",)))  # of every array
        self._bad_records = bad_records

    def training(self, dataset: Dataset, start: int) -> Prefetcher[Batch]:
        """Yield global batches indefinitely, from batch `start` on.

        Raises:
          UserError: the held-out examples cannot be evaluated on this mesh.
        """
        self._validate(dataset)
        rows = process_rows(self._sharding, self._held)
        source = batches(
            dataset.train,
            global_batch_size=self._train.global_batch_size,
            seed=self._train.seed,
            start=start,
            rows=rows,
            bad_records=self._bad_records,
            order=dataset.mixing or dataset.by_length,
            workers=dataset.workers,
        )
        return self._prefetch(source, self._held, rows)

    def heldout(self, dataset: Dataset, part: range | None = None) -> Prefetcher[Batch]:
        """Return every held-out example once, a microbatch at a time: what fits while training
        fits.

        Args:
          dataset: the data.
          part: the examples; None: all.

        Raises:
          UserError: they cannot be evaluated on this mesh.
        """
        self._validate(dataset)
        size = self._held // self._train.accumulation
        rows = process_rows(self._sharding, size)
        source = heldout_batches(
            dataset.heldout if part is None else Part(dataset.heldout, part),
            global_batch_size=size,
            rows=rows,
            bad_records=self._bad_records,
            workers=dataset.workers,
        )
        return self._prefetch(source, size, rows)

    def own(self, caller: str, batch: Batch, *, whole: bool = False) -> Batch:
        """Return a user-provided batch on the devices, padded if the settings say so.

        Args:
          caller: the method of `Trainer` that received it.
          batch: the global batch.
          whole: whether it is not split into accumulated microbatches.

        Raises:
          UserError: it cannot be read, or does not divide.
        """
        if not isinstance(batch, Batch):
            raise UserError(
                f"Trainer.{caller} takes a jaxtrain.Batch, not a {type(batch).__name__}"
            )
        batch = on_host(batch)
        train, setup = self._train, self._step.setup
        if whole:
            train = dataclasses.replace(train, accumulation=1)
            setup = dataclasses.replace(setup, accumulation=1)
        config = dataclasses.replace(self._config, train=train)
        batch = with_filling_rows(batch, config, self._layout)
        setup.validate(batch, train.model)
        return jax.device_put(batch, setup.batch_shardings(batch))

    def abstract_training(self) -> Batch:
        """Return the shapes, dtypes and shardings of a batch of `training`."""
        batch = self._train.data.abstract_batch(self._held)
        return with_shardings(batch, self._step.setup.batch_shardings(batch))

    def abstract_shapes(self) -> list[Batch]:
        """Return the same for each length of rows."""
        size, data = self._held, self._train.data
        found = (
            [data.abstract_batch(size, length) for length in data.row_lengths]
            if isinstance(data, TextData)
            else [data.abstract_batch(size)]
        )
        return [with_shardings(one, self._step.setup.batch_shardings(one)) for one in found]

    def _validate(self, dataset: Dataset) -> None:
        if self._layout.mesh.shape["pipe"] == 1:
            return
        # Imported here: only such meshes need to know whether sources have several targets.
        from jaxtrain.data.pairs.source import Pairs
        from jaxtrain.training.objectives.sequence_to_sequence import validate_answers

        held = dataset.heldout
        if isinstance(held, Pairs) and len(held.targets) > 1:
            for reason in validate_answers(self._layout):
                raise UserError(reason)

    def _prefetch(self, source: Iterator[Batch], size: int, rows: np.ndarray) -> Prefetcher[Batch]:
        """Place the batches of `size` rows ahead of time; `rows` are this process's."""
        return Prefetcher(source, lambda batch: to_device(batch, self._sharding, size, rows))


# -- token stores of large texts, in the cache folder --------------------------------------------

LARGE_BYTES = 1 << 28  # of files; less is tokenized into memory in seconds
_REPORT_SECONDS = 30.0


def with_stores(data: Any, report: Callable[[str], None]) -> Any:
    """Return a run's data, with a token store on this machine for each large text and for each
    small store in a bucket.

    Batches and digest are those of the text. A store is created if there is none yet of this text,
    this tokenizer and these settings; one process per machine creates it.

    Args:
      data: the settings.
      report: called with each line to print.

    Raises:
      UserError: as in `prepare`; or the cache folder cannot be written.
    """
    if isinstance(data, TextData):
        return _load_or_make(data, report)
    # Imported here: most runs read one source.
    from jaxtrain.data.mixture import Mixture

    if isinstance(data, Mixture):
        kept = {
            name: _load_or_make(dataclasses.replace(data.data, source=source), report).source
            for name, source in data.sources.items()
        }
        return dataclasses.replace(data, sources=kept)
    return data


def _load_or_make(data: TextData, report: Callable[[str], None]) -> TextData:
    path = data.path()
    if path is not None and is_store(path):
        if isinstance(path, BucketPath):
            from jaxtrain.data.text.stores.prepare import fetch

            folder, away = fetch(path, report)
            return data if away is not None else dataclasses.replace(data, source=str(folder))
        return data
    if data.is_tokens():
        return data
    size = data.size()
    if size is None or size < LARGE_BYTES:
        return data
    return dataclasses.replace(data, source=str(_make(data, size, report)), heldout_split=None)


def _make(data: TextData, size: int, report: Callable[[str], None]) -> Path:
    """Return the store of a large text; splits, if the source has them, and bad records are
    decided.

    Args:
      data: the text.
      size: its bytes.
      report: called with each line to print.
    """
    # Imported here: most runs read less text than this.
    from jaxtrain.config.files import make_once
    from jaxtrain.data.text.stores.prepare import identity, prepare, source_characters
    from jaxtrain.data.text.stores.tokenizing import PIECES

    tokenizer = data.open_tokenizer()
    described = (
        f"{identity(data)} {tokenizer.digest} {tokenizer.end_of_text} {tokenizer.before} "
        f"{tokenizer.after} {PIECES}"
    )
    folder = cache_folder("stores") / part_digest(described.encode())[:32]
    named = f"TextData.source = {data.source!r}"
    if is_store(folder):
        report(f"{named}: its tokens are in {folder}")
    else:
        report(
            f"{named} is large ({size:,} bytes): its tokens are cached in {folder} for later "
            "runs; JAXTRAIN_CACHE moves the cache, jaxtrain prepare does this beforehand"
        )
    reported_at, known = time.monotonic(), source_characters(data)

    def progress(characters: int, tokens: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at > _REPORT_SECONDS:
            reported_at = time.monotonic()
            share = f"{characters:,} characters" if known is None else f"{characters / known:.0%}"
            report(f"{named}: {share} tokenized, {tokens:,} tokens")

    make_once(
        folder,
        lambda: is_store(folder),
        lambda: prepare(data, folder, workers=1, progress=progress),
    )
    return folder
