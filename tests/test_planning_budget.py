"""A budget's plan: its numbers, its table, its refusals."""

import io
import math

import pytest
from rich.console import Console

from jaxtrain.analysis.planning.budget import plan_budget, show
from jaxtrain.config.errors import UserError


def printed(budget, width=100):
    console = Console(file=io.StringIO(), width=width)
    show(console, budget)
    return console.file.getvalue()


def test_a_budget_of_1e21():
    budget = plan_budget(1e21, peak_flops=989e12, devices=64)
    assert budget.params == pytest.approx(math.sqrt(1e21 / 120))
    assert 6 * budget.params * budget.tokens == pytest.approx(1e21)
    by_hand = 1.69 + 406.4 / budget.params**0.34 + 410.7 / budget.tokens**0.28
    assert budget.loss == pytest.approx(by_hand)
    assert budget.device_hours == pytest.approx(1e21 / (0.4 * 989e12) / 3600)
    assert budget.days == pytest.approx(budget.device_hours / 64 / 24)


def test_without_a_device_there_is_no_time():
    known = plan_budget(1e21, peak_flops=989e12, devices=None)
    assert known.days is None
    assert known.device_hours is not None
    for devices in (None, 8):
        unknown = plan_budget(1e21, peak_flops=None, devices=devices)
        assert (unknown.days, unknown.device_hours) == (None, None)
    assert "name a target" in printed(unknown)


def test_twice_the_utilisation_takes_half_the_time():
    slow = plan_budget(1e21, peak_flops=1e15, devices=8, mfu=0.25)
    fast = plan_budget(1e21, peak_flops=1e15, devices=8, mfu=0.5)
    assert slow.days == pytest.approx(2 * fast.days)


def test_the_table_gives_three_rules_with_formulas_and_sources():
    text = printed(plan_budget(1e21, peak_flops=989e12, devices=64))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    by_rule = {row[0]: row[1:] for row in rows if row}
    # sqrt(1e21 / 120) = 2.887e9; 20 of it.
    assert by_rule["20 tokens a parameter"][:3] == ["2.89 billion", "57.7 billion", "20.0"]
    assert set(by_rule) == {"20 tokens a parameter", "approach 3", "replication"}
    for source in ("2001.08361", "2203.15556", "2404.10102", "C = 6 N D", "410.7 / D^0.28"):
        assert source in text
    # 1e21 / (0.4 x 989e12 x 3600) = 702.2 hours of one device.
    assert "702.2 device-hours at an MFU of 40%: 0.46 days on 64 devices" in text
    assert "Extrapolated" not in text
    assert "Extrapolated" in printed(plan_budget(1e24, peak_flops=None, devices=None))
    assert max(len(line) for line in printed(plan_budget(1e24, peak_flops=1e15, devices=8),
                                             width=80).splitlines()) <= 80  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "changes", "sentence"),
    [
        (0.0, {}, "--budget=0; use a finite number of training FLOPs above 0, such as 1e21"),
        (-1e21, {}, "--budget=-1e+21; use a finite number of training FLOPs above 0"),
        (math.inf, {}, "--budget=inf; use a finite number of training FLOPs above 0"),
        (math.nan, {}, "--budget=nan; use a finite number of training FLOPs above 0"),
        (1e21, {"mfu": 0.0}, "mfu=0; use a part of the peak above 0 and at most 1, such as 0.4"),
        (1e21, {"mfu": 40.0}, "mfu=40; use a part of the peak above 0 and at most 1"),
        (1e21, {"devices": 0}, "devices=0; use at least 1"),
        (1e21, {"peak_flops": 0.0}, "peak_flops=0; use the finite FLOP/s of one device"),
    ],
)
def test_refusals(compute, changes, sentence):
    with pytest.raises(UserError) as refusal:
        plan_budget(compute, **{"peak_flops": 989e12, "devices": 8, **changes})
    assert str(refusal.value).startswith(sentence)
