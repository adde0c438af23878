"""The command line: one function per command, nothing else."""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape

from jaxtrain import doctor, report
from jaxtrain import verify as verification
from jaxtrain.checkpoint import Checkpoint, CheckpointError, Checkpoints
from jaxtrain.errors import UserError, did_you_mean
from jaxtrain.mesh import offer_cpu_devices
from jaxtrain.metrics import previous_attempt, write_atomically, write_exit
from jaxtrain.pipeline.schedules import make_schedule
from jaxtrain.pipeline.stages import deal
from jaxtrain.pipeline.timeline import draw, simulate, table
from jaxtrain.settings import QUICKSTART, Config, load_config
from jaxtrain.step import parameter_shapes
from jaxtrain.train import Preempted, Trainer

DONE, FAILED, USER_ERROR, PREEMPTED = 0, 1, 2, 75
QUICKSTART_DEVICES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except UserError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)  # noqa: T201
        return USER_ERROR
    except (CheckpointError, FloatingPointError) as error:
        print(f"jaxtrain: {error}", file=sys.stderr)  # noqa: T201
        return FAILED


def train(arguments: argparse.Namespace) -> int:
    """Trains; continues from the newest checkpoint in the run's folder if there is one."""
    console = _console()
    name, bindings = arguments.config, list(arguments.gin_bindings)
    if arguments.simulate_devices is not None:
        bindings.append(f"Mesh.simulated_devices = {arguments.simulate_devices}")
    elif name is None:
        bindings = [*_quickstart_devices(console), *bindings]
    name = name or QUICKSTART
    workdir = Path(arguments.workdir or Path("runs") / Path(name).stem)
    config = load_config(name, bindings, allow_imports=arguments.allow_imports)
    attempt = previous_attempt(workdir) + 1
    trainer = None
    status, reason = "failed", "an error: see the terminal"
    try:
        trainer = Trainer(config, workdir, console=console)
        trainer.show()
        first = trainer.steps_done
        if first >= config.train.steps:
            console.print(
                f"{workdir} is trained to step {first} already; raise Train.steps to go on"
            )
            values = trainer.evaluate()
        else:
            if first:
                console.print(f"Going on from the checkpoint of step {first} in {workdir}")
            values = trainer.train()
        _show_end(console, trainer, values, workdir)
        command = _command(arguments, name, workdir, config)
        console.print(f"To go on: {command}", soft_wrap=True, markup=False)
        status, reason = "done", f"trained to step {config.train.steps}"
    except Preempted as stop:
        status, reason = "preempted", str(stop)
        console.print(f"{reason}; run the same command again to go on")
        return PREEMPTED
    except (UserError, FloatingPointError, CheckpointError, KeyboardInterrupt) as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        # Nothing was begun where the configuration was refused: nothing is written either.
        if trainer is not None:
            trainer.close()
            write_exit(
                workdir, status=status, reason=reason, step=trainer.steps_done, attempt=attempt
            )
    return DONE


def _console() -> Console:
    """Standard output; where it is no terminal, wide enough that tables do not fold."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _quickstart_devices(console: Console) -> list[str]:
    """Bindings for the quickstart: 8 simulated devices, or all accelerators there are."""
    # Only the number of CPU devices: an accelerator stays the default where there is one.
    offer_cpu_devices(QUICKSTART_DEVICES)
    if jax.default_backend() == "cpu":
        console.print(f"No accelerator here: simulating {QUICKSTART_DEVICES} devices on the CPU")
        return [f"Mesh.simulated_devices = {QUICKSTART_DEVICES}"]
    console.print(f"Using {jax.device_count()} {jax.devices()[0].device_kind}")
    return ["Mesh.fsdp = -1", "Mesh.tensor = 1"]


def _show_end(console: Console, trainer: Trainer, values: dict[str, float], workdir: Path) -> None:
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


def _command(arguments: argparse.Namespace, name: str, workdir: Path, config: Config) -> str:
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
    return shlex.join([*words, "-b", f"Train.steps = {2 * config.train.steps}"])


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates the newest checkpoint and prints one JSON line."""
    trainer = _open_run(arguments.workdir, arguments.gin_bindings, arguments.allow_imports)
    values = trainer.evaluate()
    print(json.dumps({"step": trainer.steps_done, **values}))  # noqa: T201
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
    step = checkpoints.latest_step()
    if step is None:
        raise UserError(f"--workdir {workdir}: there is no complete checkpoint in it")
    console, folder = _console(), checkpoints.folder / str(step)
    report.show_checkpoint(console, folder, checkpoints.extra(step), checkpoints.tree(step))
    if arguments.verify:
        checkpoints.verify(step)
        console.print("Verified: every array can be read and has the fingerprint it was saved with")
    return DONE


