"""A budget's plan: its numbers, its table, its rejections."""

import io
import math

import pytest
from rich.console import Console

from jaxtrain import load_config, plan
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.search.budget import (
    bindings_for,
    plan_budget,
    plan_on_target,
    sentences,
    show,
)
from jaxtrain.analysis.planning.textbook.facts import weights_of
from jaxtrain.config.errors import UserError


def printed(budget, width=100):
    console = Console(file=io.StringIO(), width=width)
    show(console, budget)
    return console.file.getvalue()


def test_a_budget_of_1e21():
    budget = plan_budget(1e21)
    assert budget.params == pytest.approx(math.sqrt(1e21 / 120))
    assert 6 * budget.params * budget.tokens == pytest.approx(1e21)
    by_hand = 1.69 + 406.4 / budget.params**0.34 + 410.7 / budget.tokens**0.28
    assert budget.loss == pytest.approx(by_hand)


@pytest.mark.parametrize("compute", [1e18, 1e21, 5e23])
def test_the_model_of_a_budget_has_its_parameters_and_a_batch_for_every_device(compute):
    """By the model's own count, without its two tables; 0.2920 C^0.3271 tokens a batch."""
    budget = plan_budget(compute)
    config = load_config("llama_8b", bindings_for(budget, 64))
    model = config.train.model
    one = sum(math.prod(weight.shape) for weight in weights_of(model) if weight.is_layer)
    assert model.num_layers * one == pytest.approx(budget.params, rel=0.05)
    rows = config.train.global_batch_size
    assert rows % 64 == 0
    assert abs(rows * 4096 - 0.2920 * compute**0.3271) <= 64 * 4096


def test_its_time_is_the_plan_s():
    """The best of a search, for all tokens of the budget."""
    budget, target = plan_budget(1e17), parse_target("h100:1x1")
    found = plan_on_target(budget, target, price=3.0)
    again = plan(found.config, "h100:1x1", compile=False, tokens=budget.tokens)
    assert found.whole_run.days == again.whole_run.days > 0
    assert found.whole_run.dollars == pytest.approx(3 * found.whole_run.device_hours)
    assert found.time.seconds <= 1.01 * min(c.price.seconds for c in found.found.candidates)
    text = " ".join(sentences(budget, found))
    assert f"MFU {found.time.mfu:.1%}" in text
    assert "device-hours" in text


def test_the_table_gives_three_rules_with_formulas_and_sources():
    text = printed(plan_budget(1e21))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    by_rule = {row[0]: row[1:] for row in rows if row}
    # sqrt(1e21 / 120) = 2.887e9; 20 of it.
    assert by_rule["20 tokens per parameter"][:3] == ["2.89 billion", "57.7 billion", "20.0"]
    assert set(by_rule) == {"20 tokens per parameter", "approach 3", "replication"}
    for source in ("2001.08361", "2203.15556", "2404.10102", "C = 6 N D", "410.7 / D^0.28"):
        assert source in text
    assert "Extrapolated" not in text
    assert "Extrapolated" in printed(plan_budget(1e24))
    assert max(len(line) for line in printed(plan_budget(1e24),
                                             width=80).splitlines()) <= 80  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "sentence"),
    [
        (0.0, "--budget=0; use a finite number of training FLOPs above 0, such as 1e21"),
        (-1e21, "--budget=-1e+21; use a finite number of training FLOPs above 0"),
        (math.inf, "--budget=inf; use a finite number of training FLOPs above 0"),
        (1e300, "--budget=1e+300; use at most 1e+28 training FLOPs"),
        (math.nan, "--budget=nan; use a finite number of training FLOPs above 0"),
    ],
)
def test_refusals(compute, sentence):
    with pytest.raises(UserError) as refusal:
        plan_budget(compute)
    assert str(refusal.value).startswith(sentence)
