"""Initial state of a run: newly initialized, or with the parameters of another run or model.

A distillation's teacher and LoRA adapters are read as well.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax import nnx

from jaxtrain.training.settings import Config
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step

if TYPE_CHECKING:
    from jaxtrain.run.checkpoint.store import Checkpoints


class InitialState:
    """Makes the state that a run starts with; implements `checkpoint.states.Initial`.

    Readers are imported in the methods: most runs initialize their parameters, and do not need
    Orbax.

    Args:
      config: the run's configuration.
      program: the state's program.
      report: takes a line for people.
    """

    def __init__(self, config: Config, program: Step, report: Callable[[str], None]) -> None:
        self._config, self._program, self._report = config, program, report

    def create(self) -> tuple[TrainState, list[dict[str, Any]]]:
        """Return the initial state and the ancestors of its parameters, the nearest first.

        Raises:
          UserError: there is no such source, or it is of another model.
          CheckpointError: the checkpoint to start from is damaged.
        """
        source = self._config.train.start_from
        if source is None:
            return self._with(None), []
        from jaxtrain.run.start import ancestors_of, first_parameters, newest_step

        step = newest_step(source)
        params = first_parameters(source, self._config, self._program.setup, step=step)
        ancestors = ancestors_of(source, step, self._config.checkpoint)
        self._report(f"Parameters from {source}; everything else is fresh")
        return self._with(params), ancestors

    def from_parameters(self, checkpoints: "Checkpoints", step: int) -> TrainState:
        """Return an initial state with the parameters of a checkpoint that has nothing else.

        Raises:
          UserError: they are of another model; names the settings that differ.
          CheckpointError: the checkpoint is damaged.
        """
        from jaxtrain.run.start import restore_parameters

        setup = self._program.setup
        return self._with(restore_parameters(checkpoints, step, self._config, setup))

    def _with(self, params: nnx.State | None) -> TrainState:
        """Return a new state with these parameters; None initializes them."""
        if self._config.train.task.name == "distillation":
            from jaxtrain.run.start import with_teacher

            params = with_teacher(params, self._config, self._program.setup)
        state = self._program.create(self._config.train.seed, params)
        finetune = self._config.finetune
        if finetune.adapter is not None:
            from jaxtrain.run.huggingface.adapters import read_adapter
            from jaxtrain.run.weights import with_trained

            adapter = read_adapter(finetune.adapter, self._config, self._program.setup)
            self._report(f"Adapters from {finetune.adapter}")
            state = with_trained(self._program, state, adapter)
        return state
