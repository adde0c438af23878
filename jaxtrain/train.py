"""The training loop: build, restore, step, log, evaluate, save."""

import contextlib
import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxtrain import generate as generation
from jaxtrain import preflight, report, resume
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.data.batch import Batch
from jaxtrain.data.pipeline import Prefetcher, batches, heldout_batches, process_rows, to_device
from jaxtrain.data.source import Dataset
from jaxtrain.errors import UserError
from jaxtrain.exchange import ExchangeProgram, with_exchange
from jaxtrain.layers import Execution
from jaxtrain.loss import Sums
from jaxtrain.mesh import simulate_devices
from jaxtrain.metrics import MetricsLog, peak_flops, write_atomically
from jaxtrain.optimizer import make_optimizer, make_schedule
from jaxtrain.settings import Config, TextSource
from jaxtrain.sharding import Layout
from jaxtrain.step import Program, TrainState, with_shardings


class Preempted(Exception):  # noqa: N818 - an orderly end, not an error
    """A signal asked the run to stop; everything up to `step` is saved."""

    def __init__(self, step: int, signal_name: str) -> None:
        super().__init__(f"stopped by {signal_name} after saving step {step}")
        self.step = step


def quiet() -> Console:
    """A console that prints nothing."""
    return Console(file=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the console


def make_program(config: Config, layout: Layout) -> Program | ExchangeProgram:
    """The pure functions that a configuration makes on a layout."""
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.steps)
    program = Program(
        build=config.train.model.build,
        objective=config.train.model.objective,
        optimizer=make_optimizer(config.optimizer, schedule),
        schedule=schedule,
        layout=layout,
        precision=config.precision,
        loss=config.loss,
        execution=Execution(
            kernel=config.attention.kernel,
            context_parallel=config.attention.context_parallel,
            remat=config.remat.policy,
            layers_per_iteration=config.scan.layers_per_iteration,
        ),
        accumulation=config.train.accumulation,
        pipeline=config.pipeline,
    )
    return with_exchange(config.exchange, program)


