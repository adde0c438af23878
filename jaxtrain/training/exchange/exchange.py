"""Settings of the gradient exchange, and incompatible features."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.sharding import Layout

Graph = Literal["ring", "torus", "exponential"]

# Settings of each method; the others must stay at their defaults.
_READS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "local_sgd": ("period",),
    "diloco": (
        "period", "outer_learning_rate", "outer_momentum", "fragments", "delay", "mixing",
    ),
    "int8": (),
    "top_k": ("keep",),
    "gossip": ("graph",),
    "sign_sgd": (),
    "power_sgd": ("rank",),
    "asynchronous": ("staleness", "compensation"),
}  # fmt: skip
Method = Literal[
    "synchronous",
    "local_sgd",
    "diloco",
    "int8",
    "top_k",
    "gossip",
    "sign_sgd",
    "power_sgd",
    "asynchronous",
]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Gradient or parameter exchange between the replicas along the mesh axis `data`.

    Attributes:
      method: 'synchronous' reduces every step's gradients; 'local_sgd' (arXiv 1805.09767) averages
        parameters and moments every `period` steps; 'diloco' (arXiv 2311.08105) gives the mean
        movement of that many steps to an outer Nesterov optimizer; 'int8' and 'top_k' compress the
        gradients in both directions, with error feedback (arXiv 1905.05957); 'power_sgd' sends two
        narrow matrices of `rank` columns of each, also with error feedback (arXiv 1905.13727);
        'sign_sgd' votes on the sign of each element, 1, 0 or -1 (arXiv 1810.05291); 'gossip'
        averages parameters with the neighbors in a graph after every step (D-PSGD, arXiv
        1705.09056); 'asynchronous' computes gradients at the parameters of `staleness` steps ago,
        on any mesh.
      period: inner steps between two exchanges, for local_sgd and diloco.
      outer_learning_rate: diloco's; 1 with no momentum is plain averaging.
      outer_momentum: diloco's Nesterov decay rate.
      fragments: number of parts of diloco's parameters, each with every `fragments`-th layer: each
        is exchanged once per period, at its own step (streaming DiLoCo, arXiv 2501.18512).
      delay: steps during which a fragment of diloco is in transit, while training continues.
      mixing: the fraction of its own parameters that a replica of diloco keeps when a fragment
        arrives.
      keep: the fraction of each gradient's entries that top_k sends.
      rank: columns of the factors that power_sgd sends of a matrix; a matrix that is no larger is
        sent whole.
      graph: the graph of gossip: 'ring'; 'torus', a grid as square as Mesh.data
        allows; 'exponential', the ranks at distances 1, 2, 4, ... (arXiv 2110.13363).
      staleness: age of asynchronous gradients, in steps; 0 is the synchronous step.
      compensation: lambda of the first-order correction of asynchronous gradients
        (DC-ASGD, arXiv 1609.08326), such as 0.04; 0 is no correction.
    """

    method: Method = "synchronous"
    period: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    keep: float = 0.01
    rank: int = 4
    graph: Graph = "ring"
    staleness: int = 1
    compensation: float = 0.0

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UserError(f"Exchange.period={self.period}; use at least 1 step")
        if not self.outer_learning_rate > 0:
            raise UserError(
                f"Exchange.outer_learning_rate={self.outer_learning_rate}; use a number above 0"
            )
        if not 0 <= self.outer_momentum < 1:
            raise UserError(f"Exchange.outer_momentum={self.outer_momentum}; use 0 to below 1")
        require_at_least(0, self, "staleness", "compensation", "delay")
        require_at_least(1, self, "rank", "fragments")
        if not 0 <= self.mixing < 1:
            raise UserError(f"Exchange.mixing={self.mixing}; use 0 to below 1")
        if not 0 < self.keep <= 1:
            raise UserError(f"Exchange.keep={self.keep}; use a fraction above 0 and at most 1")

    @property
    def streams(self) -> bool:
        """Whether diloco exchanges fragments, delayed, or mixed."""
        return self.fragments > 1 or self.delay > 0 or self.mixing > 0


def validate(settings: Exchange, layout: Layout | None) -> Iterator[str]:
    """Yield an error message for each reason why these settings cannot be used; None: no mesh is
    known.
    """
    method = settings.method
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if name == "method" or name in _READS[method] or value == field.default:
            continue
        readers = [reader for reader, reads in _READS.items() if name in reads]
        yield (
            f"Exchange.{name}={value!r} has no effect for Exchange.method={method!r}; leave it "
            f"at {field.default!r} or set Exchange.method to {' or '.join(map(repr, readers))}"
        )
    if method == "diloco":
        yield from _validate_turns(settings)
    if settings.graph == "torus" and layout is not None:
        yield from _validate_torus(layout.mesh.shape["data"])


def _validate_torus(replicas: int) -> Iterator[str]:
    """Yield an error if the number of replicas does not form a grid."""
    if replicas > 1 and 1 in sides(replicas):
        yield (
            f"Exchange.graph='torus' with Mesh.data={replicas}, which is not a grid of two sides "
            "above 1; use Exchange.graph='ring', or a number such as 4, 6, 8 or 9"
        )


def _validate_turns(settings: Exchange) -> Iterator[str]:
    """Yield errors if a period is too short for all fragments or for the delay."""
    period = settings.period
    if settings.fragments > period:
        yield (
            f"Exchange.fragments={settings.fragments} with Exchange.period={period}: a step sends "
            f"one fragment at most; use at most {period} fragments or a longer period"
        )
    if settings.delay >= period:
        yield (
            f"Exchange.delay={settings.delay} with Exchange.period={period}: a fragment would be "
            f"sent again before it has come; use Exchange.delay={period - 1} or a longer period"
        )


def neighbours(graph: Graph, replicas: int) -> list[list[int]]:
    """Return the destination replica of each replica for each permute of an exchange; none twice.

    In each graph all replicas have equally many neighbors, and the mean of all is preserved.

    Args:
      graph: 'ring': both next ones; 'torus': the next ones along both sides of a grid, row by row;
        'exponential': the distances 1, 2, 4, ... below the number of ranks.
      replicas: their number.
    """
    everyone = range(replicas)
    if graph == "torus":
        rows, columns = sides(replicas)
        along = [
            [(r // columns + i) % rows * columns + (r % columns + j) % columns for r in everyone]
            for i, j in ((0, 1), (0, -1), (1, 0), (-1, 0))
        ]
    else:
        shifts = (1, -1) if graph == "ring" else [2**i for i in range((replicas - 1).bit_length())]
        along = [[(r + shift) % replicas for r in everyone] for shift in shifts]
    found = []
    for one in along:
        if one not in found and one != list(everyone):
            found.append(one)
    return found


def sides(replicas: int) -> tuple[int, int]:
    """Return rows and columns of the grid of `replicas` that is nearest to a square."""
    rows = max(n for n in range(1, math.isqrt(replicas) + 1) if replicas % n == 0)
    return rows, replicas // rows
