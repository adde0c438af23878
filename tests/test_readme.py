"""README and docs: every command and every snippet runs, trees and tables are complete."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.__main__ import main
from jaxtrain.analysis.planning.search import space
from jaxtrain.cli import parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# How a command begins that is not run here -> why.
NOT_RUN = {
    "jaxtrain verify gpt_quickstart": "tests/test_verify.py runs it and reads its table",
    "jaxtrain sweep gpt_quickstart": "tests/test_sweep.py trains one of three runs",
    'jaxtrain train gpt_quickstart --simulate-devices 8 -b "Train.data=@ChatData()"': (
        "tests/test_chat_mode.py trains so, on conversations of its own"
    ),
    "jaxtrain quantize": "tests/test_quantize.py quantizes runs of its own",
    "jaxtrain generate --workdir runs/eight": "of such a run",
    "jaxtrain generate --workdir runs/talks --chat": "tests/test_chat_mode.py talks so",
    "jaxtrain train hf:all-MiniLM-L6-v2": "tests/test_embeddings.py begins on such a body",
    "jaxtrain train attention_only": "tests/test_recipes.py adds the page's model and trains it",
    "jaxtrain verify attention_only": "tests/test_recipes.py adds the model of the page first",
    "jaxtrain train mine/run.gin": "tests/test_recipes.py trains such a model",
    "jaxtrain verify mine/run.gin": "tests/test_recipes.py verifies models imported by a config",
    "jaxtrain train gpt_quickstart --profile": "tests/test_profiling.py trains the steps it takes",
}


def time_series(count: int) -> str:
    """A `.ts` file of `count` sequences: 7 to 28 vectors of 12 values each, 9 classes."""
    random = np.random.default_rng(0)
    lines = ["@timeStamps false", "@classLabel true 1 2 3 4 5 6 7 8 9", "@data"]
    for label in np.arange(count) % 9:
        vectors = random.normal(label, size=(12, random.integers(7, 29)))
        values = (",".join(f"{value:.2f}" for value in row) for row in vectors)
        lines.append(":".join([*values, str(label + 1)]))
    return "\n".join(lines)


# Files of the reader's own that commands name. The `gin file=` blocks of a page are written, too.
TEXT = "\n".join(page.read_text() for page in PAGES[:6])  # long enough for held-out rows
QUESTION = '{"prompt": "import", "choices": ["os", "so"], "answer": 0}\n'
FILES = {
    "README.md": TEXT,
    "train.ts": time_series(90),
    "unknown.ts": time_series(4),
    "questions.jsonl": QUESTION,
}
# What makes a command of the docs short; everything else runs as it is written.
SHORT = ["Train.steps = 2", "Train.eval_batches = 1"]
SHORT_TEXT = [
    *SHORT,
    "GPT.num_layers = 2",
    "GPT.embed_dim = 32",
    "TextData.source = 'README.md'",
]
SHORT_IMAGES = [*SHORT, "ResNet.width = 8"]


def command_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks, those that go on joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


def is_run(line: str) -> bool:
    return not any(line.startswith(start) for start in NOT_RUN)


def shortened(words: list[str]) -> list[str]:
    """The words after `jaxtrain`, with what makes them quick."""
    if words[0] == "plan":
        # Compiling for accelerators has its own tests; a search is as long as the model is deep.
        quick = [] if "cpu:8" in words or "--no-compile" in words else ["--no-compile"]
        return [*words, *quick]
    if words[0] not in ("train", "supervise"):
        return words
    if any(word.endswith(".gin") for word in words):
        bindings = SHORT
    else:
        bindings = SHORT_IMAGES if any("resnet" in word for word in words) else SHORT_TEXT
    if any("Finetune.unfreeze" in word for word in words):  # it waits for steps of the whole run
        bindings = [one for one in bindings if not one.startswith("Train.steps")]
    ours, kept = {binding.partition(" =")[0] for binding in bindings}, []
    for word in words:
        if kept[-1:] == ["-b"] and word.partition("=")[0].strip() in ours:
            kept.pop()
        else:
            kept.append(word)
    return [*kept, *(word for binding in bindings for word in ("-b", binding))]


@pytest.fixture(scope="module")
def trained():
    """What a run depends on -> the folder that it made: pages show the same runs."""
    return {}


def run_once(words: list[str], trained: dict[tuple[str, ...], Path]) -> int:
    """Runs a command; of a run that another page has begun in the same way, copies the folder."""
    at = words.index("--workdir") + 1 if "--workdir" in words else 0
    key = tuple(words[: at - 1] + words[at + 1 :])
    made = ("runs/", "stores/", "tokenizers/")  # by other commands of the page
    if words[0] != "train" or not at or Path(words[at]).exists() or any(
        one in word for one in made for word in key
    ):  # fmt: skip
        return main(words)
    if key in trained:
        shutil.copytree(trained[key], words[at])
        return 0
    trained[key] = Path(words[at]).absolute()
    return main(words)


# Each page trains several runs; test_cli.py runs the same commands in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.stem
)
def test_every_command_of_a_page_runs(page, tmp_path, monkeypatch, capsys, trained):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(space, "POLICIES", ("none", "full"))  # a search prices fewer layouts
    monkeypatch.setattr(space, "KEPT", ())
    monkeypatch.setattr(space, "ON_HOST", ())
    written = re.findall(r"```gin file=([\w.]+)\n(.*?)```", page.read_text(), re.S)
    for name, text in {**FILES, **dict(written)}.items():
        (tmp_path / name).write_text(text)
    for line in filter(is_run, command_lines(page)):
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            expected = {"train": "jaxtrain train", "test": "-m pytest"}[words[0]]
            assert expected in done.stdout
        else:
            assert program == "jaxtrain", f"{page.name}: {line}: run it here, or say in NOT_RUN why"
            status = run_once(shortened(words), trained)
            assert status == 0, (line, capsys.readouterr().err)


def test_what_is_not_run_stands_on_a_page_and_has_a_reason():
    lines = [line for page in PAGES for line in command_lines(page)]
    for start, reason in NOT_RUN.items():
        assert len(reason) > 10, start
        found = [shlex.split(line, comments=True) for line in lines if line.startswith(start)]
        assert found, f"{start}: on no page"
        for program, *words in found:
            if program == "jaxtrain":
                parser().parse_args(words)


def test_shell_commands_stand_in_blocks_that_are_run():
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
        assert len(fences) % 2 == 0, page.name
        languages = {fence.split(" ")[0] for fence in fences}
        # Commands for machines and buckets that are not here: tests/test_launch_page.py and
        # tests/test_bucket_runs.py read those.
        others = {"bash"} if page.name in ("launch.md", "buckets.md") else set()
        assert languages <= {"", "sh", "python", "diff", "gin"} | others, (
            f"{page.name}: {languages}"
        )


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert code.count("bindings=[") == 1
    code = code.replace("bindings=[", f"bindings=[*{SHORT_TEXT!r}, ")  # its own come later, and win
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "eval_loss" in out
    assert "argument_size_in_bytes" in out
    for picture in ("loss.png", "up.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_tree_of_the_tour_is_the_folder():
    tour = (ROOT / "docs" / "design" / "tour.md").read_text()
    tree = re.search(r"```\njaxtrain/\n(.*?)```", tour, re.S).group(1)
    named = set(re.findall(r"^  (\w+(?:\.py|/))", tree, re.M))
    inside = {p.name for p in (ROOT / "jaxtrain").glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{p.parent.name}/" for p in (ROOT / "jaxtrain").glob("*/__init__.py")}
    assert named == inside | folders


def test_the_picture_of_the_chain_is_what_the_imports_are():
    done = subprocess.run([sys.executable, "docs/chain.py"], cwd=ROOT, capture_output=True)
    assert done.stdout == (ROOT / "docs" / "chain.svg").read_bytes(), "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prose_has_at_most_120_columns(page):
    """Code and tables aside, which cannot be folded."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "!", ">"))]
    assert [line for line in lines if len(line) > 120] == []


def test_guides_are_short():
    """Reasons go to docs/design/, measurements to benchmarks/history/; references may be long."""
    guides = {page.stem: page for page in (ROOT / "docs").glob("*.md")}
    lines = {name: len(page.read_text().splitlines()) for name, page in guides.items()}
    assert {n: k for n, k in lines.items() if k > 205 and n not in {"bindings", "formulas"}} == {}


def test_every_config_is_listed():
    listed = (ROOT / "docs" / "configs.md").read_text()
    for config in (ROOT / "configs").glob("*.gin"):
        assert f"`{config.stem}`" in listed, config.stem


def test_the_tour_states_the_length_of_each_file():
    tour = (ROOT / "docs" / "design" / "tour.md").read_text()
    stops = re.findall(r"\]\(\.\./\.\./([\w/.]+)\), (\d+) lines", tour)
    assert 15 <= len(stops) <= 20
    lines = {path: str(len((ROOT / path).read_text().splitlines())) for path, _ in stops}
    assert dict(stops) == lines, "run: make docs"
