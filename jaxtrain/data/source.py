"""Interface of data sources: random access to examples, digest, held-out split, glob patterns."""

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath, require, to_path
from jaxtrain.config.errors import UserError, count_of, nearest
from jaxtrain.config.files import path_errors
from jaxtrain.data.batch import Batch
from jaxtrain.data.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxtrain.data.mixture_sampler import ByLength, Mixing
    from jaxtrain.data.token_arrays import Tokens


Split = Literal["train", "heldout"]

STORE_FILE = "store.json"  # written last: a folder without it is no token store, or not yet
_DIGEST_SLICE = 1 << 24  # rows of an array, hashed together
TFDS_PREFIX = "tfds:"
# NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION: no part can climb out of data_dir.
_TFDS_NAME = re.compile(r"[A-Za-z0-9_]+(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)?(:\d+\.\d+\.\d+)?")


class Examples(Protocol):
    """Interface of examples: random access to one split."""

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return an example without a batch dimension; `rng` drives augmentation, None is
        evaluation.
        """
        ...


@runtime_checkable
class WholeBatches(Examples, Protocol):
    """Examples without augmentation that are faster to read in batches."""

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return a single example, the same for any `rng`."""
        return jax.tree.map(lambda leaf: leaf[0], self.examples(np.array([index])))

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the examples `indices` with a leading batch dimension, each as `example` returns
        it.
        """
        ...


@runtime_checkable
class MixedRows(Examples, Protocol):
    """Examples that are mixed in training (mixup, CutMix): each row with its neighbor."""

    def mix(self, own: Batch, other: Batch, rng: np.random.Generator) -> Batch:
        """Mix a row of a training batch with its neighbor, each as `example` returns it."""
        ...


@runtime_checkable
class HasDocuments(Examples, Protocol):
    """Examples cut from documents."""

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each document, int64 [documents]."""
        ...


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive examples of a split; implements Examples."""

    of: Examples
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return example `index` of the part."""
        return self.of.example(self.indices[index], rng)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Opened data source: its training and held-out examples, digest and facts.

    Attributes:
      train: the examples to train on.
      heldout: the examples to evaluate on; no document or image is in both.
      digest: sha256 hex of all that defines the examples: content, tokenizer, split, sizes.
      facts: numbers to show and to check, e.g. `documents`, `train_tokens`, `vocab_size`,
        `unigram_entropy` (nats per held-out target).
      tokenizer: the tokenizer; None for all but text, and for random tokens.
      unit: the unit of throughput.
      mixing: the sampler of a mixture; None: all examples, each once per epoch.
      by_length: for rows of several lengths, the order of batches; None: one length.
      workers: processes that make batches; 0: threads of this process.
    """

    train: Examples
    heldout: Examples
    digest: str
    facts: dict[str, float | int | str]
    tokenizer: Tokenizer | None
    unit: Literal["tokens", "images", "vectors", "pairs"]
    mixing: "Mixing | None" = None
    by_length: "ByLength | None" = None
    workers: int = 0


def is_heldout(count: int, fraction: float) -> np.ndarray:
    """Return the held-out mask, bool [count]: floor(count * fraction) evenly spaced positions.

    With 1/20 it is the 20th, the 40th, ...: every part of a sorted source is represented.
    """
    return np.diff(_count_held_out(np.arange(count + 1), fraction)) > 0


def hold_out(count: int, fraction: float) -> np.ndarray:
    """Return a mask as `is_heldout` does; the last of two or more if the fraction selects none."""
    held = is_heldout(count, fraction)
    if count > 1 and not held.any():
        held[-1] = True
    return held


def is_held_out(position: int, fraction: float) -> bool:
    """Whether `is_heldout` holds out this position, independent of the count."""
    return bool(np.diff(_count_held_out(np.arange(position, position + 2), fraction))[0] > 0)


def _count_held_out(positions: np.ndarray, fraction: float) -> np.ndarray:
    # The rounding corrects products such as 0.29 * 100 = 28.999999999999996.
    return np.floor(np.round(positions * fraction, 9))


def check_heldout_fraction(name: str, fraction: float) -> None:
    """Raise UserError unless 0 < fraction < 1."""
    if not 0.0 < fraction < 1.0:
        raise UserError(
            f"{name} = {fraction}: the held-out fraction is between 0 and 1, such as 0.05"
        )


def check_heldout_split(name: str, train: str, heldout: str | None, *, named: bool) -> None:
    """Raise UserError for a held-out split without named splits, or equal to the training split."""
    if heldout is None:
        return
    if not named:
        raise UserError(
            f"{name}.heldout_split = {heldout!r}: only a 'tfds:NAME' source has named splits, and "
            f"a folder that `datasets` saved with splits; leave it None and set "
            f"{name}.heldout_fraction"
        )
    if heldout == train:
        raise UserError(
            f"{name}.heldout_split = {heldout!r} is {name}.train_split too; name another split, or "
            "None to hold out a part of it"
        )


def digest(header: dict[str, Any], parts: "Iterable[bytes | Tokens]") -> str:
    """Return the sha256 hex of a JSON header and of the digests of `parts`."""
    return digest_of(header, map(part_digest, parts))


def digest_of(header: dict[str, Any], parts: Iterable[str]) -> str:
    """Return the `digest` of parts whose own digests are known."""
    sha = hashlib.sha256(json.dumps(header, sort_keys=True).encode("utf-8"))
    for part in parts:
        sha.update(bytes.fromhex(part))
    return sha.hexdigest()


def part_digest(part: "bytes | Tokens") -> str:
    """Return the sha256 hex of the bytes of one part."""
    sha = hashlib.sha256()
    if isinstance(part, bytes):
        sha.update(part)
    else:
        for begin in range(0, len(part), _DIGEST_SLICE):
            sha.update(np.ascontiguousarray(part[begin : begin + _DIGEST_SLICE]).data)
    return sha.hexdigest()


def existing_path(setting: str, value: str, *, words: Iterable[str] = ()) -> AnyPath:
    """Return the path that a setting names, on this machine or in a bucket.

    Args:
      setting: the binding, for the message.
      value: a path, `~` allowed, relative to the current folder; or gs://BUCKET/PATH.
      words: values other than paths that the setting accepts.

    Raises:
      UserError: no such path, or it cannot be read; names the closest of `words` and of the
        names in that folder.
      BucketError: a bucket does not answer.
    """
    scheme, separator, rest = value.partition("://")
    if separator and "@" in rest.partition("/")[0]:
        raise UserError(
            f"{setting} = '{scheme}://...@...': credentials in a URL would be written to "
            "config.gin and to logs; leave them out and log in with the storage's own tools"
        )
    words = list(words)
    allowed = f"a path or one of {', '.join(map(repr, words))}" if words else "a path"
    path = _to_path(setting, value)
    if isinstance(path, BucketPath):
        return _in_bucket(setting, path, allowed)
    with path_errors(f"{setting} = {value!r}", needs=f"it takes {allowed}"):
        if value and path.exists():
            return path
        folder = path.parent
        while not folder.is_dir():
            folder = folder.parent
        near_name = value[: len(value) - len(path.name)] if folder == path.parent else f"{folder}/"
        close = nearest(value, words + [near_name + child.name for child in folder.iterdir()])
    hint = f"; did you mean {close!r}?" if close else ""
    raise UserError(f"{setting} = {value!r}: no such file or folder; it takes {allowed}{hint}")


def _to_path(setting: str, value: str) -> AnyPath:
    try:
        return to_path(value)
    except UserError as error:
        raise UserError(f"{setting} = {value!r}: {error}") from error


def _in_bucket(setting: str, path: BucketPath, allowed: str) -> BucketPath:
    require(f"{setting} =", path)
    if path.exists():
        return path
    folder = path.parent
    near = folder.iterdir() if folder != path and folder.exists() else ()
    close = nearest(str(path), map(str, near))
    hint = f"; did you mean {close!r}?" if close else ""
    raise UserError(
        f"{setting} = {str(path)!r}: the bucket has no such file or folder; it takes {allowed}"
        f"{hint}"
    )


def is_store(path: AnyPath) -> bool:
    """Whether a folder, on a disk or in a bucket, is a complete token store."""
    return (path / STORE_FILE).is_file()


def walk_files(root: AnyPath, setting: str) -> Iterator[tuple[AnyPath, str, int]]:
    """Yield the files under `root` with their relative names and sizes in bytes, sorted by path.

    Names with a leading dot are skipped. A link to a path inside the folder is skipped too: that
    path is read itself.

    Raises:
      UserError: a link leads out of the folder, or an object's name would.
    """
    if isinstance(root, BucketPath):
        rows = [(row.name.split("/"), row) for row in root.list_objects()]
        for parts, row in sorted(rows, key=lambda pair: pair[0]):
            if not any(part.startswith(".") for part in parts):
                yield root / row.name, row.name, row.bytes
        return
    inside, found = root.resolve(), []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (name for name in folders + files if not name.startswith(".")):
            path = Path(folder, name)
            if path.is_symlink():
                if not path.resolve().is_relative_to(inside):
                    raise UserError(
                        f"{setting} = {str(root)!r}: {path} is a link to {path.resolve()}, outside "
                        "the folder; put a copy there or remove the link"
                    )
            elif path.is_file():
                found.append(path)
    for path in sorted(found, key=lambda path: path.relative_to(root).parts):
        yield path, path.relative_to(root).as_posix(), path.stat().st_size


def tfds_name(setting: str, source: str) -> str | None:
    """Return NAME of `'tfds:NAME'`, None for another source.

    Raises:
      UserError: what follows `tfds:` is no name.
    """
    if not source.startswith(TFDS_PREFIX):
        return None
    name = source.removeprefix(TFDS_PREFIX)
    if not _TFDS_NAME.fullmatch(name):
        raise UserError(
            f"{setting} = {source!r}: after 'tfds:' comes NAME, NAME/CONFIG or "
            "NAME/CONFIG:VERSION, such as 'tfds:imagenet2012:5.1.0'"
        )
    return name


def is_glob(source: str) -> bool:
    """Whether a source is a glob pattern and not an existing path."""
    return bool(re.search(r"[*?\[]", source)) and ("://" in source or not Path(source).exists())


def glob_files(source: str, setting: str) -> list[AnyPath]:
    """Return the files that match a pattern, sorted by path.

    Args:
      source: the pattern, relative, absolute or in a bucket.
      setting: the binding, for the message.

    Raises:
      UserError: its leading folder does not exist, nothing matches, or a link leads out of
        that folder.
    """
    under = _root(source)
    root = existing_path(setting, under)
    patterns = (source if under == "." else source.removeprefix(under)).strip("/").split("/")
    walked = list(walk_files(root, setting))
    paths = [path for path, name, _ in walked if _matches(name.split("/"), patterns)]
    if not paths:
        raise UserError(
            f"{setting} = {source!r}: none of the {len(walked):,} files under {root} matches it; "
            "'*' stays within a name, '**' stands for any folders"
        )
    return paths


def _root(source: str) -> str:
    """Return the deepest folder that contains all possible matches of a pattern."""
    parts = source.split("/")
    first = next(index for index, part in enumerate(parts) if re.search(r"[*?\[]", part))
    return "/".join(parts[:first]) or ("/" if source.startswith("/") else ".")


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    first, *others = patterns
    if first == "**":
        return any(_matches(names[begin:], others) for begin in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], first) and _matches(names[1:], others)


# -- facts of what a source reads and leaves out ---------------------------------------------------
# `files`, `files_left_out` and `endings_left_out` of a folder, `bad_records` and
# `first_bad_records` of files of records, `converted` of images, `heldout_rule`, and
# `no_end_of_text` of a tokenizer.

Facts = dict[str, float | int | str]

NO_ENDING = "no ending"

# Facts that are sentences or lists: shown on lines of their own.
SENTENCES = ("endings_left_out", "first_bad_records", "converted", "heldout_rule", "no_end_of_text")
_COUNTS = ("files", "files_left_out", "bad_records")


def ending_of(name: str) -> str:
    """Return a file name's suffix in lower case, or that it has none."""
    return PurePosixPath(name).suffix.lower() or NO_ENDING


