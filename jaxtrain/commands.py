"""The command line: one function per command, nothing else."""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from jaxtrain import doctor, report
from jaxtrain import verify as verification
from jaxtrain.attempts import run
from jaxtrain.attempts import supervise as supervision
from jaxtrain.attempts.attempt import Preempted
from jaxtrain.attempts.supervise import QUICKSTART, run_folder
from jaxtrain.buckets import BucketError, BucketPath, Place, on_disk, place, require
from jaxtrain.checkpoint import FOLDER, Checkpoint, CheckpointError, Checkpoints
from jaxtrain.checkpoint.retention import sealed_steps
from jaxtrain.compilation import keep_compiled_programs
from jaxtrain.corruption import CorruptionError
from jaxtrain.errors import UserError, did_you_mean
from jaxtrain.files import refused_path, write_atomically
from jaxtrain.mesh import SIMULATED_DEVICES, offer_cpu_devices
from jaxtrain.metrics import strict
from jaxtrain.options import parser
from jaxtrain.peers import ClusterError, Flags
from jaxtrain.pipeline.schedules import make_schedule
from jaxtrain.pipeline.stages import deal
from jaxtrain.pipeline.timeline import draw, simulate, table
from jaxtrain.planning.budget import plan_budget
from jaxtrain.planning.budget import show as show_budget
from jaxtrain.planning.out_of_memory import OutOfMemory, explain, is_out_of_memory
from jaxtrain.planning.plan import plan as make_plan
from jaxtrain.planning.tables import show as show_plan
from jaxtrain.planning.targets import parse_target
from jaxtrain.profiling.recorder import refuse_few_steps
from jaxtrain.progress import quiet
from jaxtrain.settings import Config, load_config
from jaxtrain.step import parameter_shapes
from jaxtrain.train import Trainer

