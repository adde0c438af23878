"""Generator of docs/feature_matrix.md: which features can be combined, from the conflict table."""

import sys
from collections.abc import Iterator

from jaxtrain.training.preflight.compatibility import FEATURES
from jaxtrain.training.preflight.run_context import Conflict, Feature, conflicts

_HEAD = """\
# Feature compatibility

`make docs` generates this page from the compatibility table in
`jaxtrain/training/preflight/compatibility.py`. Two features conflict if one needs a property of
the step that the other removes. `jaxtrain train`, `plan` and `verify` reject such a pair before
anything is compiled, with the reason and both solutions. All other pairs are compatible.
Divisibility of sizes and limits of models and devices are checked separately.
"""


def page() -> str:
    """Return the whole page as Markdown."""
    return "\n".join((_HEAD, *_matrix(), "", *_reasons(), ""))


def features_with_conflicts() -> list[Feature]:
    """Return the features that conflict with at least one other, in the order of the table."""
    names = {one.name for pair in conflicts(list(FEATURES)) for one in pair[:2]}
    return [feature for feature in FEATURES if feature.name in names]


def _matrix() -> Iterator[str]:
    features = features_with_conflicts()
    against = {frozenset((c.needing.name, c.taking.name)) for c in conflicts(features)}
    numbers = range(1, len(features) + 1)
    yield "## The matrix"
    yield ""
    yield "x marks an incompatible pair. Column numbers refer to row numbers."
    yield ""
    yield f"| | feature | {' | '.join(map(str, numbers))} |"
    yield "|---" * (len(features) + 2) + "|"
    for number, feature in zip(numbers, features, strict=True):
        marks = ["x" if {feature.name, o.name} in against else "" for o in features]
        yield f"| {number} | {feature.name} | {' | '.join(marks)} |"


def _reasons() -> Iterator[str]:
    yield "## The reasons"
    yield ""
    yield "| feature | incompatible with | because |"
    yield "|---|---|---|"
    for conflict in conflicts(list(FEATURES)):
        needing, taking = conflict.needing.name, conflict.taking.name
        yield f"| {needing} | {taking} | {_reason(conflict)} |"


def _reason(conflict: Conflict) -> str:
    need, take = conflict.needing.needs[conflict.property], conflict.taking.takes[conflict.property]
    why = need[0] if isinstance(need, tuple) else need
    if why:
        return why
    return (
        take
        if isinstance(take, str)
        else ("the message gives the reason, which depends on the setting")
    )


if __name__ == "__main__":
    sys.stdout.write(page())
