"""Mutation check: exchange one operator of the core at a time and see whether a fast test fails.

`make mutation SAMPLE=28 SEED=0` draws operators at random from CORE. For each it runs the fast
tests of the nine files nearest to its module, the quickest first, in a copy of the project, until
one fails (the mutant is killed); a file that fails without a mutant too is passed over. A mutant
that no test kills survives: either the program still computes the same (it is equivalent), or a
test is missing. Prints what became of each.
"""

import argparse
import ast
import csv
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CORE = (
    "jaxtrain/parallel", "jaxtrain/training/step.py", "jaxtrain/training/setup.py",
    "jaxtrain/training/transforms.py", "jaxtrain/training/compose.py",
    "jaxtrain/training/layouts.py", "jaxtrain/training/guard.py",
    "jaxtrain/training/reduction.py", "jaxtrain/training/pipeline",
    "jaxtrain/training/exchange", "jaxtrain/run/checkpoint", "jaxtrain/nn/attention",
)  # fmt: skip
# A boundary for a comparison, the opposite for the rest: the errors that people make.
EXCHANGED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"),
    ast.Or: ("or", "and"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
}  # fmt: skip
TEST_FILES = 9  # at most so many for one mutant
TIMEOUT = 600  # seconds of one test file; a mutant that does not end is killed


class Mutant(NamedTuple):
    """One operator of a file, between two operands, and what takes its place."""

    file: Path
    start: int  # offset of the operator's first character
    old: str
    new: str

    def apply(self) -> str:
        """Return the source of the file with the operator exchanged."""
        text = self.file.read_text()
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def __str__(self) -> str:
        text = self.file.read_text()
        number = text.count("\n", 0, self.start) + 1
        line = text.splitlines()[number - 1].strip()
        return f"{self.file.relative_to(ROOT)}:{number}: {self.old} -> {self.new}: {line}"


def operators(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    """Yield every operator with the operand before and the operand after it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            yield node.op, node.left, node.right
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield node.op, left, right
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            yield from zip(node.ops, operands, operands[1:], strict=False)


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield a mutant for every operator of a file that has an exchange."""
    text = file.read_text()
    if not text.isascii():  # the parser counts bytes
        return
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for operator, left, right in operators(ast.parse(text)):
        if type(operator) in EXCHANGED:
            old, new = EXCHANGED[type(operator)]
            begin = starts[left.end_lineno - 1] + left.end_col_offset
            end = starts[right.lineno - 1] + right.col_offset
            found = re.search(rf"(?<![\w*/<>=!]){re.escape(old)}(?![\w*/<>=])", text[begin:end])
            if found:
                yield Mutant(file, begin + found.start(), old, new)


def names(module: str) -> re.Pattern:
    """Return the pattern of an import of a module."""
    package, _, name = module.rpartition(".")
    return re.compile(
        rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b"
        rf"|from {re.escape(package)} import \([^)]*\b{name}\b"
    )


def importers_of(module: str, folder: str, pattern: str) -> list[Path]:
    """Return the files of a folder that import a module."""
    return [
        path
        for path in sorted((ROOT / folder).rglob(pattern))
        if names(module).search(path.read_text())
    ]


def module_of(file: Path) -> str:
    """Return a/b/c.py as a.b.c."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def tests_of(module: str, seconds: dict[str, float]) -> list[str]:
    """Return the test files nearest to a module.

    First those named after it, then those that import it, then those named after its package, then
    those named after its importers or importing them; of each kind the quickest first. A file that
    is recorded with slow tests alone is none.
    """
    package, own = module.split(".")[-2:]
    chosen: list[str] = []

    def choose(paths: set[Path], most: int) -> None:
        files = {path.name for path in paths if seconds.get(path.name, 60.0) > 0} - {*chosen}
        chosen.extend(sorted(files, key=lambda file: seconds.get(file, 60.0))[:most])

    for named in (f"test_{package}_{own}.py", f"test_{own}.py"):
        choose({*(ROOT / "tests").glob(named)}, 1)
    choose(set(importers_of(module, "tests", "test_*.py")), TEST_FILES)
    choose({*(ROOT / "tests").glob(f"test_{package}.py")}, 1)
    choose({*(ROOT / "tests").glob(f"test_*{package}*.py")}, TEST_FILES // 2)
    modules, seen = [module], {module}
    while modules and len(chosen) < TEST_FILES:
        above = {
            module_of(path) for one in modules for path in importers_of(one, "jaxtrain", "*.py")
        }
        modules = sorted(above - seen)
        seen |= above
        named = {ROOT / "tests" / f"test_{one.split('.')[-1]}.py" for one in modules}
        choose({path for path in named if path.exists()}, 3)
        choose({path for one in modules for path in importers_of(one, "tests", "test_*.py")}, 3)
    return chosen[:TEST_FILES]


def read_seconds() -> dict[str, float]:
    """Return test file -> recorded seconds of its fast part: 0 only where it has none."""
    seconds: dict[str, float] = defaultdict(float)
    with (ROOT / "tests" / "durations.csv").open() as file:
        for row in csv.DictReader(file):
            seconds[row["file"]] += (0.01 + float(row["seconds"])) * (row["part"] == "fast")
    return seconds


def fails(folder: Path, test: str) -> bool:
    """Whether the fast part of a test file fails in a copy of the project."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        f"tests/{test}",
    ]
    # Programs that a mutant does not change are compiled once.
    cache = {"JAXTRAIN_TEST_CACHE": str(folder / ".compiled")}
    environment = os.environ | cache | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: the file has no fast test


def passes(folder: Path, test: str, known: dict[str, bool]) -> bool:
    """Whether a test file passes without a mutant; `known` keeps what was found."""
    if test not in known:
        known[test] = not fails(folder, test)
        if not known[test]:
            sys.stdout.write(f"{test} fails without a mutant: passed over\n")
    return known[test]


def files_of(place: str) -> list[Path]:
    """Return the files of a place of CORE.

    Raises:
      FileNotFoundError: if there is none.
    """
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"CORE names {place}, which has no file")
    return files


def copy_project(folder: Path) -> None:
    """Copy every tracked file."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def killer_of(
    mutant: Mutant, folder: Path, seconds: dict[str, float], known: dict[str, bool]
) -> str | None:
    """Return the test file that fails with a mutant alone, or None if it survives."""
    name = mutant.file.relative_to(ROOT)
    for test in tests_of(module_of(mutant.file), seconds):
        try:
            (folder / name).write_text(mutant.apply())
            failed = fails(folder, test)
        finally:
            shutil.copyfile(mutant.file, folder / name)
        if failed and passes(folder, test, known):
            return test
    return None


def main(sample: int, seed: int) -> None:
    """Draw mutants, print what became of each, and the share that is killed."""
    every = [mutant for place in CORE for file in files_of(place) for mutant in mutants_of(file)]
    drawn = random.Random(seed).sample(every, min(sample, len(every)))
    killed, seconds, known = 0, read_seconds(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        for mutant in drawn:
            killer = killer_of(mutant, folder, seconds, known)
            killed += killer is not None
            sys.stdout.write(f"{'killed by ' + killer if killer else 'SURVIVED'}: {mutant}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{killed} of {len(drawn)} killed, of {len(every)} operators\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
