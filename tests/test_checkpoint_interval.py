"""Checkpoint intervals and the time lost to failures: published optima, and searches by scan."""

import itertools
import math

import pytest

from jaxtrain.run.checkpoint.save_schedule import (
    DEFAULT_MTBF_HOURS,
    FAILURE_RATES,
    Costs,
    daly_interval,
    effective_training_time_ratio,
    young_interval,
)

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.parametrize(
    ("mtbf", "minutes", "digits"), [(24 * HOUR, 117, 0), (6 * HOUR, 57, 0), (15 * MINUTE, 9.1, 1)]
)
def test_dalys_published_optima(mtbf, minutes, digits):
    """Daly 2006, figures 3 to 5: saves of 5 minutes, recoveries of 10."""
    found = daly_interval(5 * MINUTE, mtbf) / MINUTE
    assert round(found, digits) == minutes
    # His model, minimized second by second here, has its optimum there too.
    costs = Costs(step=1.0, save=5 * MINUTE, write=0.0, recovery=10 * MINUTE, mtbf=mtbf)
    assert costs.best_interval(10**6) / MINUTE == pytest.approx(minutes, rel=0.01)


def test_the_first_order_rule_is_the_higher_orders_limit():
    assert young_interval(2.0, 100.0) == 20.0
    assert daly_interval(1e-4, 1e4) == pytest.approx(young_interval(1e-4, 1e4), rel=1e-3)
    assert daly_interval(30.0, 10.0) == 10.0  # saves of more than two failures: his equation 37


GRID = [
    Costs(step=step, save=save, write=write, recovery=recovery, mtbf=mtbf)
    for step, save, write, recovery, mtbf in itertools.product(
        (0.5, 20.0), (0.1, 60.0), (0.0, 90.0), (10.0, 900.0), (2e3, 1e5, 1e9)
    )
]


@pytest.mark.parametrize("costs", GRID, ids=str)
def test_the_best_interval_is_the_best_of_all(costs):
    steps = 5000
    least = max(1, math.ceil((costs.write - costs.save) / costs.step))
    scanned = max(range(least, steps + 1), key=costs.fraction)
    assert costs.fraction(costs.best_interval(steps)) == pytest.approx(
        costs.fraction(scanned), rel=1e-12
    )


def test_a_run_with_next_to_no_failures_saves_at_its_end_alone():
    costs = Costs(step=1.0, save=1.0, write=3.0, recovery=600.0, mtbf=1e15, startup=10.0)
    assert costs.best_interval(100) == 100
    # 100 steps, one save, its write and the start; ten saves where it saves every 10 steps.
    assert costs.run_seconds(100, 100) == pytest.approx(100 + 1 + 3 + 10)
    assert costs.run_seconds(100, 10) == pytest.approx(100 + 10 + 3 + 10)
    assert costs.run_seconds(105, 10) == pytest.approx(105 + 11 + 3 + 10)


def test_a_job_that_fails_before_it_recovers_makes_no_progress():
    costs = Costs(step=1.0, save=1.0, write=0.0, recovery=1000.0, mtbf=1.0)
    assert costs.fraction(1) == 0.0
    assert costs.run_seconds(10, 1) == math.inf
    assert costs.best_interval(10) == 1


@pytest.mark.parametrize(("minutes", "published"), [(60, 0.70), (5, 0.93)])
def test_ettr_of_a_hypothetical_run_on_rsc_1(minutes, published):
    """Kokolis et al. 2024: 16,000 GPUs, 6.50 failures per 1,000 node-days, restarts of 5 min."""
    mtbf = 86_400 / (16_000 / 8 * 6.50e-3)
    found = effective_training_time_ratio(minutes * MINUTE, 5 * MINUTE, mtbf)
    assert found == pytest.approx(published, abs=0.016)  # two digits, and minutes of saving
    exact = Costs(step=1.0, save=0.0, write=0.0, recovery=5 * MINUTE, mtbf=mtbf)
    assert exact.fraction(minutes * 60) == pytest.approx(published, abs=0.025)


def test_ettr_and_the_exact_form_agree_where_failures_are_rare():
    for interval, restart, mtbf in itertools.product((60, 1800), (30, 900), (1e5, 1e6)):
        exact = Costs(step=1.0, save=5.0, write=0.0, recovery=restart, mtbf=mtbf)
        first = effective_training_time_ratio(interval, restart, mtbf, save_seconds=5.0)
        assert exact.fraction(interval) == pytest.approx(first, rel=1e-2)


def test_failure_rates_are_those_of_their_sources():
    by_name = {rate.name: rate for rate in FAILURE_RATES}
    # "One interruption in about 50,700 GPU-hours": 16,384 GPUs x 54 days x 24 / 419.
    assert by_name["Llama 3 405B"].mtbf_hours == pytest.approx(50_700, rel=1e-3)
    # Kokolis et al. project 1.8 hours between failures of 16,384 GPUs, 0.23 of 131,072.
    rsc_1 = by_name["Meta RSC-1"].mtbf_hours
    assert round(rsc_1 / 16_384, 1) == 1.8
    assert round(rsc_1 / 131_072, 2) == 0.23
    hours = sorted(rate.mtbf_hours for rate in FAILURE_RATES)
    assert hours[len(hours) // 2] == DEFAULT_MTBF_HOURS
    assert all(rate.source and rate.counted for rate in FAILURE_RATES)
