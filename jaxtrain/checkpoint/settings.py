"""How a run keeps its checkpoints."""

import dataclasses

from jaxtrain.config import configurable
from jaxtrain.errors import UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Which checkpoints stay on disk and how they get there.

    Attributes:
      keep: number of newest checkpoints kept; at least 1.
      keep_every: steps that are multiples of this are kept for ever; None keeps only the newest.
      asynchronous: write to disk while the next steps run; False waits for the disk.
      max_failed_saves: a run goes on after a failed save, and stops after this many in a row.
    """

    keep: int = 3
    keep_every: int | None = None
    asynchronous: bool = True
    max_failed_saves: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"Checkpoint.keep = {self.keep}: at least 1 checkpoint must be kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(
                f"Checkpoint.keep_every = {self.keep_every}: a number of steps of at least 1, "
                "or None to keep only the newest"
            )
        if self.max_failed_saves < 1:
            raise UserError(
                f"Checkpoint.max_failed_saves = {self.max_failed_saves}: a run stops after 1 "
                "failed save in a row or more"
            )