class Trainer:
    """Mesh, model, state and data of a run, and the loop over them.

    Attributes:
      config: the resolved configuration.
      mesh: the device mesh.
      program: the pure functions: init, train_step, eval_step.
      state: the current TrainState.
      steps_done: optimizer steps it has taken, known without asking the device.
      workdir: the run's folder; None keeps everything in memory.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path | None = None,
        *,
        console: Console | None = None,
        read_only: bool = False,
    ) -> None:
        """Checks, opens the data, builds the mesh, and restores the newest checkpoint or starts.

        Args:
          config: from `load_config`.
          workdir: the run's folder.
          console: where progress goes; None prints nothing.
          read_only: for looking at a run (evaluation, generation): nothing in workdir changes.

        Raises:
          UserError: the configuration cannot run on these devices, or is another run's.
        """
        if config.mesh.simulated_devices:
            simulate_devices(config.mesh.simulated_devices)
        preflight.check(config, device_count=jax.device_count(), platform=jax.default_backend())
        self.config, self.console = config, console or quiet()
        self.workdir = None if workdir is None else Path(workdir)
        self.layout = preflight.layout(config)
        self.mesh = self.layout.mesh
        self.program = make_program(config, self.layout)
        self._read_only = read_only
        self._train_step = self.program.jit_train_step()
        self._eval_step = jax.jit(self.program.plain.eval_step)
        if not read_only:
            # Before anything is written: a source that cannot be read leaves no trace.
            _ = self.dataset
        self._checkpoints: Checkpoints | None = None
        if self.workdir is not None:
            self._checkpoints = Checkpoints(self.workdir, config.checkpoint, read_only=read_only)
        self.state = self._restore_or_create()
        self.steps_done = int(self.state.step)
        if self.workdir is not None and not read_only and jax.process_index() == 0:
            write_atomically(self.workdir / "config.gin", config.to_gin().encode())

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The opened data: at the start of training, or when it is first asked for."""
        return self.config.train.data.open(seed=self.config.train.seed)

    # -- the pieces ------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Sums:
        """One optimizer step on a global batch (numpy or device arrays); metrics on the device."""
        shardings = self.program.batch_shardings(batch)
        with self.layout.active():
            self.state, metrics = self._train_step(self.state, jax.device_put(batch, shardings))
        self.steps_done += 1
        return metrics

    def lower(self) -> jax.stages.Lowered:
        """The train step lowered from shapes alone, for people who look inside."""
        with self.layout.active():
            return self._train_step.lower(self.program.abstract_state(), self.abstract_batch())

    def abstract_batch(self) -> Batch:
        """The shapes, dtypes and shardings of a batch."""
        batch = self.config.train.data.abstract_batch(self.config.train.global_batch_size)
        return with_shardings(batch, self.program.batch_shardings(batch))

    # -- the loop --------------------------------------------------------------------------------

    def train(self, steps: int | None = None) -> dict[str, float]:
        """Takes `steps` more optimizer steps, or all that are left; returns the last evaluation.

        Raises:
          Preempted: a signal came; the state is saved.
          FloatingPointError: the loss is not finite.
        """
        train = self.config.train
        first = self.steps_done
        last = train.steps if steps is None else first + steps
        values: dict[str, float] = {}
        with (
            self.layout.active(),
            contextlib.closing(self._open_log(first, last)) as log,
            self._batches(first) as stream,
            _stop_signals() as stopped,
            jax.transfer_guard("disallow"),
        ):
            for step in range(first + 1, last + 1):
                self.state, metrics = self._train_step(self.state, next(stream))
                log.later(step, metrics)
                self.steps_done = step
                if _every(train.eval_every, step) or step == last:
                    with log.paused():
                        values = self.evaluate()
                    log.now(step, values)
                if _every(train.save_every, step) or step == last or stopped:
                    with log.paused():
                        self._save(step)
                if stopped:
                    raise Preempted(step, stopped[0])
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return values

    def evaluate(self) -> dict[str, float]:
        """`eval_loss` and the task's metric over the held-out examples, each counted once."""
        rows = self._eval_rows()
        batch = self.config.train.data.abstract_batch(rows)
        state = self.program.consensus(self.state)
        sums = self.program.plain.no_sums(state, batch)
        source = heldout_batches(
            self.dataset.heldout, global_batch_size=rows, rows=self._rows(rows)
        )
        with self.layout.active(), Prefetcher(source, self._place(rows)) as stream:
            for number, batch in enumerate(stream, start=1):
                sums = self._eval_step(state, batch, sums)
                if number == self.config.train.eval_batches:
                    break
        total = {name: float(value) for name, value in jax.device_get(sums).items()}
        values = {"eval_loss": total["loss"] / total["weight"]}
        if "correct" in total:
            values["eval_accuracy"] = total["correct"] / total["weight"]
        else:
            values["eval_perplexity"] = float(np.exp(values["eval_loss"]))
        return values

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """What a trained language model writes after `prompt`; None: as far as 100 tokens fit.

        Raises:
          UserError: the model is no language model, or the text does not fit into its context.
        """
        data = self.config.train.data
        if not isinstance(data, TextSource):
            raise UserError(
                f"generate: Train.data=@{type(data).__name__}() has no tokenizer; only models "
                "trained on text generate"
            )
        tokenizer = data.open_tokenizer()
        sampling = generation.Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        layout = dataclasses.replace(
            self.layout, split_batch=False, sequence_parallel=False, manual=frozenset({"pipe"})
        )
        prompt_tokens = [int(token) for token in tokenizer.encode(prompt)]
        model: Any = self.config.train.model
        if max_new_tokens is None:
            max_new_tokens = max(min(100, model.context_length - len(prompt_tokens)), 1)
        tokens = generation.generate(
            dataclasses.replace(self.program.plain, layout=layout),
            model,
            self.program.consensus(self.state),
            prompt_tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
        )
        if tokenizer.end_of_text in tokens:
            tokens = tokens[: tokens.index(tokenizer.end_of_text)]
        return tokenizer.decode(tokens)

    def show(self) -> None:
        """Prints configuration, mesh, data and parameter table."""
        report.show_config(self.console, self.config.to_gin())
        report.show_mesh(self.console, self.layout)
        if self.program.plain.stages is not None:
            report.show_stages(self.console, self.program.plain.stages, self.config.pipeline)
        report.show_facts(self.console, self.dataset.facts, self.dataset.digest)
        report.show_parameters(self.console, self.state)

    def close(self) -> None:
        """Waits for the checkpoint being written."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    # -- checkpoints -----------------------------------------------------------------------------

    def _restore_or_create(self) -> TrainState:
        step = None if self._checkpoints is None else self._checkpoints.latest_step()
        if self._checkpoints is None or step is None:
            return self.program.create(self.config.train.seed)
        if not self._read_only:
            resume.refuse_other_run(
                self._checkpoints.extra(step),
                self.config,
                self.dataset,
                step=step,
                workdir=self.workdir,
            )
        return resume.restore(self._checkpoints, step, self.program)

    def _save(self, step: int) -> None:
        if self._checkpoints is None:
            return
        extra = resume.describe(self.config, self.program, self.dataset.digest, step)
        with jax.transfer_guard("allow"):
            self._checkpoints.save(step, self.state, extra)

    # -- data ------------------------------------------------------------------------------------

    def _rows(self, batch_size: int) -> np.ndarray:
        sharding = self.layout.named(self.layout.activation(("batch",)))
        return process_rows(sharding, batch_size)

    def _place(self, batch_size: int):  # noqa: ANN202 - a function from host to device batches
        def place(batch: Batch) -> Batch:
            return to_device(batch, self.program.batch_shardings(batch), batch_size)

        return place

    def _batches(self, start: int) -> Prefetcher[Batch]:
        size = self.config.train.global_batch_size
        source = batches(
            self.dataset.train,
            global_batch_size=size,
            seed=self.config.train.seed,
            start=start,
            rows=self._rows(size),
        )
        return Prefetcher(source, self._place(size))

    def _eval_rows(self) -> int:
        # A microbatch: what fits while training fits here.
        return self.config.train.global_batch_size // self.config.train.accumulation

    # -- metrics ---------------------------------------------------------------------------------

    def flops_per_step(self) -> float:
        """Floating-point operations of one optimizer step, by the model's closed form."""
        batch = self.abstract_batch()
        model: Any = self.config.train.model
        rows = self.config.train.global_batch_size
        if self.dataset.unit == "tokens":
            length = batch.inputs.shape[1]
            return model.flops_per_token(length) * length * rows
        return model.flops_per_image(batch.inputs.shape[1:]) * rows

    def _open_log(self, first: int, last: int) -> MetricsLog:
        batch = self.abstract_batch()
        rows = self.config.train.global_batch_size
        peak = peak_flops(self.mesh.devices.flat[0].device_kind)
        references = {}
        if "unigram_entropy" in self.dataset.facts:
            references["unigram entropy"] = float(self.dataset.facts["unigram_entropy"])
        return MetricsLog(
            self.workdir,
            total_steps=last,
            unit=self.dataset.unit,
            units_per_step=rows * (batch.inputs.shape[1] if self.dataset.unit == "tokens" else 1),
            flops_per_step=self.flops_per_step(),
            peak_flops=None if peak is None else peak * self.mesh.size,
            first_step=first,
            log_every=self.config.train.log_every,
            terminal=self.console,
            references=references,
        )


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """Takes the names of signals: SIGTERM or a first Ctrl-C; a second Ctrl-C interrupts at once."""
    stopped: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # only the main thread may set handlers: a notebook's worker goes without
        return

    def stop(number: int, _frame: Any) -> None:
        stopped.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
