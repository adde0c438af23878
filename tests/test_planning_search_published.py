"""The search against the best published layouts: by the same model no more than a tenth slower."""

import pytest

from benchmarks.searches import CASES, searched

MOST = 1.1  # times the published layout's seconds; where the search is that good, it ends


@pytest.mark.slow_cases("70B on 64 H100")
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=lambda case: case.machine,
)
def test_what_is_found_is_at_most_a_tenth_slower_than_what_was_published(case):
    found, _, share = searched(case, MOST)
    assert all(one.price.fits for one in found.candidates)
    assert share <= MOST
