"""The command `supervise`: its options, the command after `--`, and the run's folder."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from jaxtrain.config.buckets import AnyPath, BucketError
from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts import FAILED, USER_ERROR
from jaxtrain.run.attempts.folder import run_folder
from jaxtrain.run.attempts.supervise import Supervision, supervise
from jaxtrain.run.commands.options import add_run_commands, adder


@dataclasses.dataclass(frozen=True)
class Job:
    """Arguments of `jaxtrain supervise`.

    Attributes:
      settings: from the options.
      train: the words after `--`, "train" first.
      workdir: the run's folder, as `train` will use it.
    """

    settings: Supervision
    train: list[str]
    workdir: AnyPath


def parse(arguments: Sequence[str]) -> Job:
    """Read `[OPTIONS] -- train ...`.

    Raises:
      UserError: a value that is not allowed, no `--`, or something other than `train` after it.
      SystemExit: --help (0), or an option that does not exist (2).
    """
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    own, command = words[:cut], words[cut + 1 :]
    defaults = Supervision()
    parser = argparse.ArgumentParser(
        prog="jaxtrain supervise",
        usage="%(prog)s [OPTIONS] -- train [CONFIG] ...",
        description="Run train, restart it after failures, and give up when restarts make no "
        "progress. Exit status: 0 trained, 1 gave up or was stopped before everything was saved, 2 "
        "a user error (config, arguments or data), 75 stopped by a signal after saving.",
    )
    parser.add_argument(
        "--max-restarts-without-progress",
        type=int,
        default=defaults.max_restarts_without_progress,
        metavar="N",
        help="give up after this many consecutive restarts without a newer checkpoint (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=defaults.grace_seconds,
        metavar="S",
        help="seconds that train has to save and exit after SIGTERM or Ctrl-C before it is killed; "
        "a second signal kills it at once (default: %(default)g)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=defaults.stall_seconds,
        metavar="S",
        help="seconds without a heartbeat after which train is killed and restarted (default: "
        "%(default)g)",
    )
    found, rest = parser.parse_known_args(own)
    if rest and rest[0].startswith("-"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest or not command:
        raise UserError(
            f"supervise {' '.join(rest)}".rstrip() + ": the command goes after --; write for "
            "example 'jaxtrain supervise -- train gpt_quickstart'"
        )
    if command[0] != "train":
        raise UserError(
            f"supervise -- {command[0]}: only train is supervised; write for example "
            "'jaxtrain supervise -- train gpt_quickstart'"
        )
    # Errors that `train` would report are reported here, before anything is started.
    whole = argparse.ArgumentParser(prog="jaxtrain")
    add_run_commands(adder(whole))
    train = whole.parse_args(command)
    settings = Supervision(**vars(found))
    return Job(settings, command, run_folder(train.config, train.workdir))


def main(arguments: Sequence[str]) -> int:
    """Run `jaxtrain supervise` with the words after it; return the exit status."""
    try:
        request = parse(arguments)
        command = [sys.executable, "-P", "-m", "jaxtrain", *request.train]
        return supervise(command, request.workdir, settings=request.settings)
    except (UserError, BucketError) as error:
        sys.stderr.write(f"jaxtrain: {error}\n")
        return USER_ERROR if isinstance(error, UserError) else FAILED
