"""`python -m benchmarks.size` counts code, not prose."""

from benchmarks.size import PACKAGE, Size, size_of, sizes

TEXT = '''"""A module
of two lines of docstring."""

import os
from pathlib import (
    Path,
)

# A comment.
NAME = """text
of a value"""  # and another


def one() -> None:
    """A docstring."""
    return None


class Two:
    """A docstring."""

    def three(self) -> str:

        # Why.
        found = os.sep
        return found
'''


def test_docstrings_comments_and_blanks_are_no_code():
    # import, from ... ) on three, NAME on two, def, return, class, def, found, return
    assert size_of(TEXT) == Size(1, 12, 4, (1, 2))


def test_the_package_is_the_sum_of_its_parts():
    found = sizes(PACKAGE / "nn")
    assert {"attention", "layers.py", "all"} <= found.keys()
    parts = [size for name, size in found.items() if name != "all"]
    assert sum(parts, Size(0, 0, 0, ())).lines == found["all"].lines > 2_000
