"""Scheduling of Python's garbage collector outside the step."""

import gc
from typing import Self

from jaxtrain.run.malloc import give_back

LONG_RUN = 500  # steps of one call of `train`; to settle takes a third of a second


class Garbage:
    """Has the cycles collected that drawings, evaluations and saves leave behind, one after each.

    They wait for the collector, which looks at old objects when a quarter of them is new: beside
    the half million that imports and compilation make that is seldom. Meanwhile several saves'
    arrays and tens of megabytes of drawings pile up. So what is there when the step is compiled is
    left out of account until the run ends, and the rest is looked at in milliseconds.
    """

    def __init__(self, steps: int) -> None:
        """Args: steps: of the run; a short one is left to Python."""
        self._is_long, self._is_settled = steps >= LONG_RUN, False

    def __enter__(self) -> Self:
        return self

    def settle(self) -> None:
        """To be called when the step is compiled; nothing where somebody froze objects already."""
        if self._is_long and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_settled = True

    def collect(self) -> None:
        """To be called after an evaluation or a save; what becomes free is the system's again."""
        if self._is_settled:
            gc.collect()
            give_back()

    def __exit__(self, *_: object) -> None:
        if self._is_settled:
            gc.unfreeze()
