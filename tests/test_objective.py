"""Objectives are found by names that nobody else knows; sums become means by their counts."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.training.objectives.classification import Classification
from jaxtrain.training.objectives.next_token import NextToken
from jaxtrain.training.objectives.objective import objective_named

PACKAGE = Path(__file__).parent.parent / "jaxtrain"


def test_an_objective_is_found_by_the_name_in_its_file():
    assert isinstance(objective_named("next_token"), NextToken)
    assert isinstance(objective_named("classification"), Classification)
    with pytest.raises(UserError, match=r"'next_tokens'.* did you mean 'next_token'\?"):
        objective_named("next_tokens")


def test_only_models_and_its_own_file_say_an_objectives_name():
    names = "next_token|classification|masked_token|regression|reconstruction"
    said = re.compile(rf"\"({names})\"|'({names})'")
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    knowing = {str(path) for path in files if said.search((PACKAGE / path).read_text())}
    assert {path for path in knowing if not path.startswith("models/")} == {
        "training/objectives/next_token.py",
        "training/objectives/classification.py",
        "training/objectives/masked_token.py",
        "training/objectives/regression.py",
        "training/objectives/reconstruction.py",
    }


def test_sums_are_divided_by_their_counts_and_some_are_minimised():
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