def file_facts(read: int, left_out: Mapping[str, int]) -> dict[str, int | str]:
    """Return facts of a folder from which files are left out; none if all are read.

    Args:
      read: how many files are read.
      left_out: number of skipped files, by suffix.
    """
    if not left_out:
        return {}
    most = sorted(left_out.items(), key=lambda pair: (-pair[1], pair[0]))
    return {
        "files": read,
        "files_left_out": sum(left_out.values()),
        "endings_left_out": ", ".join(f"{ending} {count:,}" for ending, count in most),
    }


def heldout_facts(
    setting: str, fraction: float, count: int, unit: str, *, each: str | None = None
) -> dict[str, int | str]:
    """Return the fact that one example is held out, where the fraction alone would select none.

    Args:
      setting: the binding of the fraction.
      fraction: its value.
      count: of all examples, those held out too.
      unit: what they are, such as "document".
      each: the group of which one example each is held out, such as "class"; it has at most
        `count` examples.
    """
    of = f"{count_of(count, unit)}" if each is None else f"at most {count_of(count, unit)} a {each}"
    return {
        "heldout_rule": f"Held out the last of {of}, because {setting} = {fraction} of them is "
        "less than one"
    }


def merge_facts(facts: Mapping[str, Mapping[str, object]]) -> Facts:
    """Merge the facts of this kind from several sources.

    Args:
      facts: by the name of the source.
    """
    found: Facts = {}
    for name in _COUNTS:
        values = [one[name] for one in facts.values() if name in one]
        if values:
            found[name] = sum(value for value in values if isinstance(value, int))
    for name in SENTENCES:
        lines = [f"{source}: {one[name]}" for source, one in facts.items() if name in one]
        if lines:
            found[name] = "; ".join(lines)
    return found


def sentences(facts: Mapping[str, object]) -> list[str]:
    """Return a message for each of these facts."""
    messages = []
    if "files_left_out" in facts:
        messages.append(
            f"Left out {count_of(_int(facts['files_left_out']), 'file')} next to the "
            f"{_int(facts['files']):,} that are read ({facts['endings_left_out']}): " + _way(facts)
        )
    if "first_bad_records" in facts:
        bad = count_of(_int(facts["bad_records"]), "record")
        messages.append(f"Left out {bad}: {facts['first_bad_records']}")
    whole = ("converted", "heldout_rule", "no_end_of_text")
    return messages + [str(facts[name]) for name in whole if name in facts]


def _way(facts: Mapping[str, object]) -> str:
    if "train_images" in facts:
        return "only PNG and JPEG files are read; convert the others"
    if "cut_documents" in facts:
        return "only files of records are read"
    return "their endings are not those of text; a pattern as the source, 'DIR/**', reads all files"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
