"""Command-line options of the commands that train and use runs and shell completion."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SHELLS = ("bash", "zsh")

# Words that may follow, of a command or before there is one. Where files are allowed, file names
# may follow too.
_BASH = """\
# Completion of jaxtrain for bash: eval "$(jaxtrain --completion bash)"
_jaxtrain() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*) ;; *) command="$word"; break ;; esac
    done
    case "$command" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ -n "$command" ]; then COMPREPLY+=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _jaxtrain jaxtrain
"""
_ZSH = """\
# Completion of jaxtrain for zsh: eval "$(jaxtrain --completion zsh)"
_jaxtrain() {{
    local command="" words_="" word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$word" in -*) ;; *) command="$word"; break ;; esac
    done
    case "$command" in
{cases}
    esac
    compadd -- ${{=words_}}
    if [ -n "$command" ]; then _files; fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _jaxtrain jaxtrain
"""


def parse_hosts(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of hosts of `--hosts MIN:MAX`.

    Raises:
      UserError: the text is not two numbers, or they are not in order.
    """
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text.strip())
    least, most = map(int, found.groups()) if found else (0, 0)
    if not 1 <= least <= most:
        # Imported here: with the package comes gin, which --help does without.
        from jaxtrain.config.errors import UserError

        raise UserError(f"--hosts {text!r}: write MIN:MAX, such as 2:4, from 1 on")
    return least, most


def completion_script(
    shell: str,
    whole: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    configs: Iterable[str],
) -> str:
    """Return the script for one of SHELLS.

    Args:
      shell: the name of the shell.
      whole: the parser of the whole command line.
      commands: each command's own parser, by its name.
      configs: names that complete a CONFIG argument.
    """
    configs = list(configs)
    variable = "words" if shell == "bash" else "words_"

    def case(pattern: str, words: Iterable[str]) -> str:
        return f'        {pattern}) {variable}="{" ".join(words)}" ;;'

    cases = [case('""', [*commands, *_options_of(whole)])]
    for name, parser in commands.items():
        if name == "supervise":  # its own options, and after them the words of train
            train = commands["train"]
            cases.append(case(name, ["--", "train", *_options_of(train), *configs]))
        else:
            named = configs if re.search(r"^  CONFIG", parser.format_help(), re.M) else []
            cases.append(case(name, [*_options_of(parser), *named]))
    return {"bash": _BASH, "zsh": _ZSH}[shell].format(cases="\n".join(cases))


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options that a parser's help lists: at the start of a line, before two blanks."""
    heads = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.M)
    return [option for head in heads for option in re.findall(r"(?<!\S)--?[\w-]+", head)]


# Adds a command by its name and what it does.
Add = Callable[[str, str], argparse.ArgumentParser]


