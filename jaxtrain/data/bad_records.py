"""Bad records: skipped, or replaced by zero-weight rows; report of what a source leaves out.

Facts of a report are `files`, `files_left_out` and `endings_left_out` of a folder, `bad_records`
and `first_bad_records` of files of records, `converted` of images, `heldout_rule`, and
`no_end_of_text` of a tokenizer.
"""

import dataclasses
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import numpy as np

from jaxtrain.config.errors import UserError, count_of
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Examples

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


def merge(facts: Mapping[str, Mapping[str, object]]) -> Facts:
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


# What reading a damaged record raises: array_record RuntimeError (a chunk's hash differs), files
# OSError and EOFError, Pillow any of them and UserError (a ValueError) from image_source.decode,
# text UnicodeDecodeError (a ValueError), TFDS LookupError for a feature that is missing.
# TypeError, AttributeError and AssertionError are errors in a program: those go through.
UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, LookupError, zlib.error, struct.error)


class BadRecordError(UserError):
    """More unreadable examples than Train.bad_records allows."""


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """Example that could not be read.

    Attributes:
      split: 'training' or 'held-out'.
      index: its number in that split, from 0.
      cause: the read error, one line.
    """

    split: str
    index: int
    cause: str

    def __str__(self) -> str:
        return f"{self.split} example {self.index} cannot be read ({self.cause})"


class BadRecords:
    """Unreadable examples of this process in this attempt; safe to use from threads.

    Args:
      limit: how many are allowed; an example counts once, however often it is drawn.
      report: called with each new one, from the thread that found it.
    """

    def __init__(self, limit: int = 0, report: Callable[[BadRecord], None] | None = None) -> None:
        self.limit = limit
        self._report = report
        self._found: dict[tuple[str, int], BadRecord] = {}
        self._lock = threading.Lock()

    @property
    def found(self) -> list[BadRecord]:
        """Bad records found so far."""
        with self._lock:
            return list(self._found.values())

    def add(self, record: BadRecord, error: BaseException) -> None:
        """Count `record`, which raised `error`.

        Raises:
          BadRecordError: there are more than the limit.
        """
        with self._lock:
            new = (record.split, record.index) not in self._found
            self._found.setdefault((record.split, record.index), record)
            count = len(self._found)
        if new and self._report is not None:
            self._report(record)
        # Also for one that is counted already: another thread's batch may have found it first, and
        # no batch with a bad example is returned once there are too many.
        if count > self.limit:
            raise BadRecordError(
                f"{record}: it is one of {count} such examples, and Train.bad_records = "
                f"{self.limit} allows {self.limit}; repair the data, or set Train.bad_records = "
                f"{count} or more to train without them"
            ) from error


def read_example(
    examples: Examples, index: int, rng: np.random.Generator | None, split: str, bad: BadRecords
) -> Batch:
    """Return example `index`, or a zero-weight replacement if it cannot be read.

    The replacement is the next readable example of the split (cyclically), as
    in evaluation (without augmentation) and with a loss_mask of 0. It depends on the data and
    `index` alone, so that every host and every attempt uses the same one. It adds nothing to the
    loss, and the mean is over the others. Statistics over all rows see it as one more example of
    the data: those of batch norms, and the balance of a router's experts.

    Raises:
      BadRecordError: too many cannot be read, or none can.
    """
    count = len(examples)
    for candidate in range(index, index + count):
        try:
            one = examples.example(candidate % count, rng if candidate == index else None)
        except UNREADABLE as error:
            cause = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            bad.add(BadRecord(split, candidate % count, cause), error)
        else:
            return one if candidate == index else weightless(one)
    raise BadRecordError(f"none of the {count} {split} examples can be read; repair the data")


def weightless(example: Batch) -> Batch:
    """Return the example with a loss_mask of 0, as padding."""
    return dataclasses.replace(example, loss_mask=np.zeros_like(example.loss_mask))
