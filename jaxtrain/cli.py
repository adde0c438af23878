"""The command line: parse arguments, run a command, map errors to exit statuses.

JAX is loaded when a command that needs it runs: help and supervisors start in tenths of a second.
"""

import argparse
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.run.attempts import DONE, FAILED, USER_ERROR
from jaxtrain.run.commands.options import add_run_commands, adder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _status(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("jaxtrain: interrupted by Ctrl-C\n")
        status = FAILED
    except BrokenPipeError:
        # Discard pending output: the interpreter flushes it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = FAILED
    return status


def _status(words: list[str]) -> int:
    if words[:1] == ["supervise"]:
        # The supervisor runs for weeks: without JAX, and with options of its own.
        from jaxtrain.run.commands import supervise

        return supervise.main(words[1:])
    whole = parser(words[0] if words else None)
    arguments, unknown = whole.parse_known_args(words)
    if unknown:
        whole.error(f"unrecognized arguments: {' '.join(unknown)}{_bindings_meant(unknown)}")
    arguments.words = [whole.prog, *words]  # for the pages that --html writes
    if (absent := _absent_config(getattr(arguments, "config", None))) is not None:
        print(f"jaxtrain: {absent}", file=sys.stderr)  # noqa: T201
        return USER_ERROR
    if arguments.command in ("configs", "init", "plot", "sweep"):
        return _without_devices(arguments)
    return _run_command(arguments)


def _absent_config(name: str | None) -> str | None:
    """Return the error message for a missing config, before JAX is imported to read one."""
    if not name:  # an empty one is rejected by the command
        return None
    from jaxtrain.config.errors import UserError
    from jaxtrain.config.shipped import HUGGING_FACE, find_config

    try:
        if not name.startswith(HUGGING_FACE):
            find_config(name)
    except UserError as error:
        return str(error)
    return None


def _bindings_meant(unknown: Sequence[str]) -> str:
    """Return the `-b` form of settings that were given as options; '' if none was."""
    from jaxtrain.config.synonyms import suggest_option

    return "".join(
        suggest_option(word.lstrip("-").partition("=")[0])
        if word.startswith("--")
        else f"; write -b {word!r}"
        for word in unknown
        if word.startswith("--") or "=" in word
    )


def _without_devices(arguments: argparse.Namespace) -> int:
    """Run a command that uses no device."""
    from jaxtrain.config.buckets import BucketError
    from jaxtrain.config.errors import UserError
    from jaxtrain.run.show.progress import terminal

    try:
        if arguments.command == "configs":
            from jaxtrain.run.commands.init import show_configs

            return show_configs(terminal())
        if arguments.command == "init":
            from jaxtrain.run.commands.init import init

            return init(arguments, terminal())
        if arguments.command == "plot":
            from jaxtrain.run.metrics.compare import plot

            plot(terminal(), arguments.runs, arguments.png, arguments.html, arguments.words)
            return DONE
        from jaxtrain.run.commands.sweep import sweep

        return sweep(arguments)
    except UserError as error:
        status, message = USER_ERROR, str(error)
    except BucketError as error:
        status, message = FAILED, str(error)
    except OSError as error:
        status, message = FAILED, _of_full_disk(error)
        if message is None:
            raise
    print(f"jaxtrain: {message}", file=sys.stderr)  # noqa: T201
    return status


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `arguments.command` names the command.

    Args:
      command: the one to parse, if known; `train` needs no options of other packages' commands.
    """
    whole = argparse.ArgumentParser(
        prog="jaxtrain",
        description="Train sharded models in JAX; plan and verify runs without the hardware.",
    )
    whole.add_argument(
        "--version", action="version", version=f"jaxtrain {importlib.metadata.version('jaxtrain')}"
    )
    add = adder(whole)
    add_run_commands(add)
    if command != "train":
        from jaxtrain.analysis.options import add_analysis_commands

        add_analysis_commands(add)
    return whole


def _run_command(arguments: argparse.Namespace) -> int:
    """Run a parsed command; map every exception to a message and an exit status."""
    from jaxtrain.run.garbage import collect_rarely, share_arenas

    collect_rarely()
    share_arenas()
    import jax

    from jaxtrain.config.errors import UserError
    from jaxtrain.parallel.devices import outwait_given_cpu_devices, pass_over_libtpu

    pass_over_libtpu()
    outwait_given_cpu_devices()
    try:
        return _run(arguments)
    except UserError as error:
        status, message = USER_ERROR, error
    except _failures() as error:
        status, message = FAILED, error
    except MemoryError as error:
        message = f"this machine has too little memory{f' ({error})' if str(error) else ''}; use a "
        message += "smaller Train.global_batch_size, or a smaller model"
        status = FAILED
    except OSError as error:
        message = _of_full_disk(error)
        if message is None:
            raise
        status = FAILED
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        status, message = FAILED, traceback.format_exc()
    print(f"jaxtrain: {message}", file=sys.stderr)  # noqa: T201
    if jax.distributed.is_initialized():
        # JAX's shutdown barrier waits for the other processes, which may be gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _failures() -> tuple[type[Exception], ...]:
    """Exceptions that are reported in one line but are not user errors; imported when an error is
    raised, since it loads what only plans need."""
    from jaxtrain.analysis.planning.advice import OutOfMemory
    from jaxtrain.config.buckets import BucketError
    from jaxtrain.run.attempts.folder import LostFolderError
    from jaxtrain.run.checkpoint.manifest import CheckpointError
    from jaxtrain.run.cluster.cluster import ClusterError
    from jaxtrain.training.corruption import CorruptionError

    return (
        BucketError,
        CheckpointError,
        ClusterError,
        CorruptionError,
        FloatingPointError,
        LostFolderError,
        OutOfMemory,
    )


def _of_full_disk(error: OSError) -> str | None:
    """Return the message for a full disk; None for another error."""
    from jaxtrain.config.files import FullDiskError, full_disk, room

    if isinstance(error, FullDiskError):
        return str(error)
    reason = full_disk(error)
    if reason is None:
        return None
    path = Path(error.filename or ".")
    return f"{path}: {reason}; {room(path)}"


def _run(arguments: argparse.Namespace) -> int:
    # Each command imports its own module: of the others it needs nothing.
    match arguments.command:
        case "train":
            from jaxtrain.run.commands.train import train

            recorder = _recorder() if arguments.profile else None
            return train(arguments, recorder=recorder, explained=_explain)
        case "eval" | "evaluate-tasks" | "predict" | "inspect":
            from jaxtrain.run.commands import read_run

            read = {
                "eval": read_run.evaluate, "evaluate-tasks": read_run.evaluate_tasks,
                "predict": read_run.predict, "inspect": read_run.inspect,
            }  # fmt: skip
            return read[arguments.command](arguments)
        case "generate":
            from jaxtrain.run.commands import generate

            return generate.generate(arguments)
        case "import-hf":
            from jaxtrain.run.commands import huggingface

            return huggingface.import_hf(arguments)
        case "export-hf":
            from jaxtrain.run.commands import huggingface

            return huggingface.export_hf(arguments)
        case "quantize":
            from jaxtrain.run.commands import quantize

            return quantize.quantize(arguments)
        case "data":
            from jaxtrain.run.commands import data

            return data.describe_data(arguments)
        case "tokenizer":
            from jaxtrain.run.commands import data

            return data.train_tokenizer(arguments)
        case "prepare":
            from jaxtrain.run.commands import data

            return data.prepare_store(arguments)
    return _analyse(arguments)


def _recorder() -> Any:
    from jaxtrain.analysis.profiling.recorder import Recorder

    return Recorder


def _explain(config: Any, error: Exception) -> Exception:
    from jaxtrain.analysis.planning.advice import explain_error

    return explain_error(config, error)


def _analyse(arguments: argparse.Namespace) -> int:
    from jaxtrain.analysis import commands as analysis

    match arguments.command:
        case "plan":
            return analysis.plan(arguments)
        case "verify":
            return analysis.verify(arguments)
        case "timeline":
            return analysis.timeline(arguments)
        case "doctor":
            return analysis.show_doctor(arguments)
    raise AssertionError(arguments.command)
