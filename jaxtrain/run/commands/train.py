"""The command `train`.

It detects data starvation (steps that wait for batches) and gives advice.
"""

import argparse
import dataclasses
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.values import settings_of
from jaxtrain.data.source import Dataset, is_store
from jaxtrain.models.model import reads_pairs
from jaxtrain.parallel.compilation import keep_compiled_programs
from jaxtrain.parallel.devices import SIMULATED_DEVICES, offer_cpu_devices
from jaxtrain.run.attempts import DONE, FAILED, PREEMPTED, begin
from jaxtrain.run.attempts.attempt import OUTPUT_CLOSED, Preempted
from jaxtrain.run.attempts.folder import QUICKSTART, explain_folder_errors, run_folder
from jaxtrain.run.attempts.goodput import PRODUCTIVE, Account
from jaxtrain.run.checkpoint.sealing import FOLDER, sealed_steps
from jaxtrain.run.cluster.cluster import Flags
from jaxtrain.run.cluster.detection import detect
from jaxtrain.run.generation.answer import printable
from jaxtrain.run.loop import RecorderKind
from jaxtrain.run.metrics.files import numbers_of
from jaxtrain.run.show.progress import Output, print_lines, quiet, terminal
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import Config, load_config


def train(
    arguments: argparse.Namespace,
    *,
    recorder: RecorderKind | None,
    explained: Callable[[Config, Exception], Exception],
) -> int:
    """Train; continues from the newest checkpoint in the run's folder if there is one.

    Args:
      arguments: the parsed command line.
      recorder: profiles some steps; None: no profile.
      explained: maps an error of JAX to the error to raise.
    """
    keep_compiled_programs()
    output = Output(sys.stdout, OUTPUT_CLOSED)
    console = terminal(output)
    name, bindings = arguments.config, list(arguments.gin_bindings)
    flags = Flags(
        coordinator=arguments.coordinator,
        num_processes=arguments.num_processes,
        process_id=arguments.process_id,
    )
    if arguments.simulate_devices is not None:
        bindings.append(f"Mesh.simulated_devices = {arguments.simulate_devices}")
    elif name in (None, QUICKSTART) and _chooses_devices(bindings, flags):
        bindings = [*_quickstart_devices(console), *bindings]
    workdir = run_folder(name, arguments.workdir)
    name = name or QUICKSTART
    config = load_config(name, bindings, allow_imports=arguments.allow_imports)
    try:
        with (
            explain_folder_errors(workdir),
            begin.begin(
                config, workdir, flags, report=functools.partial(print_lines, console)
            ) as attempt,
        ):
            output.when_closed(attempt.request_stop)
            if not attempt.is_first:
                console = quiet()
            print_lines(console, *config.notes)
            with attempt.phases.phase("start"):
                if recorder is not None:
                    done = max(sealed_steps(workdir / FOLDER), default=0)
                    recorder.validate(done, config.train.steps)
                trainer = Trainer(config, workdir, console=console, attempt=attempt)
                attempt.at_end.append(trainer.close)
                trainer.show(verbose=arguments.verbose)
            values = _train(trainer, console, profile=recorder)
            # The sample's two programs are compiled here.
            with attempt.phases.phase("compile", trainer.steps_done):
                _show_end(console, trainer, values, workdir)
            if attempt.is_first:
                attempt.goodput.record(trainer.steps_done, finished=True)
                account = attempt.goodput.account()
                account.show(console)
                if (
                    message := advise_on_waiting(account, config.train.data, trainer.dataset)
                ) is not None:
                    print_lines(console, message)
                assert attempt.folder is not None
                account.draw(attempt.folder.local / begin.GOODPUT_PICTURE)
            command = _command(arguments, name, workdir, config, trainer.steps_done)
            console.print(f"To continue: {command}", soft_wrap=True, markup=False)
    except Preempted as stop:
        line = f"{stop}; run the same command again to resume"
        if stop.is_failure:
            print(f"jaxtrain: {line}", file=sys.stderr)  # noqa: T201
            return FAILED
        console.print(line)
        return PREEMPTED
    except jax.errors.JaxRuntimeError as error:
        message = explained(config, error)
        if message is error:
            raise
        raise message from error
    return DONE


def _train(trainer: Trainer, console: Console, *, profile: RecorderKind | None) -> dict[str, Any]:
    """Train to the end, or evaluate what is there already."""
    first, steps = trainer.steps_done, trainer.config.train.steps
    if first >= steps:
        console.print(
            f"Loaded model parameters from disk: {trainer.workdir} is trained to step {first} "
            "already; raise Train.steps to continue"
        )
        return trainer.train(profile=profile) or trainer.evaluate()
    if first:
        console.print(f"Resuming from the checkpoint of step {first} in {trainer.workdir}")
    return trainer.train(profile=profile) or trainer.evaluate()


def _chooses_devices(bindings: Sequence[str], flags: Flags) -> bool:
    """Whether the quickstart's devices are ours to choose: one process, and no word on them."""
    is_simulated = any(
        one.replace(" ", "").startswith("Mesh.simulated_devices=") for one in bindings
    )
    return not is_simulated and detect(os.environ, flags).num_processes == 1


