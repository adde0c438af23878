"""The options of the commands that train and use runs, and the help that they print."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from jaxtrain.run.completion import SHELLS, script

# Adds a command by its name and what it does.
Add = Callable[[str, str], argparse.ArgumentParser]


def adder(whole: argparse.ArgumentParser) -> Add:
    """What adds commands to a parser, whose `arguments.command` is then the name."""
    added = whole.add_subparsers(required=True, metavar="COMMAND", dest="command")
    commands: dict[str, argparse.ArgumentParser] = {}

    class Completion(argparse.Action):
        """Prints a shell's script, made from all that was added."""

        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            from jaxtrain.config.shipped import shipped_headers

            names = [header.name for header in shipped_headers()]
            sys.stdout.write(script(values, whole, commands, names))
            parser.exit()

    whole.add_argument(
        "--completion",
        action=Completion,
        choices=SHELLS,
        help='complete words in this shell from now on: eval "$(jaxtrain --completion bash)"',
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        described = text[0].upper() + text[1:] + "."
        commands[name] = added.add_parser(name, help=text, description=described)
        return commands[name]

    return add


def add_run_commands(add: Add) -> None:
    """Adds train, eval, generate, evaluate-tasks, predict, inspect, import-hf, export-hf,
    quantize, data, prepare, configs, plot, sweep and supervise."""
    command = add("train", "trains, or continues from the newest checkpoint")
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
    command.add_argument(
        "--verbose", action="store_true", help="print all settings, not only those that are changed"
    )
    add_config_options(command)

    command = add("eval", "evaluates a checkpoint, prints one JSON line")
    _add_checkpoint_options(command)
    add_config_options(command)

    command = add("generate", "prints what a trained language model writes")
    _add_checkpoint_options(command)
    _add_generation_options(command)
    add_config_options(command)

    command = add("evaluate-tasks", "tells how many questions of files a language model answers")
    _add_checkpoint_options(command)
    command.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines with a prompt, and choices and answer, or a target",
    )
    command.add_argument(
        "--delimiter",
        default=" ",
        metavar="TEXT",
        help="between a prompt and a choice or target; a space",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="continuations that are told at one time; %(default)s",
    )
    add_config_options(command)

    command = add("predict", "tells classes, numbers, hidden tokens, text or embeddings")
    _add_checkpoint_options(command)
    command.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a PNG or JPEG file, or a folder of them; a text; a .npz or .csv file of vectors",
    )
    command.add_argument("--top", type=int, default=None, metavar="N", help="classes of each; 3")
    add_config_options(command)

    command = add("inspect", "prints what a checkpoint holds")
    _add_checkpoint_options(command)
    command.add_argument(
        "--verify",
        action="store_true",
        help="read every array and check it against its fingerprint",
    )

    command = add("import-hf", "makes a run of a Hugging Face folder")
    command.add_argument("source", metavar="SRC_DIR", help="config.json and safetensors")
    command.add_argument("--workdir", metavar="DIR", required=True, help="the run's new folder")
    command.add_argument(
        "--simulate-devices", type=int, metavar="N", help="read onto N simulated CPU devices"
    )
    add_config_options(command)

    command = add("export-hf", "makes a Hugging Face folder of a run")
    _add_checkpoint_options(command)
    command.add_argument("--out", metavar="DST_DIR", required=True, help="the new folder")
    command.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the files"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument(
        "--adapter", action="store_true", help="the adapter alone, as PEFT keeps it (LoRA)"
    )
    form.add_argument(
        "--awq", action="store_true", help="4-bit codes, as AutoAWQ keeps them (quantize)"
    )
    add_config_options(command)

    command = add("quantize", "makes a run of a trained one whose weights are in 4 or 8 bits")
    _add_checkpoint_options(command)
    command.add_argument("--out", metavar="DST", required=True, help="the new run's folder")
    command.add_argument(
        "--bits", type=int, choices=[4, 8], default=4, help="of a weight; %(default)s"
    )
    command.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="numbers that share a scale, with 4 bits; 128",
    )
    command.add_argument(
        "--calibrate",
        metavar="FILE",
        help="a text by which weights are scaled first, with 4 bits (AWQ); without it they are "
        "rounded as they are",
    )
    add_config_options(command)

    command = add("data", "opens a config's data: what is known of it, its first examples")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument(
        "--examples", type=int, default=3, metavar="N", help="of the first step; %(default)s"
    )
    command.add_argument(
        "--png",
        metavar="FILE",
        help="draws lengths of documents and frequencies of tokens, or a sheet of images",
    )
    add_config_options(command)

    command = add("prepare", "tokenizes text into a store, which TextData.source then names")
    command.add_argument(
        "source", metavar="SRC", help="text as of TextData.source, or a config that names it"
    )
    command.add_argument(
        "--tokenizer", metavar="T", help="'byte' or a tokenizer.json; the config's"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the store's folder")
    command.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that tokenize; %(default)s"
    )
    add_config_options(command)

    command = add("tokenizer", "trains a byte-level BPE tokenizer on text")
    command.add_argument(
        "source", metavar="SRC", help="text as of TextData.source, or a config that names it"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the folder of its files")
    command.add_argument(
        "--vocab-size", type=int, default=8192, metavar="N", help="tokens at most; %(default)s"
    )
    add_config_options(command)

    add("configs", "lists the shipped configs: what each trains, on which hardware")

    command = add("plot", "compares runs: a table, and their curves in one picture")
    command.add_argument(
        "runs", nargs="+", metavar="RUN", help="the folder of a run, of several, or of a sweep"
    )
    command.add_argument("--png", metavar="FILE", help="draw into this file; plot.png")

    command = add("sweep", "trains a run for each of some settings' values, and compares them")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--workdir", metavar="DIR", required=True, help="holds a folder a run")
    command.add_argument(
        "--simulate-devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    add_config_options(command)

    command = add("supervise", "runs train, restarts it after failures")
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="[OPTIONS] -- train ...")


def _add_generation_options(command: argparse.ArgumentParser) -> None:
    asked = command.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="what it goes on from")
    asked.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"prompt": TEXT}, answered by JSON lines'
    )
    asked.add_argument(
        "--chat",
        action="store_true",
        help="answer the lines of standard input in turn, by the model's chat template",
    )
    command.add_argument("--system", metavar="TEXT", help="of a chat: the system's message")
    command.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="100, in a chat 512, or what fits"
    )
    command.add_argument("--temperature", type=float, metavar="T", help="0.8; 0 is greedy")
    command.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    command.add_argument(
        "--top-p", type=float, metavar="P", help="only the likeliest P of the mass"
    )
    command.add_argument(
        "--min-p", type=float, metavar="P", help="only tokens P times as likely as the likeliest"
    )
    command.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="what logits of tokens that were there are divided by; above 1 repeats less",
    )
    command.add_argument(
        "--beams", type=int, metavar="N", help="search for the likeliest answer with N beams"
    )
    command.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="of beams: their score is divided by length^X; 1",
    )
    command.add_argument(
        "--early-stopping",
        choices=["true", "false", "never"],
        help="of beams: whether N finished ones are enough; never: nor are better ones unlikely; "
        "false",
    )
    command.add_argument(
        "--draft",
        metavar="DIR",
        help="the run of a smaller model that guesses tokens, told many at a time; or 'lookup', "
        "which guesses from the text so far",
    )
    command.add_argument("--guesses", type=int, metavar="N", help="tokens guessed at a time; 4")
    command.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text; may be repeated",
    )
    command.add_argument(
        "--log-probabilities",
        action="store_true",
        help="answer by JSON lines, with tokens and the model's log-probability of each",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="prompts of the file that are answered at one time; %(default)s",
    )
    command.add_argument("--seed", type=int, default=0, metavar="S")


def _add_checkpoint_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workdir", metavar="DIR", required=True, help="a run's folder")
    command.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step; the newest"
    )


def add_config_options(command: argparse.ArgumentParser) -> None:
    """Adds what every command takes that reads a configuration: bindings, and imports."""
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
