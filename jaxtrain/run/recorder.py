"""Interface of recorders that profile some steps of a run."""

from pathlib import Path
from typing import Protocol

import jax
from rich.console import Console


class Recorder(Protocol):
    """Records some steps of a start, such as `analysis.profiling.recorder.Recorder`."""

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The step that the loop calls from now on."""
        ...

    def turns_at(self, step: int) -> bool:
        """Whether recording begins or ends after this step."""
        ...

    def turn(self, seconds: float) -> None:
        """Begins or ends recording; the devices are done with every step so far."""
        ...

    def close(self) -> None:
        """Ends what is still recorded."""
        ...


class RecorderKind(Protocol):
    """What makes a recorder for the steps of a start."""

    def validate(self, done: int, last: int) -> None:
        """Raises UserError where there are too few steps to record."""
        ...

    def __call__(
        self, workdir: Path | None, console: Console, dtype: str, *, done: int, last: int
    ) -> Recorder:
        """The recorder of a start that goes from `done` steps to `last`."""
        ...