def _quickstart_devices(console: Console) -> list[str]:
    """Return the bindings of the quickstart: 8 simulated devices, or all available accelerators."""
    # Only sets the number of CPU devices: an accelerator remains the default.
    offer_cpu_devices(SIMULATED_DEVICES)
    if jax.default_backend() == "cpu":
        console.print(f"No accelerator here: simulating {SIMULATED_DEVICES} devices on the CPU")
        return [f"Mesh.simulated_devices = {SIMULATED_DEVICES}"]
    console.print(f"Using {jax.device_count()} {jax.devices()[0].device_kind}")
    return ["Mesh.fsdp = -1", "Mesh.tensor = 1"]


def _show_end(console: Console, trainer: Trainer, values: dict[str, Any], workdir: AnyPath) -> None:
    train, facts = trainer.config.train, trainer.dataset.facts
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in numbers_of(values).items())
    console.print(f"Held out: {metrics}")
    if (line := train.task.yardstick(train.model, facts).sentence(values)) is not None:
        console.print(line)
    tokenizer, model = trainer.dataset.tokenizer, train.model
    if tokenizer is not None and reads_pairs(model):
        example = trainer.dataset.heldout.example(0, None)
        source_S: Any = example.source
        source = source_S[example.source_segment_ids > 0].tolist()
        answer: Any = trainer.generate(source, temperature=0.0)
        console.print("A held-out source, and the predicted target:")
        text = f"{tokenizer.decode(source)} -> {tokenizer.decode(answer)}"
        console.print(escape(printable(text)), highlight=False)
    elif tokenizer is not None and model.cached:
        prompt = "def "
        sample = trainer.generate(prompt, temperature=0.7)
        console.print("A sample (temperature 0.7):")
        console.print(escape(printable(prompt + sample)), highlight=False)
    console.print(f"Loss curve: {workdir / 'loss.png'}")


def _command(
    arguments: argparse.Namespace, name: str, workdir: AnyPath, config: Config, steps_done: int
) -> str:
    """Return the command that trains this run for as many steps again, its learning rate going on
    from where a decay to the last step has brought it, and without the patience that has ended
    it."""
    command = [*_program(), "train", name, "--workdir", str(workdir)]
    for binding in arguments.gin_bindings:
        if not binding.replace(" ", "").startswith("Train.steps="):
            command += ["-b", binding]
    kept = config.schedule.with_same_decay(steps_done)
    if kept != config.schedule:
        command += ["-b", f"Schedule.decay_steps = {kept.decay_steps}"]
    if config.mesh.simulated_devices:
        command += ["--simulate-devices", str(config.mesh.simulated_devices)]
    if arguments.allow_imports:
        command.append("--allow-imports")
    if config.best.patience and steps_done < config.train.steps:
        command += ["-b", "Best.patience = 0"]
    return shlex.join([*command, "-b", f"Train.steps = {2 * steps_done}"])


def _program() -> list[str]:
    """Return the command that runs this jaxtrain again."""
    own = Path(sys.executable).with_name("jaxtrain")
    found = shutil.which("jaxtrain")
    if not own.is_file():
        return ["jaxtrain"] if found else [sys.executable, "-m", "jaxtrain"]
    if found is not None and own.samefile(found):
        return ["jaxtrain"]
    # `make` does not put the environment's programs on the PATH.
    here = Path.cwd()
    return [str(own.relative_to(here) if own.is_relative_to(here) else own)]


# Threshold as a fraction of the time of steps and their batches: less is noise.
_SHARE = 0.05
_SECONDS = 30.0


def advise_on_waiting(account: Account, data: Any, dataset: Dataset) -> str | None:
    """Return advice if a run waited for batches for more than 5% of its steps' time.

    `None` too if steps took less than 30 seconds: the first batches always take time.

    Args:
      account: where the time went.
      data: the settings of its data.
      dataset: the data.
    """
    waited, worked = account.seconds["data"], account.seconds[PRODUCTIVE]
    if worked < _SECONDS or waited <= _SHARE * (waited + worked):
        return None
    share, name = waited / (waited + worked), _name(data, dataset)
    return f"Steps waited for batches of {name} {share:.0%} of their time: {_advice(data)}"


def _name(data: Any, dataset: Dataset) -> str:
    """Return the name of the data for messages: the setting of their path, or their class."""
    name, source = type(data).__name__, dataset.facts.get("source")
    settings = settings_of(type(data)) if dataclasses.is_dataclass(data) else {}
    for setting in ("source", "sources"):
        if setting in settings and source is not None:
            return f"{name}.{setting} = {str(source)!r}"
    return f"@{name}()"


def _advice(data: Any) -> str:
    """Return what brings more batches a second, by where the data are read."""
    # Imported here: most runs wait for no batch, and read one kind of data.
    from jaxtrain.data.images.source import ImageData
    from jaxtrain.data.images.stores import DEMO
    from jaxtrain.data.mixture import Mixture
    from jaxtrain.data.text.source import TextData

    def is_read_while_training(one: Any) -> bool:
        # Examples are read from files when they are drawn, and not from memory.
        if isinstance(one, ImageData):
            return one.source not in (*DEMO, "synthetic")
        if isinstance(one, Mixture):
            of = [dataclasses.replace(one.data, source=source) for source in one.sources.values()]
            return any(map(is_read_while_training, of))
        if not isinstance(one, TextData):
            return False
        path = one.path()
        return one.is_tokens() or (path is not None and is_store(path))

    cores = os.cpu_count() or 1
    if isinstance(data, ImageData) and data.workers < cores:
        return f"set ImageData.workers (now {data.workers}; this machine has {cores} cores)"
    if is_read_while_training(data):
        return "copy the data to a local disk, or give the process more cores"
    return "give the process more cores"  # its rows are in memory