def adder(whole: argparse.ArgumentParser) -> Add:
    """Return a function that adds commands to a parser, whose `arguments.command` is the name."""
    added = whole.add_subparsers(required=True, metavar="COMMAND", dest="command")
    commands: dict[str, argparse.ArgumentParser] = {}

    class Completion(argparse.Action):
        """Prints a shell's script, made from all that was added."""

        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            from jaxtrain.config.shipped import shipped_headers

            names = [header.name for header in shipped_headers()]
            sys.stdout.write(completion_script(values, whole, commands, names))
            parser.exit()

    whole.add_argument(
        "--completion",
        action=Completion,
        choices=SHELLS,
        help='print a shell completion script: eval "$(jaxtrain --completion bash)"',
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        commands[name] = added.add_parser(name, help=text, description=text)
        return commands[name]

    return add


def add_run_commands(add: Add) -> None:
    """Add train, eval, generate, evaluate-tasks, predict, inspect, import-hf, export-hf,
    quantize, data, prepare, configs, plot, sweep and supervise."""
    command = add("train", "Train a model, or resume from the newest checkpoint.")
    command.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a .gin file or a shipped config (default: the quickstart)",
    )
    command.add_argument(
        "--workdir", metavar="DIR", help="folder of the run (default: runs/CONFIG)"
    )
    command.add_argument(
        "--simulate-devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    command.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0 (detected on TPU VMs, GKE, Slurm and MPI)",
    )
    command.add_argument(
        "--num-processes", type=int, metavar="N", help="number of processes, with --coordinator"
    )
    command.add_argument(
        "--process-id", type=int, metavar="K", help="index of this process, from 0"
    )
    command.add_argument(
        "--profile",
        action="store_true",
        help="profile steps 3 to 6 and print the operations that take longest",
    )
    command.add_argument(
        "--verbose",
        action="store_true",
        help="print all settings, not only those that differ from defaults",
    )
    add_config_options(command)

    command = add("eval", "Evaluate a checkpoint and print one JSON line.")
    _add_checkpoint_options(command)
    add_config_options(command)

    command = add("generate", "Generate text with a trained language model.")
    _add_checkpoint_options(command)
    _add_generation_options(command)
    add_config_options(command)

    command = add("evaluate-tasks", "Evaluate a language model on multiple-choice tasks.")
    _add_checkpoint_options(command)
    command.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines: a prompt, and choices with the answer, or a target",
    )
    command.add_argument(
        "--delimiter",
        default=" ",
        metavar="TEXT",
        help="text between prompt and choice or target (default: a space)",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="continuations per batch (default: %(default)s)",
    )
    add_config_options(command)

    command = add("predict", "Run batch inference on images, texts or feature vectors.")
    _add_checkpoint_options(command)
    command.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="an image or a folder of images, a text, or a .npz or .csv file of vectors",
    )
    command.add_argument(
        "--top", type=int, default=None, metavar="N", help="classes to print (default: 3)"
    )
    add_config_options(command)

    command = add("inspect", "Print the contents of a checkpoint.")
    _add_checkpoint_options(command)
    command.add_argument(
        "--verify",
        action="store_true",
        help="read every array and compare it with its fingerprint",
    )

    command = add("import-hf", "Import a Hugging Face checkpoint as a run.")
    command.add_argument("source", metavar="SRC_DIR", help="a Hugging Face folder, or a GGUF file")
    command.add_argument("--workdir", metavar="DIR", required=True, help="new folder for the run")
    command.add_argument(
        "--simulate-devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    add_config_options(command)

    command = add("export-hf", "Export a run as a Hugging Face folder.")
    _add_checkpoint_options(command)
    command.add_argument("--out", metavar="DST_DIR", required=True, help="new folder to write")
    command.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the tensors"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument(
        "--adapter", action="store_true", help="write only the LoRA adapter, in PEFT's format"
    )
    form.add_argument(
        "--awq",
        action="store_true",
        help="write 4-bit weights of a quantized run in AutoAWQ's format",
    )
    add_config_options(command)

    command = add("quantize", "Quantize the weights of a trained run to 4 or 8 bits.")
    _add_checkpoint_options(command)
    command.add_argument("--out", metavar="DST", required=True, help="folder of the new run")
    command.add_argument(
        "--bits", type=int, choices=[4, 8], default=4, help="bits per weight (default: %(default)s)"
    )
    command.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="weights that share a scale, with 4 bits (default: 128)",
    )
    command.add_argument(
        "--calibrate",
        metavar="FILE",
        help="calibration text for AWQ, with 4 bits; without it, weights are rounded to nearest",
    )
    add_config_options(command)

    command = add("data", "Describe the data of a config and print its first examples.")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument(
        "--examples",
        type=int,
        default=3,
        metavar="N",
        help="examples of the first step to print (default: %(default)s)",
    )
    command.add_argument(
        "--png",
        metavar="FILE",
        help="draw document lengths and token frequencies, or a sheet of images",
    )
    add_config_options(command)

    command = add("prepare", "Tokenize text into a token store for TextData.source.")
    command.add_argument(
        "source", metavar="SRC", help="text (as in TextData.source), or a config that names it"
    )
    command.add_argument(
        "--tokenizer", metavar="T", help="'byte' or a tokenizer.json (default: the config's)"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="folder of the token store")
    command.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="worker processes (default: %(default)s)",
    )
    add_config_options(command)

    command = add("tokenizer", "Train a byte-level BPE tokenizer.")
    command.add_argument(
        "source", metavar="SRC", help="text (as in TextData.source), or a config that names it"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="folder of the tokenizer")
    command.add_argument(
        "--vocab-size",
        type=int,
        default=8192,
        metavar="N",
        help="largest vocabulary size (default: %(default)s)",
    )
    add_config_options(command)

    command = add("init", "Write a starter project: config, model, Slurm script, README.")
    command.add_argument("folder", metavar="DIR", help="folder to write; created if needed")

    add("configs", "List the shipped configs with their hardware.")

    command = add("plot", "Compare runs in a table and a figure.")
    command.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, of several runs, or of a sweep"
    )
    command.add_argument("--png", metavar="FILE", help="draw into this file (default: plot.png)")
    command.add_argument(
        "--html", metavar="FILE", help="write a self-contained page, in place of plot.png"
    )

    command = add("sweep", "Train one run for each combination of setting values.")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument(
        "--workdir", metavar="DIR", required=True, help="folder that holds one folder per run"
    )
    command.add_argument(
        "--simulate-devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    add_config_options(command)

    command = add("supervise", "Run train and restart it after failures.")
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="[OPTIONS] -- train ...")


def _add_generation_options(command: argparse.ArgumentParser) -> None:
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompts.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"prompt": TEXT}; the answers are JSON lines'
    )
    prompts.add_argument(
        "--chat",
        action="store_true",
        help="chat: answer lines of standard input, with the model's chat template",
    )
    command.add_argument("--system", metavar="TEXT", help="system message of the chat")
    command.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest answer in tokens (default: 100; in a chat 512)",
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: 0.8)"
    )
    command.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K most probable tokens"
    )
    command.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="nucleus sampling: the most probable tokens with total probability P",
    )
    command.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="only tokens at least P times as probable as the most probable",
    )
    command.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="penalty for tokens seen so far: divides positive logits and multiplies negative "
        "ones; above 1 reduces repetition",
    )
    command.add_argument("--beams", type=int, metavar="N", help="beam search with N beams")
    command.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="beam search: divide scores by length^X (default: 1)",
    )
    command.add_argument(
        "--early-stopping",
        choices=["true", "false", "never"],
        help="beam search: stop at N finished beams (true), when better ones are unlikely (false, "
        "the default), or only when none is possible (never)",
    )
    command.add_argument(
        "--draft",
        metavar="DIR",
        help="speculative decoding: the run of a smaller draft model, or 'lookup' to draft from "
        "the text so far",
    )
    command.add_argument(
        "--guesses", type=int, metavar="N", help="draft tokens per step (default: 4)"
    )
    command.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    command.add_argument(
        "--log-probabilities",
        action="store_true",
        help="print JSON lines with tokens and log-probabilities",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="prompts per batch (default: %(default)s)",
    )
    command.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed for sampling (default: %(default)s)",
    )


def _add_checkpoint_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workdir", metavar="DIR", required=True, help="folder of the run")
    command.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)"
    )


def add_config_options(command: argparse.ArgumentParser) -> None:
    """Add the options of all commands that read a configuration: bindings and imports."""
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
        help="allow import lines of the .gin file to run your own Python modules",
    )
