"""Every update rule, tuned by the same small budget on two tasks: a table in history/optimizers.md.

    python -m benchmarks.optimizers [RULE...] [--folder runs/optimizers] [--page FILE]

A rule is trained at five learning rates, a decade to either side of its customary one, on the
quickstart and on ResNet-20, on one device; what differs is the rule and nothing else. A row is
written into the page as soon as it is known, and what stands there already is not trained again
unless it is named; `trials.jsonl` in the folder has every training, and those that it has are not
repeated. Without rows to train, the picture beside the page is drawn anew from its table.
"""

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from benchmarks import side_by_side
from benchmarks.rows import Table
from benchmarks.tuning import Course, Trial, Tuned
from jaxtrain import load_config
from jaxtrain.config.files import write_atomically
from jaxtrain.run.show.figures import Picture
from jaxtrain.training.settings import Config

EDGE, NEVER, COLOUR = "*", "not reached", "#1b3a57"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Around which learning rate a rule is tried.

    Attributes:
      custom: the customary peak.
      why: whose custom it is.
      bindings: what else the rule wants.
      name: of the rule, where the row has another one.
    """

    custom: float
    why: str
    bindings: tuple[str, ...] = ()
    name: str = ""


AVERAGES = ("Schedule.name = 'constant'",)  # it averages instead of decaying
SAM = ("Optimizer.sharpness_radius = 0.05",)  # the paper's
GRIDS = {
    "adam": Grid(1e-3, "arXiv 1412.6980, algorithm 1"),
    "adamw": Grid(1e-3, "adam's"),
    "adam8bit": Grid(1e-3, "adamw's: a drop-in replacement, arXiv 2110.02861"),
    "nadamw": Grid(1e-3, "adam's"),
    "radam": Grid(1e-3, "adam's, as in PyTorch"),
    "lamb": Grid(1e-2, "a matrix moves by 1 % of its length"),
    "adan": Grid(1e-3, "the authors' code"),
    "adam_sage": Grid(1e-3, "adamw's"),
    "lion": Grid(3e-4, "a third of adamw's, arXiv 2302.06675: 3 to 10 times less"),
    "muon": Grid(1e-3, "adamw's, to whose size updates are scaled"),
    "shampoo": Grid(1e-2, "a tenth of implementations for PyTorch, at which it diverges"),
    "soap": Grid(3e-3, "the authors' code"),
    "sophia_h": Grid(1e-3, "about adamw's, the authors' advice"),
    "sophia_g": Grid(1e-3, "about adamw's, the authors' advice"),
    "adafactor": Grid(1e-2, "arXiv 1804.04235: relative steps of at most 1e-2"),
    "schedule_free": Grid(2.5e-3, "the authors' code", AVERAGES),
    "sgd": Grid(1e-1, "arXiv 1512.03385"),
    "lars": Grid(2.0, "trust is 0.001: a matrix moves by 0.2 % of its length"),
    "adagrad": Grid(1e-2, "PyTorch's"),
    "rmsprop": Grid(1e-3, "Hinton's lecture"),
    "sam": Grid(1e-3, "adamw's, which it is here", SAM, name="adamw"),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What rules are tuned on.

    Attributes:
      config: a shipped one.
      bindings: how it is made small.
      target: a held-out loss that most rules come to, nats.
      factors: of a rule's customary learning rate, that it is tried at.
      steps: of a training, a tenth of them warm-up.
    """

    config: str
    bindings: tuple[str, ...]
    target: float
    factors: tuple[float, ...]
    steps: int = 150

    def rates(self, rule: str) -> list[float]:
        """The learning rates that a row of GRIDS is tried at."""
        return [float(f"{GRIDS[rule].custom * factor:.2g}") for factor in self.factors]

    def of(self, rule: str) -> Config:
        """The configuration of a row of GRIDS."""
        grid = GRIDS[rule]
        length = f"Train.steps = {self.steps}", f"Schedule.warmup_steps = {self.steps // 10}"
        name = f"Optimizer.name = '{grid.name or rule}'"
        return load_config(self.config, [*ALIKE, *self.bindings, *length, name, *grid.bindings])