DONE, FAILED, USER_ERROR, PREEMPTED = 0, 1, 2, 75
_FAILURES = (
    BucketError,
    CheckpointError,
    ClusterError,
    CorruptionError,
    FloatingPointError,
    OutOfMemory,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parsed = parser(_COMMANDS).parse_args(arguments)
    try:
        return parsed.run(parsed)
    except UserError as error:
        status, told = USER_ERROR, error
    except _FAILURES as error:
        status, told = FAILED, error
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        status, told = FAILED, traceback.format_exc()
    print(f"jaxtrain: {told}", file=sys.stderr)  # noqa: T201
    if jax.distributed.is_initialized():
        # JAX's farewell waits for the other processes, which may be gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def train(arguments: argparse.Namespace) -> int:
    """Trains; continues from the newest checkpoint in the run's folder if there is one."""
    keep_compiled_programs()
    console = _console()
    name, bindings = arguments.config, list(arguments.gin_bindings)
    if arguments.simulate_devices is not None:
        bindings.append(f"Mesh.simulated_devices = {arguments.simulate_devices}")
    elif name is None:
        bindings = [*_quickstart_devices(console), *bindings]
    name = name or QUICKSTART
    workdir = run_folder(name, arguments.workdir)
    config = load_config(name, bindings, allow_imports=arguments.allow_imports)
    flags = Flags(
        coordinator=arguments.coordinator,
        num_processes=arguments.num_processes,
        process_id=arguments.process_id,
    )
    try:
        with run.begin(config, workdir, flags, say=_sayer(console)) as attempt:
            if not attempt.is_first:
                console = quiet()
            with attempt.phases.phase("start"):
                if arguments.profile:
                    done = max(sealed_steps(workdir / FOLDER), default=0)
                    refuse_few_steps(done, config.train.steps)
                trainer = Trainer(config, workdir, console=console, attempt=attempt)
                attempt.at_end.append(trainer.close)
                trainer.show()
            values = _train(trainer, console, profile=arguments.profile)
            # The sample's two programs are compiled here.
            with attempt.phases.phase("compile", trainer.steps_done):
                _show_end(console, trainer, values, workdir)
            if attempt.is_first:
                attempt.goodput.record(trainer.steps_done, finished=True)
                account = attempt.goodput.account()
                account.show(console)
                assert attempt.folder is not None
                account.draw(attempt.folder.local / run.GOODPUT_PICTURE)
            command = _command(arguments, name, workdir, config, trainer.steps_done)
            console.print(f"To go on: {command}", soft_wrap=True, markup=False)
    except Preempted as stop:
        console.print(f"{stop}; run the same command again to go on")
        return PREEMPTED
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise OutOfMemory(explain(config, str(error))) from error
        raise
    return DONE


def _train(trainer: Trainer, console: Console, *, profile: bool) -> dict[str, float]:
    """Trains to the end, or evaluates what is there already."""
    first, steps = trainer.steps_done, trainer.config.train.steps
    if first >= steps:
        console.print(
            f"{trainer.workdir} is trained to step {first} already; raise Train.steps to go on"
        )
        return trainer.train(profile=profile) or trainer.evaluate()
    if first:
        console.print(f"Going on from the checkpoint of step {first} in {trainer.workdir}")
    return trainer.train(profile=profile)


def _sayer(console: Console) -> Callable[[str], None]:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    return say


def _console() -> Console:
    """Standard output; where it is no terminal, wide enough that tables do not fold."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _quickstart_devices(console: Console) -> list[str]:
    """Bindings for the quickstart: 8 simulated devices, or all accelerators there are."""
    # Only the number of CPU devices: an accelerator stays the default where there is one.
    offer_cpu_devices(SIMULATED_DEVICES)
    if jax.default_backend() == "cpu":
        console.print(f"No accelerator here: simulating {SIMULATED_DEVICES} devices on the CPU")
        return [f"Mesh.simulated_devices = {SIMULATED_DEVICES}"]
    console.print(f"Using {jax.device_count()} {jax.devices()[0].device_kind}")
    return ["Mesh.fsdp = -1", "Mesh.tensor = 1"]


def _show_end(console: Console, trainer: Trainer, values: dict[str, float], workdir: Place) -> None:
    facts = trainer.dataset.facts
    words = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    console.print(f"Held out: {words}")
    if "unigram_entropy" in facts:
        console.print(
            f"Held-out loss {values['eval_loss']:.4f} nats a token, against the text's unigram "
            f"entropy {facts['unigram_entropy']:.4f}"
        )
    if trainer.dataset.tokenizer is not None:
        prompt = "def "
        sample = trainer.generate(prompt, temperature=0.7)
        console.print("A sample (temperature 0.7):")
        console.print(escape(prompt + sample), highlight=False)
    console.print(f"Loss curve: {workdir / 'loss.png'}")


def _command(
    arguments: argparse.Namespace, name: str, workdir: Place, config: Config, steps_done: int
) -> str:
    """The command that trains this run for as many steps again."""
    # `make` does not put the environment's programs on the PATH.
    on_path = shutil.which("jaxtrain") is not None
    program = ["jaxtrain"] if on_path else [sys.executable, "-m", "jaxtrain"]
    words = [*program, "train", name, "--workdir", str(workdir)]
    for binding in arguments.gin_bindings:
        if not binding.replace(" ", "").startswith("Train.steps="):
            words += ["-b", binding]
    if config.mesh.simulated_devices:
        words += ["--simulate-devices", str(config.mesh.simulated_devices)]
    if arguments.allow_imports:
        words.append("--allow-imports")
    return shlex.join([*words, "-b", f"Train.steps = {2 * steps_done}"])


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates the newest checkpoint and prints one JSON line."""
    trainer = _open_run(arguments.workdir, arguments.gin_bindings, arguments.allow_imports)
    values = trainer.evaluate()
    line = strict({"step": trainer.steps_done, **values})
    print(json.dumps(line, allow_nan=False))  # noqa: T201
    return DONE


def generate(arguments: argparse.Namespace) -> int:
    """Prints a sample from a trained language model."""
    trainer = _open_run(arguments.workdir, arguments.gin_bindings, arguments.allow_imports)
    sample = trainer.generate(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    print(arguments.prompt + sample)  # noqa: T201
    return DONE


def inspect(arguments: argparse.Namespace) -> int:
    """Prints what the newest checkpoint holds; reads its arrays only to verify them."""
    workdir = _existing_run(arguments.workdir)
    checkpoints = Checkpoints(workdir, Checkpoint(), read_only=True)
    step = max(checkpoints.steps())
    console, folder = _console(), checkpoints.folder / str(step)
    report.show_checkpoint(console, folder, checkpoints.extra(step), checkpoints.tree(step))
    if arguments.verify:
        checkpoints.verify(step)
        console.print("Verified: every array can be read and has the fingerprint it was saved with")
    return DONE


def verify(arguments: argparse.Namespace) -> int:
    """Proves a shrunk configuration on simulated devices."""
    name, file = arguments.config, _writable("--json", arguments.json)
    config = load_config(name, arguments.gin_bindings, allow_imports=arguments.allow_imports)
    verification.simulate()
    console = _console()
    with verification.showing(console) as show:
        found = verification.verify(config, on_small=show.small, on_proof=show.proof)
    verification.show_end(console, found)
    if file is not None:
        write_atomically(file, json.dumps({"config": name, **found.to_json()}, indent=2).encode())
    return DONE if found.passed else FAILED


def plan(arguments: argparse.Namespace) -> int:
    """Plans a run for a machine that need not be there, or for a budget of FLOPs."""
    console = _console()
    picture, file = _writable("--png", arguments.png), _writable("--json", arguments.json)
    target = None if arguments.target is None else parse_target(arguments.target)
    if arguments.budget is not None:
        chip = None if target is None else target.chip
        devices = None if target is None else target.devices
        peak = None if chip is None else chip.bf16_flops
        budget = plan_budget(arguments.budget, peak_flops=peak, devices=devices)
        others = {"CONFIG": arguments.config, "-b": arguments.gin_bindings, "--json": file}
        others |= {"--png": picture, "--search": arguments.search}
        if ignored := [name for name, value in others.items() if value]:
            raise UserError(
                f"plan --budget goes with --target alone; leave out {' and '.join(ignored)}"
            )
        show_budget(console, budget)
        return DONE
    if arguments.config is None or target is None:
        missing = "CONFIG" if arguments.config is None else "--target"
        raise UserError(
            f"plan: {missing} is missing; write for example 'jaxtrain plan llama_8b --target "
            "v5p:4x4x4', or 'jaxtrain plan --budget 1e21'"
        )
    config = load_config(
        arguments.config, arguments.gin_bindings, allow_imports=arguments.allow_imports
    )
    if target.chip.kind == "cpu":
        offer_cpu_devices(target.devices)
    # Accelerators of this machine are not asked: the target's compiler needs none.
    jax.config.update("jax_platforms", "cpu")

    def progress(words: str) -> contextlib.AbstractContextManager[Any]:
        return console.status(words) if console.is_terminal else contextlib.nullcontext()

    found = make_plan(
        config, target.name, compile=arguments.compile, search=arguments.search, progress=progress
    )
    show_plan(console, found)
    if picture is not None:
        write_atomically(picture, found.plot().png())
        console.print(f"Drawn: {picture}", soft_wrap=True, markup=False)
    if file is not None:
        write_atomically(file, json.dumps(found.to_json(), indent=2).encode())
    return DONE


def _writable(option: str, name: str | None) -> Path | None:
    """The file that an option names, which can be written; said before the work and not after."""
    if name is None:
        return None
    file, named = on_disk(name), f"{option} {name!r}"
    folder = file.absolute().parent
    with refused_path(named, needs="name a file in a folder that can be written"):
        if not folder.is_dir():
            raise UserError(f"{named}: there is no folder {folder}")
        if not file.name or (file.exists() and not file.is_file()):
            raise UserError(f"{named} is no file; name one, such as {file / f'out.{option[2:]}'}")
        if option == "--png" and file.suffix.lower() not in ("", ".png"):
            raise UserError(f"{named}: what is drawn is PNG; use {file.with_suffix('.png')}")
        tempfile.TemporaryFile(dir=folder).close()
    return file


def timeline(arguments: argparse.Namespace) -> int:
    """Simulates the pipeline's schedule and draws it."""
    picture = _writable("--png", arguments.png)
    config = load_config(
        arguments.config, arguments.gin_bindings, allow_imports=arguments.allow_imports
    )
    pipeline, model, ranks = config.pipeline, config.train.model, config.mesh.pipe
    if ranks == -1:
        raise UserError("Mesh.pipe=-1: a timeline needs a number of ranks; use Mesh.pipe=4")
    if "layers" not in model.settings:
        raise UserError(
            f"Train.model=@{type(model).__name__}() has no stack of layers to cut into stages; "
            "use a transformer such as @GPT()"
        )
    cut = deal(parameter_shapes(model.build), ranks, pipeline.virtual_stages).cut
    schedule = make_schedule(
        pipeline.schedule,
        ranks=ranks,
        microbatches=pipeline.microbatches,
        virtual_stages=pipeline.virtual_stages,
    )
    # In forwards of a layer; recomputing a stage is one more forward before its backward.
    again = 1.0 if pipeline.backward == "recompute" else 0.0
    simulated = simulate(schedule, backward=2 + again, backward_input=1 + again, stage_costs=cut)
    console = _console()
    console.print(table(simulated))
    console.print(f"Layers on each stage: {', '.join(map(str, cut))}")
    if picture is not None:
        draw(simulated, picture)
        console.print(f"Drawn: {picture}", soft_wrap=True, markup=False)
    return DONE


def _open_run(workdir: str, bindings: Sequence[str], allow_imports: bool) -> Trainer:
    """The trainer of a run's folder with its newest checkpoint restored, changing nothing there."""
    keep_compiled_programs()
    folder = _existing_run(workdir)
    with tempfile.TemporaryDirectory() as copies:
        file = folder / "config.gin"
        if isinstance(file, BucketPath):
            file = Path(copies) / file.name
            file.write_bytes((folder / file.name).read_bytes())
        config = load_config(file, bindings, allow_imports=allow_imports)
    # Standard output is for the result; a damaged checkpoint that is passed over is said beside it.
    return Trainer(config, folder, read_only=True, console=Console(stderr=True))


def _existing_run(workdir: str) -> Place:
    """A run's folder that can be read and holds a checkpoint."""
    folder = place(workdir)
    if isinstance(folder, BucketPath):
        require("--workdir", folder)
    with refused_path(f"--workdir {workdir}", needs="use a run's folder that can be read"):
        if not (folder / "config.gin").is_file():
            if isinstance(folder, BucketPath):
                beside = folder.parent
                runs = [str(path) for path in beside.iterdir()] if beside.is_dir() else []
            else:
                runs = [str(path.parent) for path in folder.parent.glob("*/config.gin")]
            hint = did_you_mean(workdir, runs) if runs else ""
            raise UserError(f"--workdir {workdir}: no run there (no config.gin){hint}")
        # Not by way of `Checkpoints`: Orbax opens the backend, and the CPU can be split no more.
        if not sealed_steps(folder / FOLDER):
            raise UserError(f"--workdir {workdir}: there is no complete checkpoint in it")
    return folder


_COMMANDS = {
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "inspect": inspect,
    "plan": plan,
    "verify": verify,
    "timeline": timeline,
    # Before this module is loaded `__main__` has taken it; here for the list of commands.
    "supervise": lambda arguments: supervision.main(arguments.words),
    "doctor": lambda _: doctor.show(_console()),
}
