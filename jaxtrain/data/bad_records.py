"""Bad records: replaced by zero-weight rows, and counted."""

import dataclasses
import struct
import threading
import zlib
from collections.abc import Callable

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Examples

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
