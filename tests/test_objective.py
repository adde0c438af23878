"""Objectives are found by names that nobody else knows; sums become means by their counts."""

import math
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.training.objectives.classification import Classification
from jaxtrain.training.objectives.language_modeling import MultiToken, NextToken
from jaxtrain.training.objectives.objective import objective_named
from jaxtrain.training.objectives.preference import DPO

PACKAGE = Path(__file__).parent.parent / "jaxtrain"


def test_an_objective_is_found_by_the_name_in_its_file():
    assert isinstance(objective_named("next_token"), NextToken)
    assert isinstance(objective_named("classification"), Classification)
    with pytest.raises(UserError, match=r"'next_tokens'.*did you mean 'next_token'\?"):
        objective_named("next_tokens")


OWN = """
import dataclasses
from typing import ClassVar

from jaxtrain.config import configurable
from jaxtrain.models import GPT
from jaxtrain.training.objectives.language_modeling import NextToken


class Calm(NextToken):
    name: ClassVar[str] = "calm"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CalmGPT(GPT):
    objective: ClassVar[str] = "calm"
"""

ASKS = """
from jaxtrain.config.errors import UserError
from jaxtrain.training.objectives.objective import objective_named
from jaxtrain.training.settings import load_config

try:
    objective_named("calm")
except UserError as error:
    print(error)
config = load_config("run.gin", allow_imports=True)
print(type(config.train.task).__name__, objective_named("calm") is config.train.task)
"""


def test_one_outside_the_package_is_found_once_its_module_is_imported(tmp_path):
    """In a process of its own: an objective is known until the process ends."""
    (tmp_path / "own_objective.py").write_text(OWN)
    (tmp_path / "run.gin").write_text(
        "import own_objective\nTrain.model = @CalmGPT()\nTrain.data = @TextData()\n"
        "Train.steps = 2\nTrain.global_batch_size = 8\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ASKS], capture_output=True, text=True, cwd=tmp_path
    )
    before, after = done.stdout.splitlines()
    assert "objective 'calm': there are auxiliary_classification, " in before
    assert "write `import my_module` into the .gin file and pass --allow-imports" in before
    assert after == "Calm True", done.stderr


def test_only_models_and_its_own_file_say_an_objectives_name():
    names = "next_token|multi_token|classification|masked_token|regression|reconstruction"
    said = re.compile(rf"\"({names})\"|'({names})'")
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    knowing = {str(path) for path in files if said.search((PACKAGE / path).read_text())}
    assert {path for path in knowing if not path.startswith("models/")} == {
        "training/objectives/language_modeling.py",
        "training/objectives/classification.py",
        "training/objectives/regression.py",
    }


def test_sums_are_divided_by_their_counts_and_some_are_minimized():
    objective = NextToken()
    sums = {"loss": jnp.array(6.0), "auxiliary_loss": jnp.array(4.0), "router_load": jnp.array(8.0)}
    counts = {"weight": jnp.array(2.0), "tokens": jnp.array(8.0)}
    assert objective.means(sums, counts) == {"loss": 3, "auxiliary_loss": 0.5, "router_load": 1}
    scales = {name: 1 / count for name, count in counts.items()}
    assert objective.total(sums, scales) == 3.5
    assert objective.total({"loss": sums["loss"]}, scales) == 3
    # A batch in which nothing counts has a loss of 0, not of 0 / 0.
    nothing = {name: jnp.zeros(()) for name in counts}
    assert objective.means({"loss": jnp.zeros(())}, nothing) == {"loss": 0}


def test_of_held_out_examples_each_own_mean_is_told_and_the_layers_are_not():
    class Told(NextToken):
        """With a metric of its own."""

        name = "told"
        own = ("loss", "accuracy")

    sums = {"loss": 6.0, "accuracy": 1.0, "auxiliary_loss": 4.0, "weight": 2.0, "tokens": 8.0}
    expected = {"eval_loss": 3.0, "eval_accuracy": 0.5, "eval_perplexity": math.exp(3)}
    assert Told().evaluation(sums) == pytest.approx(expected)
    images = {"loss": 6.0, "accuracy": 1.0, "weight": 2.0}
    assert Classification().evaluation(images) == {"eval_loss": 3.0, "eval_accuracy": 0.5}


def test_rows_further_on_end_with_their_documents():
    row = {"inputs": [1, 2, 3, 4, 5, 6, 0], "targets": [2, 3, 9, 5, 6, 9, 0],
           "loss_mask": [1, 1, 0, 1, 0.5, 0, 0], "segment_ids": [1, 1, 1, 2, 2, 2, 0]}  # fmt: skip
    fields = {name: jnp.array([values]) for name, values in row.items()}
    objective = MultiToken(further_tokens=2)
    batch = objective.in_order(Batch(**fields))
    assert objective.in_order(batch) is batch
    one, two = batch.further
    assert one.inputs[0, :2].tolist() == [2, 3]
    assert one.segment_ids[0].tolist() == [1, 1, 0, 2, 2, 0, 0]
    assert one.loss_mask[0].tolist() == [1, 0, 0, 0.5, 0, 0, 0]
    assert one.targets[0, [0, 3]].tolist() == [3, 6]
    assert two.segment_ids[0].tolist() == [1, 0, 0, 2, 0, 0, 0]
    # Of rows that are one text, and shorter than modules look.
    [only] = MultiToken().in_order(Batch(*(x[:, :1] for x in list(fields.values())[:3]))).further
    assert only.loss_mask.tolist() == [[0]]
    assert only.segment_ids is None


def test_modules_that_an_objective_does_not_train_are_refused():
    model = DeepSeek(predicted_tokens=2)
    assert not list(objective_named(model.objective).of(model).validate_model(model))
    [said] = DPO().validate_model(model)
    assert said.startswith("DeepSeek.predicted_tokens=2, but the objective 'preference' trains no")


def test_a_check_with_its_name_of_0_2_0_is_not_left_out_silently():
    with pytest.raises(TypeError, match="Mine.refuse_model is called validate_model now: rename"):
        type("Mine", (NextToken,), {"refuse_model": lambda self, model: iter(())})
