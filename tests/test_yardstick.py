"""What each objective's metrics are measured in and compared with; values by hand."""

import json

import jax
import pytest

import jaxtrain.training.objectives
from jaxtrain.cli import main
from jaxtrain.config.registry import Named
from jaxtrain.models import BERT, GPT, MLP, LeNet
from jaxtrain.run.metrics.compare import Run, figure
from jaxtrain.run.metrics.files import lines_of
from jaxtrain.run.show.figures import loss_figure
from jaxtrain.training.objectives.distillation import Distillation
from jaxtrain.training.objectives.objective import Objective, objective_named
from jaxtrain.training.objectives.preference import DPO

TEXT = {"unigram_entropy": 3.25, "documents": 7}
LN_2, LN_10, LN_4 = 0.6931, 2.3026, 1.3863  # of a table of logarithms


def sentence(objective, model, values, facts=TEXT):
    return objective.yardstick(model, facts).sentence({f"eval_{k}": v for k, v in values.items()})


def test_a_language_model_is_held_against_its_text():
    for name in ("next_token", "multi_token"):
        assert sentence(objective_named(name), GPT(), {"loss": 2.5}) == (
            "Held-out loss 2.5000 nats a token, against the text's unigram entropy 3.2500"
        )
    masked = objective_named("masked_token")
    assert sentence(masked, BERT(), {"loss": 2.5}) == (
        "Held-out loss 2.5000 nats a token, against the text's unigram entropy 3.2500"
    )
    assert sentence(masked, BERT(), {"loss": 2.5}, facts={}) is None


def test_a_preference_is_held_against_the_reference_and_not_the_text():
    assert sentence(DPO(), GPT(), {"loss": 0.5, "margin": 1.0, "accuracy": 1.0}) == (
        f"Held-out loss 0.5000 nats a pair, against the reference model {LN_2}"
    )


def test_of_distillation_the_cross_entropy_is_held_against_the_text():
    assert sentence(Distillation(), GPT(), {"loss": 0.5, "cross_entropy": 2.5}) == (
        "Held-out cross entropy 2.5000, against the text's unigram entropy 3.2500"
    )


def test_classes_are_held_against_a_guess_and_numbers_against_nothing():
    assert sentence(objective_named("classification"), LeNet(num_classes=10), {"loss": 0.5}) == (
        f"Held-out loss 0.5000 nats an example, against a uniform guess among 10 classes {LN_10}"
    )
    bert = BERT(objective="token_classification", num_classes=4)
    assert sentence(objective_named("token_classification"), bert, {"loss": 0.5}) == (
        f"Held-out loss 0.5000 nats a label, against a uniform guess among 4 classes {LN_4}"
    )
    assert sentence(objective_named("regression"), MLP(), {"loss": 0.5}) is None


MODELS = {
    "classification": LeNet(),
    "auxiliary_classification": LeNet(),
    "regression": MLP(),
    "reconstruction": MLP(),
    "token_classification": BERT(objective="token_classification"),
}


@pytest.mark.parametrize("name", sorted(Named(Objective, jaxtrain.training.objectives)))
def test_every_objective_draws_metrics_that_it_has(name):
    objective = objective_named(name)
    yardstick = objective.yardstick(MODELS.get(name, GPT()), TEXT)
    drawn = {"loss", *yardstick.metrics}
    assert {one.metric for one in yardstick.baselines} <= drawn
    if hasattr(objective, "own"):  # of an objective over hidden states: its sums by name
        assert drawn <= {*objective.own, "loss"}
    if name != "next_token":  # each says more than the default of all
        assert yardstick != Objective.yardstick(objective, GPT(), {})


CONFIG = """
Train.model = @GPT()
Train.data = @PreferenceData()
Train.objective = @DPO()
Train.steps = 2
Train.log_every = 1
Train.global_batch_size = 8
GPT.num_layers = 1
GPT.embed_dim = 32
GPT.num_heads = 2
GPT.vocab_size = 256
GPT.context_length = 64
PreferenceData.source = 'pairs.jsonl'
PreferenceData.sequence_length = 64
Precision.compute = 'float32'
"""


@pytest.mark.slow
def test_a_run_of_preferences_ends_and_is_drawn_with_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": "No."} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "run.gin").write_text(CONFIG)
    count = ["--simulate-devices", str(jax.device_count())]
    assert main(["train", "run.gin", "--workdir", "run", *count]) == 0
    out = capsys.readouterr().out
    assert f"nats a pair, against the reference model {LN_2}" in out
    assert "nats a token" not in out

    lines = lines_of(tmp_path / "run")
    panels = loss_figure(lines, DPO().yardstick(GPT(), TEXT)).axes
    names = [axes.get_ylabel() for axes in panels]
    assert names == ["loss (nats a pair)", "accuracy", "margin"]
    # Without the text's entropy of 3.25 the scale is that of the losses, from 0.69 on.
    assert panels[0].get_ylim()[1] < 1
    of_plot = [axes.get_ylabel() for axes in figure([Run("run", lines)]).axes]
    assert of_plot == ["loss", "accuracy", "margin", "learning rate"]
