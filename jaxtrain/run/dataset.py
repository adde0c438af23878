"""Dataset of a run: opened once, with the reference model's log-probabilities where needed."""

import functools
from collections.abc import Callable

from jaxtrain.config.buckets import Place
from jaxtrain.data.cached_stores import with_stores
from jaxtrain.data.source import Dataset
from jaxtrain.training.compiled_step import Stepper
from jaxtrain.training.settings import Config
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step


class RunData:
    """The data of a run."""

    def __init__(
        self,
        config: Config,
        program: Step,
        workdir: Place | None,
        *,
        writes: bool,
        say: Callable[[str], None],
    ) -> None:
        """Opens nothing yet.

        Args:
          config: names the source.
          program: whose objective reads the data.
          workdir: the run's folder; None: it has none.
          writes: whether what is computed of the data is kept there.
          say: takes a line for people.
        """
        self._config, self._program, self._workdir = config, program, workdir
        self._writes, self._say = writes, say
        self._dataset: Dataset | None = None

    @functools.cached_property
    def opened(self) -> Dataset:
        """The data as the objective learns from them, without what a reference says of them.

        Raises:
          UserError: the source cannot be read.
        """
        train = self._config.train
        opened = with_stores(train.data, self._say).open(seed=train.seed)
        return self._program.setup.objective.dataset(opened, train.model)

    def dataset(self, stepper: Stepper, steps_done: int) -> Dataset:
        """The data; the first call of a new run's computes what its first model says of them.

        Args:
          stepper: has the state.
          steps_done: optimizer steps that it has taken.
        """
        if self._dataset is None:
            refers = self._program.setup.objective.refers
            self._dataset = self._compare(stepper.state, steps_done) if refers else self.opened
        return self._dataset

    def _compare(self, state: TrainState, steps_done: int) -> Dataset:
        from jaxtrain.run.reference import first_reference, stored_reference

        if steps_done:
            return stored_reference(self.opened, self._workdir)
        keep = self._workdir if self._writes else None
        state = self._program.eval_state(state)
        return first_reference(self.opened, self._program.setup, state, keep, say=self._say)
