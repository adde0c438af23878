"""The options of every command, and the help that they print."""

import argparse
from collections.abc import Callable, Mapping

Run = Callable[[argparse.Namespace], int]


def parser(commands: Mapping[str, Run]) -> argparse.ArgumentParser:
    """The parser of the whole command line; a parsed command is `arguments.run`.

    Args:
      commands: what each command runs.
    """
    whole = argparse.ArgumentParser(
        prog="jaxtrain", description="Trains models over device meshes."
    )
    added = whole.add_subparsers(required=True, metavar="COMMAND")

    command = _add(added, "train", commands, "trains, or continues from the newest checkpoint")
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
    command.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 of several listens; found by itself on TPU VMs, GKE, Slurm and MPI",
    )
    command.add_argument(
        "--num-processes", type=int, metavar="N", help="processes of the run, with --coordinator"
    )
    command.add_argument(
        "--process-id", type=int, metavar="K", help="which of them this is, from 0"
    )
    command.add_argument(
        "--profile",
        action="store_true",
        help="trace steps 3 to 6 of this start and print what takes longest in them",
    )
    _add_config_options(command)

    command = _add(added, "eval", commands, "evaluates the newest checkpoint, prints one JSON line")
    command.add_argument("--workdir", metavar="DIR", required=True)
    _add_config_options(command)

    command = _add(added, "generate", commands, "prints a sample from a trained language model")
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

    command = _add(added, "inspect", commands, "prints what a checkpoint holds")
    command.add_argument("--workdir", metavar="DIR", required=True)
    command.add_argument(
        "--verify",
        action="store_true",
        help="read every array and check it against its fingerprint",
    )

    command = _add(added, "verify", commands, "proves a config, shrunk, on 8 simulated devices")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--json", metavar="FILE", help="write the table into this file too")
    _add_config_options(command)

    command = _add(added, "plan", commands, "compiles a config's train step for machines not there")
    command.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a .gin file or shipped config"
    )
    command.add_argument(
        "--target",
        metavar="TARGET",
        help="v5p:4x4x4 (chips; with Mesh.dcn of a slice), h100:2x8 (hosts x GPUs), cpu:8",
    )
    command.add_argument("--search", action="store_true", help="find the best mesh for the target")
    command.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="closed forms alone: an estimate that needs no compiler",
    )
    command.add_argument(
        "--budget", type=float, metavar="FLOPS", help="the compute-optimal model and its tokens"
    )
    command.add_argument("--json", metavar="FILE", help="write everything into this file too")
    command.add_argument(
        "--png", metavar="FILE", help="draw memory, time and traffic into this file"
    )
    _add_config_options(command)

    command = _add(added, "timeline", commands, "simulates the pipeline schedule and draws it")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--png", metavar="FILE", help="draw the schedule into this file")
    _add_config_options(command)

    command = _add(added, "supervise", commands, "runs train, restarts it after failures")
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="[OPTIONS] -- train ...")

    _add(added, "doctor", commands, "prints versions, devices, extras")
    return whole


def _add(added, name: str, commands: Mapping[str, Run], text: str) -> argparse.ArgumentParser:  # noqa: ANN001
    command = added.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=commands[name])
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