EVERY = 10  # steps between one evaluation and the next
# Decay means another thing to each rule, and does little in so few steps.
ALIKE = ("Optimizer.weight_decay = 0.0", "Schedule.final_fraction = 0.1", "Mesh.fsdp = 1")
TASKS = {
    "quickstart": Task(
        "gpt_quickstart",
        (
            "Train.global_batch_size = 8", "Train.eval_batches = 4",
            "TextData.sequence_length = 64", "Mesh.tensor = 1",
        ),
        target=2.7,
        factors=(0.3, 1.0, 3.0),
    ),
    # A narrow network with batch norms: rates below a rule's custom were best for none tried.
    "ResNet-20": Task(
        "resnet_digits", ("Train.eval_batches = 5",), target=0.3, factors=(1.0, 3.0, 10.0)
    ),
}  # fmt: skip
COLUMNS = ("rate", "steps", "seconds", "loss", "bytes")
HEAD = ("rule", *(f"{task}: {what}" for task in TASKS for what in COLUMNS))
TABLE = Table("benchmarks.optimizers", HEAD, tuple(GRIDS))


class Trials:
    """The trainings that a folder has, each a line with its configuration's digest, and others."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "trials.jsonl"
        self._courses: dict[str, Course] = {}

    def of(self, rule: str, task: str) -> list[Trial]:
        """A rule's, in the order of its grid; trains what is missing."""
        config, rates = TASKS[task].of(rule), TASKS[task].rates(rule)
        digest = hashlib.sha256(config.operative().encode()).hexdigest()[:12]
        key = {"rule": rule, "task": task, "config": digest}
        known = {line["rate"]: line for line in self._lines() if line | key == line}
        missing = [rate for rate in rates if rate not in known]
        if missing:
            if task not in self._courses:
                self._courses[task] = Course(config)
            tuned = Tuned(config, self._courses[task])
            for rate in missing:
                known[rate] = key | dataclasses.asdict(tuned.train(rate, EVERY))
                with self._file.open("a") as stream:
                    stream.write(json.dumps(known[rate]) + "\n")
        fields = [field.name for field in dataclasses.fields(Trial)]
        return [Trial(**{name: known[rate][name] for name in fields}) for rate in rates]

    def _lines(self) -> Iterator[dict]:
        if self._file.exists():
            yield from map(json.loads, self._file.read_text().splitlines())


def cells_of(trials: Mapping[str, Sequence[Trial]]) -> list[str]:
    """What the table says of a rule, after its name: its best rate on each task, by the final loss.

    Args:
      trials: of each task, in the order of the grid.
    """
    cells = []
    for task, some in trials.items():
        best = min(some, key=lambda trial: trial.final)
        edge = EDGE if best in (some[0], some[-1]) else ""
        steps = best.steps_to(TASKS[task].target)
        seconds = "" if steps is None else f"{steps * best.cpu_seconds:.1f}"
        told = str(steps or NEVER), seconds, f"{best.final:.3f}", f"{best.state_bytes:.2f}"
        cells += [f"{best.rate:g}{edge}", *told]
    return cells


def figure(told: Mapping[str, Sequence[str]]) -> Picture:
    """Steps to the loss as bars, one picture a task; what was not reached is an open bar.

    Args:
      told: the cells of each row of the table.
    """
    picture = Picture(8.5, 1.0 + 0.22 * len(told))
    across = picture.subplots(1, len(TASKS), sharey=True)
    width, places = len(COLUMNS), range(len(told))
    for number, (axes, (name, task)) in enumerate(zip(across, TASKS.items(), strict=True)):
        own = [cells[number * width : (number + 1) * width] for cells in told.values()]
        for place, (_, steps, _, loss, _) in zip(places, own, strict=True):
            length, color = (task.steps, "white") if steps == NEVER else (int(steps), COLOUR)
            axes.barh(place, length, color=color, edgecolor=COLOUR, linewidth=0.6)
            axes.text(task.steps * 1.02, place, loss, va="center", fontsize=7)
        axes.text(task.steps * 1.02, -1, "in the end", va="center", fontsize=7)
        axes.set_title(f"{name}: steps to a held-out loss of {task.target:g}", fontsize=10)
        axes.set_xlim(0, task.steps)
        axes.spines[["top", "right"]].set_visible(False)
    across[0].set_yticks(places, list(told), fontsize=8)
    across[0].invert_yaxis()
    return picture


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the rules that are named, or those that the page does not have."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    page = side_by_side.ROOT / "benchmarks/history/optimizers.md"
    TABLE.arguments(parser, folder="runs/optimizers", page=page)
    asked = parser.parse_args(arguments)
    names = TABLE.asked(parser, asked)
    jax.config.update("jax_platforms", "cpu")
    trials = Trials(asked.folder)

    def cells(rule: str) -> list[str]:
        return cells_of({task: trials.of(rule, task) for task in TASKS})

    TABLE.write(asked.page, names, cells)
    told = TABLE.told(asked.page.read_text())
    write_atomically(asked.page.with_suffix(".png"), figure(told).png())


if __name__ == "__main__":
    main()
