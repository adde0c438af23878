"""The search against the best published layouts: by the same model no more than a tenth slower."""

import pytest

from benchmarks.searches import CASES, Case, searched

MOST = 1.1  # times the published layout's seconds; where the search is that good, it ends


def in_turn(at: int, case: Case):
    """The first always; of the others, each of which takes up to a minute, every third."""
    marks = [pytest.mark.slow] + [pytest.mark.rotated(f"searches {at % 3}")] * (at > 0)
    return pytest.param(case, marks=marks, id=case.machine)


@pytest.mark.parametrize("case", [in_turn(*one) for one in enumerate(CASES)])
def test_what_is_found_is_at_most_a_tenth_slower_than_what_was_published(case):
    found, _, share = searched(case, MOST)
    assert all(one.price.fits for one in found.candidates)
    assert share <= MOST
