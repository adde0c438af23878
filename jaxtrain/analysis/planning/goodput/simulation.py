"""Monte Carlo simulation of whole runs under failures: each failure and restart one by one."""

import dataclasses

import numpy as np
from jaxtyping import Float

from jaxtrain.run.checkpoint.save_schedule import Costs

_RUNS = 2000
_EVENTS = 4_000_000  # at most, failures drawn over all runs: about 2 s of one core
# Runs with a smaller productive fraction count as runs that do not finish.
LEAST_FRACTION = 0.02


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Durations and failures of simulated runs of one configuration.

    Attributes:
      seconds: of each run, from its launch until its final state is saved.
      failures: number of failures of each run.
    """

    seconds: Float[np.ndarray, " runs"]
    failures: Float[np.ndarray, " runs"]


def simulate(
    costs: Costs, steps: int, save_every: int, mtbf: Float[np.ndarray, " runs"], *, seed: int = 0
) -> Simulated:
    """Simulate runs failure by failure until each is complete.

    Args:
      costs: costs of steps, saves and recovery; its own `mtbf` is not used.
      steps: number of steps of the run.
      save_every: steps between two saves.
      mtbf: seconds between two failures of the whole job, of each run.
      seed: seed of the draws.

    Returns:
      Seconds and failures of each run.
    """
    random = np.random.default_rng(seed)
    count = len(mtbf)
    seconds, failures = np.zeros(count), np.zeros(count)
    saved = np.zeros(count)  # steps in the newest complete checkpoint
    active = np.arange(count)
    segment = save_every * costs.step + costs.save
    launch = costs.startup
    while len(active):
        until_failure = random.exponential(mtbf[active])
        at_work = until_failure - launch  # below 0: it fails during recovery
        left = steps - saved[active]
        needed = left * costs.step + np.ceil(left / save_every) * costs.save + costs.write
        ends = at_work >= needed
        seconds[active] += np.where(ends, launch + needed, until_failure)
        # A checkpoint counts once it is written, which overlaps with the next steps.
        complete = np.floor((at_work - costs.write) / segment)
        saved[active] += save_every * np.maximum(complete, 0)
        failures[active] += ~ends
        active = active[~ends]
        launch = costs.recovery
    return Simulated(seconds, failures)


def number_of_runs(costs: Costs, run_seconds: float) -> int:
    """Return the number of runs to draw: fewer if each has many failures and thus less variance."""
    expected = run_seconds / costs.mtbf
    return int(min(_RUNS, max(50, _EVENTS / max(expected, 1))))
