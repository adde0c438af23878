"""Shell completion scripts for bash and zsh, generated from the parsers."""

import argparse
import re
from collections.abc import Iterable, Mapping

SHELLS = ("bash", "zsh")

# Words: those that may follow, of a command or before there is one. Where there are files, names of
# files may follow too.
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


def script(
    shell: str,
    whole: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    configs: Iterable[str],
) -> str:
    """The script for one of SHELLS.

    Args:
      shell: which.
      whole: the parser of the whole line.
      commands: each command's own parser, by its name.
      configs: names that complete where a command takes a CONFIG.
    """
    configs = list(configs)
    variable = "words" if shell == "bash" else "words_"

    def case(pattern: str, words: Iterable[str]) -> str:
        return f'        {pattern}) {variable}="{" ".join(words)}" ;;'

    cases = [case('""', [*commands, *_options(whole)])]
    for name, parser in commands.items():
        if name == "supervise":  # its own options, and after them the words of train
            train = commands["train"]
            cases.append(case(name, ["--", "train", *_options(train), *configs]))
        else:
            named = configs if re.search(r"^  CONFIG", parser.format_help(), re.M) else []
            cases.append(case(name, [*_options(parser), *named]))
    return {"bash": _BASH, "zsh": _ZSH}[shell].format(cases="\n".join(cases))


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The options that a parser's help lists: at the head of a line, before two blanks."""
    heads = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.M)
    return [option for head in heads for option in re.findall(r"(?<!\S)--?[\w-]+", head)]
