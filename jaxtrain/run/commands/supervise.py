"""The command `supervise`: its options, the command after `--`, and the run's folder."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from jaxtrain.config.buckets import AnyPath, BucketError
from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts import FAILED, USER_ERROR
from jaxtrain.run.attempts.elastic import Elastic, read_layouts, supervise_elastic
from jaxtrain.run.attempts.folder import QUICKSTART, run_folder
from jaxtrain.run.attempts.supervise import Supervision, supervise
from jaxtrain.run.commands.options import add_run_commands, adder, parse_hosts


@dataclasses.dataclass(frozen=True)
class Job:
    """Arguments of `jaxtrain supervise`.

    Attributes:
      settings: from the options.
      train: the words after `--`, "train" first.
      workdir: the run's folder, as `train` will use it.
      elastic: the numbers of hosts; None: those that the command starts with.
      options: of `train`, parsed.
    """

    settings: Supervision
    train: list[str]
    workdir: AnyPath
    elastic: Elastic | None
    options: argparse.Namespace


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
    _add_elastic_options(parser)
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
    of_hosts = {name: vars(found).pop(name) for name in ("hosts", *_ELASTIC)}
    settings = Supervision(**vars(found))
    elastic = _elastic(of_hosts, train)
    return Job(settings, command, run_folder(train.config, train.workdir), elastic, train)


_ELASTIC = ("name", "address", "notice_seconds", "wait_seconds")


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "elastic runs", "one supervisor a host, the same command on all; --workdir is shared"
    )
    group.add_argument(
        "--hosts",
        metavar="MIN:MAX",
        help="resume without lost hosts while MIN are left, and take them in at the next save; the "
        "config is written for MAX ('jaxtrain plan --hosts' prints the layouts)",
    )
    group.add_argument(
        "--host-name", dest="name", metavar="NAME", help="unique name (default: the system's)"
    )
    group.add_argument(
        "--address", metavar="HOST", help="where other hosts reach this one (default: by its name)"
    )
    group.add_argument(
        "--notice-seconds",
        type=float,
        metavar="S",
        help=f"without a heartbeat, then a host is lost; {Elastic.notice_seconds:g}",
    )
    group.add_argument(
        "--wait-seconds",
        type=float,
        metavar="S",
        help=f"with fewer than MIN hosts, then it gives up; {Elastic.wait_seconds:g}",
    )


def _elastic(options: dict[str, Any], train: argparse.Namespace) -> Elastic | None:
    """Return the options of an elastic run; None without --hosts.

    Raises:
      UserError: they are wrong, or without --hosts, or `train` names its cluster.
    """
    given = {name: options[name] for name in _ELASTIC if options[name] is not None}
    if options["hosts"] is None:
        if given:
            words = [f"--{n.replace('_', '-').replace('name', 'host-name')}" for n in given]
            raise UserError(f"supervise {' '.join(words)}: only with --hosts MIN:MAX")
        return None
    least, most = parse_hosts(options["hosts"])
    for option in ("coordinator", "num_processes", "process_id"):
        if getattr(train, option) is not None:
            raise UserError(
                f"supervise --hosts sets --{option.replace('_', '-')} itself; leave it out"
            )
    return Elastic(least=least, most=most, **given)


def main(arguments: Sequence[str]) -> int:
    """Run `jaxtrain supervise` with the words after it; return the exit status."""
    try:
        request = parse(arguments)
        command = [sys.executable, "-P", "-m", "jaxtrain", *request.train]
        if request.elastic is None:
            return supervise(command, request.workdir, settings=request.settings)
        train = request.options
        bindings = list(train.gin_bindings)
        if train.simulate_devices is not None:
            bindings.append(f"Mesh.simulated_devices = {train.simulate_devices}")
        given = {"config": train.config or QUICKSTART, "bindings": bindings}
        given["allow_imports"] = train.allow_imports
        words = read_layouts(request.elastic, given)
        return supervise_elastic(
            command, request.workdir, request.elastic, words, settings=request.settings
        )
    except (UserError, BucketError) as error:
        sys.stderr.write(f"jaxtrain: {error}\n")
        return USER_ERROR if isinstance(error, UserError) else FAILED
