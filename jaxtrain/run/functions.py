"""`init`, `train_step` and `eval_step` of a run, for a custom training loop."""

from typing import Any

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.devices import RunAhead
from jaxtrain.run.evaluation import Evaluation
from jaxtrain.run.feed import Feed
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step


class Functions:
    """The compiled functions of a `Trainer`, without its state, its log and its checkpoints.

    Batches are those of `Trainer.step`: of the whole global batch, on the host or on devices.
    """

    def __init__(
        self, program: Step, step: CompiledStep, evaluation: Evaluation,
        feed: Feed,
    ) -> None:  # fmt: skip
        """Compiles nothing yet."""
        self._program, self._step = program, step
        self._evaluation, self._feed = evaluation, feed
        self._ahead = RunAhead()

    def init(self, seed: int) -> TrainState:
        """Return a fresh state, sharded over the mesh; the same bits on every mesh.

        Args:
          seed: of the parameters.
        """
        return self._program.create(seed)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """Take one optimizer step; return the new state and its metrics, scalars on the devices.

        Args:
          state: is donated: its arrays cannot be read afterwards.
          batch: a global batch.

        Raises:
          UserError: the step cannot learn from the batch.
        """
        with self._program.setup.layout.active():
            state, metrics = self._step(state, self._feed.own("functions.train_step", batch))
        self._ahead.add(metrics["loss"])
        return state, metrics

    def eval_step(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Return `eval_loss` and the objective's other metrics over a batch, as Python numbers.

        Args:
          state: stays as it is.
          batch: whose rows divide over the devices that split a batch.

        Raises:
          UserError: the batch cannot be evaluated, or has no target that counts.
        """
        with self._program.setup.layout.active():
            placed = self._feed.own("functions.eval_step", batch, whole=True)
        return self._evaluation.of(state, [placed], step=int(state.step), before_each=lambda: None)
