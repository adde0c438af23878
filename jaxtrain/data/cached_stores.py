"""Cached token stores: made from large text, or fetched from a bucket, in the cache folder."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.config.buckets import BucketPath
from jaxtrain.config.files import cache_folder
from jaxtrain.data.source import is_store, part_digest
from jaxtrain.data.text.source import TextData

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
            from jaxtrain.data.text.stores.transfer import fetch

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
