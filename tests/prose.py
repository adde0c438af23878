"""Lists words of the project's former dialect in docs, docstrings, comments and messages.

`python tests/prose.py` prints each position with the word to use instead, then subjects of recent
commits that break the rule of the `commit-subject` hook; `make lint` runs it. The
word table is in docs/style.md: the rules below are those of its words that have no other meaning.
"""

import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent

# What is written, as a regular expression -> what to write.
RULES = {
    r"told apart|tells? \w+ apart": "partitioned, distinguished",
    r"kept apart": "separate, masked",
    r"\btold\b|\btells\b": "predicted, reported, passed; logits, predictions",
    r"\bbegun\b": "initialized",
    r"begins? anew": "restarts, is reset",
    r"go(es)? on from": "resumes from",
    r"few bits": "quantized",
    r"end to end": "concatenated, packed",
    r"weighs? nothing": "padding, zero-weight",
    r"(of )?(one|its|their|your)'?s? own folder": "workdir",
    r"\bof one's own\b": "custom, user-provided",
    r"passe[sd]? over": "skips",
    r"\bdear(est)?\b": "expensive",
    r"\bstrangers?\b": "unauthenticated client",
    r"\blifeline\b": "parent-death watch",
    r"\bnobody (asked|waits|reads|knows)\b": "say what happens instead",
    r"\bfor ever\b": "indefinitely",
    r"at one time\b": "at once, concurrently",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bgets? on\b": "progresses",
    r"in good order": "cleanly",
    r"hidden behind": "overlapped with",
    r"fullest moment": "peak memory",
    r"\bas they come\b": "in order",
    r"\bis asked (of|for)\b": "is required",
    r"\bso many(th)?\b": "N",
    r"\brefus(e|es|ed|al|als|ing)\b": "reject, fail with an error, not supported",
    r"\bmistakes?\b": "error",
    r"\bbeside\b": "next to, in addition to, with",
    r"\bbut for\b": "except",
    r"\banew\b": "again",
    r"\bgo(es)? on\b": "continues, resumes",
    r"\bmatrix products\b": "matmuls",
    r"\b(bytes|flops|values|tokens) an? (token|layer|step|microbatch|device|parameter)\b"
    r"(?! se[en])": "per",
    r"(?<=[0-9]) %(?=[\s,.;:)]|$)": "no space before %",
    r"\bquantis|\bnormalis|\binitialis|\bminimis|\bmaximis|\bcolour": "American spelling",
}
_ALL = re.compile("|".join(f"(?:{rule})" for rule in RULES), re.IGNORECASE)


class Finding(NamedTuple):
    """A place in a file, the words found there, and what to write instead."""

    path: str
    line: int
    words: str
    instead: str


def findings(path: Path) -> Iterator[Finding]:
    """Every place of a Markdown or Python file where a rule matches."""
    texts = _prose_of_python(path) if path.suffix == ".py" else _prose_of_markdown(path)
    for first, text in texts:
        for number, line in enumerate(text.splitlines(), first):
            for match in _ALL.finditer(line):
                instead = next(to for rule, to in RULES.items() if _matches(rule, match.group()))
                name = path.relative_to(ROOT).as_posix()
                yield Finding(name, number, match.group(), instead)


def pages() -> list[Path]:
    """The guides and the reference; measurements and the changelog quote old words."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.name != "style.md"]


def modules() -> list[Path]:
    """The package's modules."""
    return sorted((ROOT / "jaxtrain").rglob("*.py"))


def _matches(rule: str, words: str) -> bool:
    return re.fullmatch(rule, words, re.IGNORECASE) is not None


def _prose_of_markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Text without code blocks and code spans, line numbers kept."""
    text = re.sub(
        r"^ *```.*?^ *```",
        lambda m: "\n" * m.group().count("\n"),
        path.read_text(),
        flags=re.S | re.M,
    )
    yield 1, re.sub(r"`[^`\n]*`", "`code`", text)


def _prose_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments, and other strings with a space in them."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`\n]*`", "`code`", node.value)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def subject_rule() -> re.Pattern[str]:
    """The rule of the `commit-subject` hook, which accepted subjects match."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (hook,) = [one for one in hooks if one["id"] == "commit-subject"]
    assert "--negate" in hook["args"]  # the hook fails where the pattern is absent
    return re.compile(hook["entry"], re.MULTILINE | re.DOTALL)


def _recent_subjects() -> list[str]:
    """Subjects of the last 50 commits; empty outside a Git checkout."""
    command = ["git", "log", "--max-count=50", "--format=%h %s"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines()


if __name__ == "__main__":
    places = [one for path in (*pages(), *modules()) for one in findings(path)]
    for one in places:
        print(f"{one.path}:{one.line}: {one.words!r}: write {one.instead}")  # noqa: T201
    print(f"{len(places)} places to reword (docs/style.md, Words)")  # noqa: T201
    for line in _recent_subjects():
        commit, _, subject = line.partition(" ")
        if not subject_rule().search(subject):
            print(f"commit {commit}: {subject!r}: write 'area: imperative', at most 72 characters")  # noqa: T201
