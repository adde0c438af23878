"""Trains one configuration at several learning rates, with one compilation for all of them.

The learning rate is an argument of the compiled step, not a constant in it: the schedule is made
of it while the step is traced. All else is what a run has: the program, its batches in their order
and its first parameters, on one device. `tests/test_benchmarks_optimizers.py` holds the losses
against those of `Trainer`.
"""

import dataclasses
import itertools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.run.attempts.attempt import Attempt
from jaxtrain.run.cluster.cluster import OneProcess
from jaxtrain.run.evaluation import Evaluation
from jaxtrain.run.feed import Feed
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.optimizers.optimizer import make_optimizer
from jaxtrain.training.optimizers.schedule import make_schedule
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import Config
from jaxtrain.training.state import TrainState

RATE_BYTES = 4  # of the learning rate among the arguments


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
      rate: the peak of its learning rate.
      steps: at which it was evaluated.
      heldout: the loss then, nats; a run that is not finite ends with what it was.
      cpu_seconds: a step's processor time, all threads, median over the stretches in between.
      state_bytes: of the optimizer, a parameter.
    """

    rate: float
    steps: list[int]
    heldout: list[float]
    cpu_seconds: float
    state_bytes: float

    @property
    def final(self) -> float:
        """The last held-out loss, infinite where a run came to no number."""
        return self.heldout[-1] if math.isfinite(self.heldout[-1]) else math.inf

    def steps_to(self, loss: float) -> int | None:
        """The first evaluation that is not above a held-out loss; None: none was."""
        return next((s for s, x in zip(self.steps, self.heldout, strict=True) if x <= loss), None)


class Course:
    """What all rules have in common: a task's batches on one device, and its evaluation.

    Attributes:
      layout: of that device.
      batches: of every step.
      heldout: what is evaluated.
    """

    def __init__(self, config: Config) -> None:
        """Opens the data.

        Args:
          config: of any rule; its `Train.eval_batches` batches are held out.
        """
        train, one = config.train, jax.devices()[:1]
        self.layout = layouts.layout(config, one)
        program = compose(config, self.layout)
        feed = Feed(config, self.layout, program, BadRecords())
        data = program.setup.objective.dataset(train.data.open(seed=train.seed), train.model)
        with feed.training(data, 0) as stream:
            self.batches = list(itertools.islice(stream, train.steps))
        with feed.heldout(data) as stream:
            self.heldout = list(itertools.islice(stream, train.eval_batches))
        self._evaluation = Evaluation(program, {}, Attempt(OneProcess()).phases)

    def loss(self, state: TrainState) -> float:
        """The held-out loss of what a rule evaluates with, without its own state: compiled once."""
        alone = dataclasses.replace(state, opt_state=())
        return self._evaluation.of(alone, self.heldout, step=0, before_each=lambda: None)[
            "eval_loss"
        ]


class Tuned:
    """One rule on a course, compiled.

    Attributes:
      state_bytes: of the optimizer, a parameter, as `plan` says and the compiled step takes it.
    """

    def __init__(self, config: Config, course: Course) -> None:
        """Compiles the step.

        Args:
          config: of the rule; its learning rate is not used.
          course: the task's.

        Raises:
          SystemExit: the compiled step takes other bytes than the closed form says.
        """
        check(config, device_count=1, platform=jax.default_backend())
        self._course = course
        self._program = compose(config, course.layout)
        step = self._program
        shapes = step.shapes()
        structure = jax.tree.structure(shapes)

        def train_step(arrays: Any, batch: Batch, rate: jax.Array) -> Any:
            schedule = make_schedule(config.schedule, rate, config.train.steps)
            rule = make_optimizer(config.optimizer, schedule)
            at_rate = step.rebuild(optimizer=rule, schedule=schedule)
            state, metrics, _ = at_rate.train_step(jax.tree.unflatten(structure, arrays), batch)
            return jax.tree.leaves(state), metrics["loss"]

        self._structure = structure
        self._first = jax.tree.leaves(self._program.create(config.train.seed))
        arrays = jax.tree.leaves(step.abstract_state())
        jitted = jax.jit(
            train_step,
            donate_argnums=0,
            out_shardings=(jax.tree.leaves(step.shardings(shapes)), None),
        )
        with course.layout.active():
            lowered = jitted.lower(arrays, course.batches[0], jnp.float32(0))
        self._step = lowered.compile()
        taken = self._step.memory_analysis().argument_size_in_bytes - RATE_BYTES
        held = argument_bytes(config, course.layout)
        if taken != held.total:
            raise SystemExit(
                f"{config.optimizer.name}: the compiled step takes {taken:,} bytes, and the closed "
                f"form says {held.total:,}"
            )
        parameters = sum(x.size for x in jax.tree.leaves(shapes.params))
        self.state_bytes = held.optimizer / parameters

    def train(self, rate: float, every: int) -> Trial:
        """A run at this peak, evaluated each time after so many steps."""
        arrays = [jnp.copy(x) for x in self._first]
        peak = jax.device_put(jnp.float32(rate), self._course.layout.sharding_of(P()))
        steps, heldout, seconds = [], [], []
        for start in range(0, len(self._course.batches), every):
            part = self._course.batches[start : start + every]
            begun = time.process_time()
            with self._course.layout.active():
                for batch in part:
                    arrays, loss = self._step(arrays, batch, peak)
                jax.block_until_ready(loss)
            seconds.append((time.process_time() - begun) / len(part))
            state = self._program.eval_state(jax.tree.unflatten(self._structure, arrays))
            steps.append(start + len(part))
            heldout.append(self._course.loss(state))
            if not math.isfinite(heldout[-1]):
                break
        return Trial(rate, steps, heldout, statistics.median(seconds), self.state_bytes)
