"""Step time from the schedule of the compiled program."""

import dataclasses

from jaxtrain.analysis.planning.compiled.collectives import Collective, collectives
from jaxtrain.analysis.planning.compiled.schedule import by_launch, seconds_of, waits, walk
from jaxtrain.analysis.planning.machines import links
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.traffic import branch_counts
from jaxtrain.analysis.planning.timing.efficiency_factors import efficiency_of
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Step time of a compiled program by its schedule, in seconds.

    Attributes:
      compute: all operations.
      of_kernels: hand-written kernels, included in `compute`.
      waited: exposed communication.
      sent: all collectives.
      waits: (kind, mesh axis) -> its part of `waited`, and of `sent`.
    """

    compute: float
    of_kernels: float
    waited: float
    sent: float
    waits: dict[tuple[str, str], tuple[float, float]]


def simulate_schedule(
    config: Config,
    layout: Layout,
    target: Target,
    text: str,
    *,
    attention: float,
    thorough: bool,
) -> Schedule:
    """Simulate the schedule of a compiled step.

    Collectives are exposed unless they overlap with other operations, and each operation has its
    own cost (`schedule.seconds_of`).

    Args:
      config: the configuration, resolved for the target.
      layout: its layout.
      target: the machine.
      text: HLO text of the compiled program.
      attention: seconds of attention kernels in closed form, since programs do not show their cost.
      thorough: whether it was compiled with the full effort of a run.
    """
    sizes, shares, counts = (
        dict(layout.mesh.shape),
        efficiency_of(target),
        branch_counts(config, layout),
    )

    def link_seconds(one: Collective) -> float:
        return links.seconds(one.kind, one.axis, one.bytes, sizes, target, config.mesh.dcn)[0]

    of = collectives(text, sizes, counts)
    moved = by_launch(of, link_seconds)
    price = seconds_of(target, products=shares.products, memory=shares.memory, thorough=thorough)
    runs = walk(text, price, moved, counts).kernels
    found = walk(text, price, moved, counts, kernel=attention / runs if runs else 0.0)
    kernels = attention if runs else 0.0
    compute = found.products + found.rest + kernels
    return Schedule(compute, kernels, found.waited, found.sent, waits(found, of, link_seconds))
