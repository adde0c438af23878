"""`Trainer`: build, train, evaluate and inspect a run from Python."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxtrain.config.buckets import AnyPath, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.config.shipped import HUGGING_FACE
from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.parallel.compilation import keep_memory, options_of_run
from jaxtrain.parallel.devices import (
    other_gpu_memory,
    platform_of_device,
    select_devices,
    simulate_devices,
    take_gpu_memory,
)
from jaxtrain.run.attempts.attempt import Attempt
from jaxtrain.run.attempts.folder import nothing, own_folder
from jaxtrain.run.checkpoint.states import PeerAccess, states_of
from jaxtrain.run.cluster.cluster import OneProcess
from jaxtrain.run.evaluation import Evaluation
from jaxtrain.run.feed import Feed, RunData
from jaxtrain.run.generation import BATCH_SIZE
from jaxtrain.run.initial_state import InitialState
from jaxtrain.run.loop import Functions, Loop
from jaxtrain.run.metrics.log import RunMetrics
from jaxtrain.run.show.progress import on_first_process, quiet
from jaxtrain.training import layouts
from jaxtrain.training.compiled_step import CompiledStep, Stepper
from jaxtrain.training.compose import compose
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.layouts import resolve_kernel
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config, load_config
from jaxtrain.training.state import TrainState

if TYPE_CHECKING:
    from jaxtrain.run.generation.answer import Answer
    from jaxtrain.run.generation.beams import BeamSearch
    from jaxtrain.run.generation.decoding import Sampling
    from jaxtrain.run.generation.generate import Writer
    from jaxtrain.run.huggingface.exporting import Dtype
    from jaxtrain.run.huggingface.receipt import Receipt
    from jaxtrain.run.inference.predict import Inputs, Output, Skip
    from jaxtrain.run.loop import Recorder, RecorderKind
    from jaxtrain.run.metrics.tracking import Track, Tracking
    from jaxtrain.run.show.figures import Picture

Prompt = TypeVar("Prompt", str, list[int])


class Trainer:
    """A run from Python: mesh, model, state and data, and methods to train and use it.

    Attributes:
      config: the resolved configuration.
      mesh: the device mesh.
      program: the run's `Step`: pure functions, traced while `layout` is active.
      bad_records: the unreadable records of training and evaluation.
      workdir: the run's folder, on a disk or in a bucket; None keeps everything in memory.
      report: prints a line on process 0's terminal.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | AnyPath | None = None,
        *,
        console: Console | None = None,
        read_only: bool = False,
        step: int | None = None,
        devices: Sequence[jax.Device] | None = None,
        attempt: Attempt | None = None,
        track: "Track | None" = None,
    ) -> None:
        """Validate the configuration, build the mesh, and restore the newest checkpoint or
        initialize.

        Args:
          config: from `load_config`.
          workdir: the run's folder.
          console: for progress, such as rich's `Console()`; None prints nothing.
          read_only: to inspect a run (evaluation, generation) without changes in workdir.
          step: of the checkpoint to inspect, with `read_only`; None: the newest.
          devices: the devices of the mesh, such as `jax.devices()[:1]`; None: all.
          attempt: this attempt of the run; None: one that only this process's signals stop.
          track: called with (step, metrics) for each line of the metrics that survives a resume, in
            a separate thread, in process 0 alone.

        Raises:
          UserError: the configuration cannot run on these devices, or is another run's; there is
            no checkpoint of `step`; or `devices` is empty, or leaves a process without any.
        """
        if step is not None and not read_only:
            raise UserError(
                f"Trainer(step={step}): a run resumes from its newest checkpoint; use "
                "read_only=True to look at another one"
            )
        if config.mesh.simulated_devices:
            simulate_devices(config.mesh.simulated_devices)
        take_gpu_memory(config.train.gpu_memory_fraction)
        devices = select_devices(devices)
        platform, kind = platform_of_device(devices[0]), devices[0].device_kind
        preflight.check(
            config, device_count=len(devices), platform=platform, kind=kind, trains=not read_only
        )
        self.config, self.console = config, console or quiet()
        self.report = on_first_process(self.console)
        if late := other_gpu_memory(config.train.gpu_memory_fraction, devices[0]):
            self.report(late)
        self._attempt, self._platform = attempt or Attempt(OneProcess()), platform
        self.workdir = None if workdir is None else to_path(workdir)
        self._folder = self._attempt.folder
        if self.workdir is not None and self._folder is None and not read_only:
            self._folder = own_folder(self.workdir, self.report)
        self.layout = layouts.layout(config, devices)
        self.mesh = self.layout.mesh
        for note in layouts.notes(config, self.layout):
            self.report(note)
        disk = self.workdir if not read_only and isinstance(self.workdir, Path) else None
        self.program = compose(config, self.layout, disk)
        keep_memory(platform)
        of_steps, of_evaluation = options_of_run(platform, kind, config.train.steps, self.report)
        self._step = CompiledStep(self.program, of_steps)
        self._evaluation = Evaluation(self.program, of_evaluation, self._attempt.phases)
        self._gradients = jax.jit(self.program.setup.gradients, compiler_options=of_evaluation)
        local = None if self._folder is None else self._folder.local
        metrics = RunMetrics(
            config, list(self.mesh.devices.flat), folder=local, workdir=self.workdir,
            terminal=self.console,
        )  # fmt: skip
        self.bad_records = BadRecords(
            config.train.bad_records,  # every process reports its own rows
            lambda bad: self.console.print(f"{bad}: left out", soft_wrap=True, markup=False),
        )
        self._feed = Feed(config, self.layout, self.program, self.bad_records)
        data = RunData(
            config, self.program, self.workdir, writes=self._folder is not None, report=self.report
        )
        if not read_only:
            # Before anything is written: an unreadable source leaves no files.
            _ = data.opened
        self._saved = states_of(
            self.workdir, config, self.program,
            InitialState(config, self.program, self.report),
            read_only=read_only, report=self.report,
            may_write=self._attempt.may_write, phases=self._attempt.phases,
            peers=PeerAccess(self._attempt.token, self._attempt.address, self._report_here),
            before_seal=nothing if self._folder is None else self._folder.secure,
        )  # fmt: skip
        self._has_shapes = False  # all lengths of rows compiled
        tracking: Sequence[Tracking] = ()
        if not read_only and (track is not None or config.tracker.name is not None):
            # Imported here: most runs have no tracker.
            from jaxtrain.run.metrics.tracking import trackings

            tracking = trackings(
                config, track, lines=metrics.in_memory, report=self.report, folder=local,
                named="in memory" if self.workdir is None else self.workdir.name,
            )  # fmt: skip
        if step is None:
            state, next_batch = self._saved.newest(lambda: data.opened)
        else:
            state, next_batch = self._saved.restore_step(step)
        self._stepper = Stepper(self._step, state, config.corruption)
        self._loop = Loop(
            config=config, stepper=self._stepper, data=data, feed=self._feed,
            evaluation=self._evaluation, saved=self._saved, attempt=self._attempt,
            folder=self._folder, metrics=metrics, tracking=tracking, report=self.report,
            next_batch=next_batch, steps_done=int(state.step),
        )  # fmt: skip
        self._attempt.step = self.steps_done
        if self.program.setup.objective.refers and not read_only:
            _ = self.dataset  # while the state is the initial one
        self._attempt.has_begun = True
        self._attempt.goodput.mark_replay(self.steps_done)
        self._attempt.goodput.record(self.steps_done)
        if self._folder is not None and jax.process_index() == 0:
            write_atomically(self._folder.local / "config.gin", config.operative().encode())
            self._folder.push_soon()

    def _report_here(self, line: str) -> None:
        """Print a line on this process's own terminal."""
        self.console.print(line, soft_wrap=True, markup=False)

    @classmethod
    def from_huggingface(
        cls,
        path: str | Path,
        workdir: str | AnyPath | None = None,
        *,
        bindings: Sequence[str] = (),
        console: Console | None = None,
    ) -> Self:
        """Return a trainer that starts with the parameters of a Hugging Face folder: that of
        `hf:PATH`.

        Args:
          path: the folder: config.json and safetensors.
          workdir: the run's folder; None keeps everything in memory.
          bindings: gin bindings, such as "Mesh.tensor = 2".
          console: as in `Trainer`.

        Raises:
          UserError: there is no such folder, or its model is not supported.
        """
        return cls(load_config(f"{HUGGING_FACE}{path}", bindings), workdir, console=console)

    def export_huggingface(self, path: str | Path, *, dtype: "Dtype" = "float32") -> "Receipt":
        """Write the model used by evaluation and generation as a Hugging Face folder.

        Args:
          path: the folder, missing or empty.
          dtype: of its files.

        Returns:
          The comparison of the written model with this run.

        Raises:
          UserError: the model is not a published architecture, or the folder cannot be created.
        """
        from jaxtrain.run.huggingface.exporting import export_run
        from jaxtrain.run.weights import merge_adapters

        state = self.program.eval_state(self.state)
        return export_run(
            str(path), self.config,
            self.program.setup.replace(build=self.config.train.model.build, tuning=Tuning()),
            nnx.merge_state(merge_adapters(self.program.setup, state), state.statistics),
            self.workdir, dtype=dtype, ancestors=self.ancestors, console=self.console,
        )  # fmt: skip

    def export_adapter(self, path: str | Path) -> None:
        """Write the adapters used by evaluation and generation as a PEFT folder.

        Args:
          path: the folder, missing or empty.

        Raises:
          UserError: the run trains no adapters, or its model is not a published architecture.
        """
        from jaxtrain.run.huggingface.adapters import write_adapter

        program, state = self.program.setup, self.program.eval_state(self.state)
        write_adapter(str(path), self.config, program, state, report=self.report)

    @property
    def dataset(self) -> Dataset:
        """The data, opened at the start of training or at the first use."""
        return self._loop.dataset

    @functools.cached_property
    def functions(self) -> Functions:
        """`init`, `train_step` and `eval_step`, compiled, for a custom training loop."""
        return Functions(self.program, self._step, self._evaluation, self._feed)

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken, without a device transfer."""
        return self._loop.steps_done

    @property
    def ancestors(self) -> list[dict[str, Any]]:
        """Its checkpoint, if any, and the origins of its initial parameters."""
        return self._saved.line(self.steps_done)

    @property
    def state(self) -> TrainState:
        """The current TrainState; the next step donates its arrays."""
        return self._stepper.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._stepper.state = state
        more = int(state.step) - self.steps_done
        self._loop.steps_done += more
        self._loop.next_batch += more

    def step(self, batch: Batch) -> Sums:
        """Take one optimizer step on a user-provided global batch; metrics stay on the device.

        Steps due by `Train.log_every` are lines of `history` and metrics.jsonl. Nothing is
        evaluated or saved, and no bad step ends anything.

        Args:
          batch: of arrays, or of tensors on the CPU. Masked targets have no effect. One
            whose rows do not divide is padded if `Train.fill_batch` is set.

        Raises:
          UserError: it is invalid. For arrays on devices only shapes and dtypes are
            checked, for NumPy's also the values: tokens, labels, positions and masks.
        """
        with self.layout.active():
            return self._loop.step(self._feed.own("step", batch))

    def weights(self, *, evaluated: bool = False) -> dict[str, np.ndarray]:
        """Parameters and running statistics by the names of `table`, the layers in their order.

        Args:
          evaluated: those that `evaluate`, `logits` and `generate` use: averages, if the
            optimizer keeps any. False: those that training resumes from.

        Returns:
          Unsharded NumPy copies of the arrays; for replicas with their own parameters
          the mean.
        """
        from jaxtrain.run.weights import weights

        program = self.program
        state = program.eval_state(self.state) if evaluated else program.current_state(self.state)
        return weights(program, state)

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Set the weights of the model and all replicas; the optimizer keeps its moments.

        Averages of the parameters restart, and so does the state of an exchange.

        Args:
          weights: all arrays, as from `weights`.

        Raises:
          UserError: names are missing or unknown, or an array has another shape or dtype.
        """
        from jaxtrain.run.weights import with_weights

        self.state = with_weights(self.program, self.state, weights)

    def logits(self, inputs: Any) -> np.ndarray:
        """Return the logits of inputs: float32 [B, T, V] of tokens, [B, C] of images.

        Args:
          inputs: integer tokens [B, T] of any number of rows, each one text; images [B, H, W, C];
            or a `Batch`, whose documents are masked from each other.

        Raises:
          UserError: the model cannot read them, or has no logits.
        """
        from jaxtrain.run.inference.outputs import logits

        plain, state = self.program.setup, self.program.eval_state(self.state)
        return logits(plain, self.config.train.model, state, inputs)

    def predict(
        self, inputs: "Inputs", *, top: int | None = None, skip: "Skip" = None
    ) -> "list[Output]":
        """Predict classes, numbers or text for images, texts or vectors; see `inference.predict`.

        Args:
          inputs: image files, folders or Pillow images; texts; files or arrays of vectors.
          top: number of classes; None: 3, for a model that predicts classes.
          skip: called with the error of an unreadable input; None raises it.

        Raises:
          UserError: a file is missing or of another kind than the model's inputs.
        """
        from jaxtrain.run.inference.predict import predict_with

        return predict_with(self, inputs, top=top, skip=skip)

    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return gradients of the mean loss over a global batch, float32, by the names of
        `weights`.

        Before clipping; nothing is updated. With per-replica parameters: at their mean.

        Raises:
          UserError: as in `step`.
        """
        from jaxtrain.run.weights import on_host

        plain, state = self.program.setup, self.program.current_state(self.state)
        with self.layout.active():
            found, _, _ = self._gradients(state, self._feed.own("gradients", batch))
        return on_host(found, plain.stages)

    def lower(self) -> jax.stages.Lowered:
        """Return the train step lowered from shapes alone, for inspection."""
        with self.layout.active():
            return self._step.lower(self.abstract_batch())

    def abstract_batch(self) -> Batch:
        """Return the shapes, dtypes and shardings of a batch."""
        return self._feed.abstract_training()

    def train(
        self, steps: int | None = None, *, profile: "RecorderKind | None" = None
    ) -> dict[str, Any]:
        """Take `steps` more optimizer steps, or all remaining ones; return the last evaluation.

        Args:
          steps: None: all remaining ones of Train.steps.
          profile: records steps, such as `analysis.profiling.recorder.Recorder`, which
            profiles steps 3 to 6 of these; None records nothing.

        Raises:
          UserError: there are too few steps to profile.
          Preempted: the run was asked to stop; the state is saved.
          BadStepError: a step is bad, and Guard.policy is to stop.
          CorruptionError: devices disagree about replicated values.
          CheckpointError: a checkpoint cannot be written.
        """
        last = self.config.train.steps if steps is None else self.steps_done + steps
        recorder = None if profile is None else self._recorder(last, profile)
        shapes = self._feed.abstract_shapes()
        with self.layout.active():
            if len(shapes) > 1 and not self._has_shapes:
                with self._attempt.phases.phase("compile", self.steps_done):
                    self._stepper.train_step = self._step.compile_each(shapes)
                self._has_shapes = True
            return self._loop.run(last, recorder)

    def _recorder(self, last: int, profile: "RecorderKind") -> "Recorder":
        """Return a recorder of some steps up to `last`; compile the step if needed."""
        if len(self._feed.abstract_shapes()) > 1:
            raise UserError(
                "train --profile records one compiled step, and TextData.lengths asks for one of "
                "each length; profile with TextData.lengths = ()"
            )
        compute, done = self.config.precision.compute, self.steps_done
        folder = None if self._folder is None else self._folder.local
        recorder = profile(folder, self.console, compute, done=done, last=last)
        with self._attempt.phases.phase("compile", done):
            self._stepper.train_step = self._step.wrap(recorder.compile(self.lower()))
        return recorder

    def evaluate(self, batches: Iterable[Batch] | None = None) -> dict[str, Any]:
        """Return `eval_loss` and the task's metrics over the held-out examples, each counted once:
        all numbers, except the lists of `eval_confusion`.

        Args:
          batches: user-provided batches instead, whose rows divide over the devices that
            split a batch, or are padded as in `step`; None: the run's, as many as
            Train.eval_batches.

        Raises:
          UserError: there is no batch, one that cannot be evaluated, or no target that counts.
        """
        if batches is None:
            return self._loop.evaluate(None)
        if isinstance(batches, Batch):
            raise UserError("Trainer.evaluate takes batches, not a Batch; give a list of them")
        with self.layout.active():
            placed = [self._feed.own("evaluate", batch, whole=True) for batch in batches]
        return self._evaluation.of(
            self.state, placed, step=self.steps_done, before_each=lambda: None
        )

    def other_data(self) -> str | None:
        """Return how the data differ from the restored checkpoint's; None: they are the same."""
        from jaxtrain.run.checkpoint.metadata import other_data

        extra = self._saved.extra
        return None if extra is None else other_data(extra, self.config, self.dataset)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Prompt:
        """Return a completion of `prompt`, or for an encoder-decoder the target.

        Args:
          prompt: text, which is answered with text; or a list of token ids, which is
            answered with ids, for a published model up to an end token.
          max_new_tokens: maximum number of new tokens; None: up to 100 that fit.
          temperature: see `run.generation.decoding.Sampling`, also for `top_k` and `top_p`.
          seed: of sampling.

        Raises:
          UserError: the model is not a language model, or the prompt does not fit into its context.
        """
        from jaxtrain.run.generation.decoding import Sampling

        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        prompts: Any = [prompt]
        found = self.answers(prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
        answer: Any = found[0]
        return answer.text if isinstance(prompt, str) else answer.tokens

    @functools.cached_property
    def writer(self) -> "Writer":
        """The text generator, with its tokenizer."""
        from jaxtrain.run.generation.generate import Writer

        return Writer(self.program.setup, self.config, self.workdir)

    def answers(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        sampling: "Sampling | BeamSearch | None" = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        show: Callable[[str], None] | None = None,
    ) -> "list[Answer]":
        """Return completions of several prompts, or for an encoder-decoder the
        targets, with the reason why each ended.

        Args:
          prompts: texts, or lists of token ids.
          max_new_tokens: maximum number of new tokens of each; None: up to 100 that fit.
          sampling: sampling or beam search settings; None: from the model's own distribution.
          stop: strings before which an answer in text ends.
          seed: of sampling.
          batch_size: prompts that are answered at once.
          show: called with the first text's answer piece by piece while it is generated.

        Raises:
          UserError: the model is not a language model, or a prompt does not fit into its context.
        """
        return self.writer.answers(
            self.program.eval_state(self.state), prompts, max_new_tokens=max_new_tokens,
            sampling=sampling, stop=stop, seed=seed, batch_size=batch_size, show=show,
        )  # fmt: skip

    def show(self, *, verbose: bool = False) -> None:
        """Print configuration (`verbose`: all settings), mesh, data and parameter table."""
        from jaxtrain.run.show import report

        report.show_own_config(self.console, self.config, verbose=verbose)
        self._show_pieces(self.console)

    def _show_pieces(self, console: Console) -> None:
        from jaxtrain.run.show import report

        program, attention = self.program.setup, resolve_kernel(self.config, self._platform)
        report.show_run(console, self.config, program, attention, self.dataset, self.state)

    def table(self) -> Table:
        """Return every parameter: shape, logical axes, placement, bytes on each device."""
        from jaxtrain.run.show.report import parameter_table

        return parameter_table(self.state, self.program.setup.unfreezing)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far; in memory without a workdir."""
        return self._loop.lines

    def plot(self) -> "Picture":
        """Plot the loss and the objective's other metrics so far, with baselines."""
        from jaxtrain.run.show.figures import loss_figure

        train = self.config.train
        return loss_figure(self.history, train.task.yardstick(train.model, self.dataset.facts))

    def plot_sharding(self, name: str) -> "Picture":
        """Draw which devices hold which shard of the parameter with this name in `table`.

        Raises:
          UserError: there is no parameter of this name.
        """
        from jaxtrain.run.show import notebook

        return notebook.parameter_picture(self.state, name)

    def __repr__(self) -> str:
        from jaxtrain.run.show import report

        model, mesh = type(self.config.train.model).__name__, report.format_mesh(self.mesh.shape)
        return f"Trainer({model}, step {self.steps_done} of {self.config.train.steps}, {mesh})"

    def _repr_html_(self) -> str:
        from jaxtrain.run.show import notebook

        configuration = notebook.details("Configuration", self.config.to_gin())
        return notebook.export_html(self._show_pieces) + configuration

    def close(self) -> None:
        """Wait for the checkpoint being written, and flush the rest to the run's folder."""
        self._loop.close()
        if self._folder is not None and self._attempt.folder is None:
            self._folder.close()