def verify(arguments: argparse.Namespace) -> int:
    """Proves a shrunk configuration on simulated devices."""
    name, file = arguments.config, None if arguments.json is None else Path(arguments.json)
    config = load_config(name, arguments.gin_bindings, allow_imports=arguments.allow_imports)
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(f"--json {file}: there is no folder {file.absolute().parent}")
    verification.simulate()
    console = _console()
    with verification.showing(console) as show:
        found = verification.verify(config, on_small=show.small, on_proof=show.proof)
    verification.show_end(console, found)
    if file is not None:
        write_atomically(file, json.dumps({"config": name, **found.to_json()}, indent=2).encode())
    return DONE if found.passed else FAILED


def timeline(arguments: argparse.Namespace) -> int:
    """Simulates the pipeline's schedule and draws it."""
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
    if arguments.png:
        picture = Path(arguments.png)
        if not picture.absolute().parent.is_dir():
            raise UserError(f"--png {picture}: there is no folder {picture.absolute().parent}")
        draw(simulated, picture)
        console.print(f"Drawn: {picture}", soft_wrap=True, markup=False)
    return DONE


def _open_run(workdir: str, bindings: Sequence[str], allow_imports: bool) -> Trainer:
    """The trainer of a run's folder with its newest checkpoint restored, changing nothing there."""
    folder = _existing_run(workdir)
    config = load_config(folder / "config.gin", bindings, allow_imports=allow_imports)
    if Checkpoints(folder, config.checkpoint, read_only=True).latest_step() is None:
        raise UserError(f"--workdir {workdir}: there is no complete checkpoint in it")
    return Trainer(config, folder, read_only=True)


def _existing_run(workdir: str) -> Path:
    folder = Path(workdir)
    if not (folder / "config.gin").is_file():
        runs = [str(path.parent) for path in folder.parent.glob("*/config.gin")]
        hint = did_you_mean(workdir, runs) if runs else ""
        raise UserError(f"--workdir {workdir}: no run there (no config.gin){hint}")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxtrain", description="Trains models over device meshes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = _add(commands, "train", train, "trains, or continues from the newest checkpoint")
    command.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a .gin file or a shipped config; the quickstart",
    )
    command.add_argument("--workdir", metavar="DIR", help="the run's folder; runs/CONFIG")
    command.add_argument(
        "--simulate-devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    _add_config_options(command)

    command = _add(
        commands, "eval", evaluate, "evaluates the newest checkpoint, prints one JSON line"
    )
    command.add_argument("--workdir", metavar="DIR", required=True)
    _add_config_options(command)

    command = _add(commands, "generate", generate, "prints a sample from a trained language model")
    command.add_argument("--workdir", metavar="DIR", required=True)
    command.add_argument("--prompt", metavar="TEXT", required=True)
    command.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="100, or fewer where the context is shorter"
    )
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy")
    command.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    command.add_argument(
        "--top-p", type=float, metavar="P", help="only the likeliest P of the mass"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S")
    _add_config_options(command)

    command = _add(commands, "inspect", inspect, "prints what a checkpoint holds")
    command.add_argument("--workdir", metavar="DIR", required=True)
    command.add_argument(
        "--verify",
        action="store_true",
        help="read every array and check it against its fingerprint",
    )

    command = _add(commands, "verify", verify, "proves a config, shrunk, on 8 simulated devices")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--json", metavar="FILE", help="write the table into this file too")
    _add_config_options(command)

    command = _add(commands, "timeline", timeline, "simulates the pipeline schedule and draws it")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--png", metavar="FILE", help="draw the schedule into this file")
    _add_config_options(command)

    _add(commands, "doctor", lambda _: doctor.show(_console()), "prints versions, devices, extras")
    return parser


def _add(commands, name: str, run, text: str) -> argparse.ArgumentParser:  # noqa: ANN001
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    return command


def _add_config_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-b",
        "--gin_bindings",
        action="append",
        default=[],
        metavar="BINDING",
        help="one gin binding, such as 'Mesh.tensor=2'; may be repeated",
    )
    command.add_argument(
        "--allow-imports",
        action="store_true",
        help="let import lines of the .gin file run modules from outside jaxtrain",
    )


if __name__ == "__main__":
    sys.exit(main())
