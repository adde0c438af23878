"""The published runs that predictions are held against, and how they are counted."""

import csv
import dataclasses

import numpy as np
import pytest

from benchmarks.predictions import CHIPS, FILE, fit, left_out, read, shares_of, table
from jaxtrain.analysis.planning.timing import FITTED

ROWS = list(csv.DictReader(FILE.open(newline="")))
# Small models first: they are traced in a second.
SOME = [
    next(row for row in reversed(ROWS) if row["chip"] == chip and row["use_for_fit"] == "True")
    for chip in CHIPS
]


@pytest.fixture(scope="module")
def points():
    return [read(row) for row in SOME]


def test_every_run_has_a_source_and_a_step():
    assert len(ROWS) == 136
    assert len({row["id"] for row in ROWS}) == 136
    for row in ROWS:
        assert "/" in row["source"], row["id"]
        assert float(row["published_step_seconds"]) > 0, row["id"]
        assert row["chip"] in FITTED, row["id"]


def test_predictions_are_near_what_was_published(points):
    """One run of each chip; the whole table is `python -m benchmarks.predictions`."""
    ratios = np.array([point.ratio(shares_of(point.chip)) for point in points])
    assert np.median(np.abs(ratios - 1)) < 0.1
    assert (np.abs(ratios - 1) < 0.35).all()


def test_the_pieces_add_up(points):
    for point in points:
        shares, pieces = shares_of(point.chip), point.counted
        idle = dataclasses.replace(
            pieces, weights=0, tensor=0, others=0, between=0, bubble=0, slices=1
        )
        assert idle.seconds(shares) == pytest.approx(pieces.compute(shares))
        for name in ("products", "scores", "activations", "update", "weights", "tensor", "others"):
            more = dataclasses.replace(pieces, **{name: getattr(pieces, name) + 1.0})
            assert more.seconds(shares) > pieces.seconds(shares), name


def test_a_fit_finds_the_shares_that_made_the_points(points):
    """Steps made by the formula itself with other shares: the fit goes towards them."""
    made = {
        chip: dataclasses.replace(FITTED[chip], products=FITTED[chip].products - 0.1)
        for chip in CHIPS
    }
    exact = [
        dataclasses.replace(point, published=point.counted.seconds(made[point.chip]))
        for point in points
    ]
    shares, _ = fit(exact)
    before = [abs(point.ratio(shares_of(point.chip)) - 1) for point in exact]
    after = [abs(point.ratio(shares(point.chip)) - 1) for point in exact]
    assert np.median(before) > 0.05
    assert np.median(after) < np.median(before) / 2


def test_errors_of_a_source_are_those_of_a_fit_without_it(points):
    errors = left_out(points)
    assert len(errors) == len(points)
    assert "| all | 9 |" in table(points, shares_of)
