"""The textbook's list of what one train step moves between devices, for a configuration and a mesh.

Arithmetic on the parameters' shapes and the layout's table alone: nothing is traced twice and no
device is asked, so that a search over meshes can price thousands of them.
"""

import re
from collections.abc import Callable

from jaxtrain.planning.activation_traffic import activation_traffic
from jaxtrain.planning.exchange_traffic import exchange_traffic
from jaxtrain.planning.facts import Expected, Facts
from jaxtrain.planning.weight_traffic import weight_traffic
from jaxtrain.settings import Config
from jaxtrain.sharding import Layout

__all__ = ["Expected", "branch_counts", "expected"]


def expected(config: Config, layout: Layout) -> list[Expected]:
    """What the step moves, by reason; vectors are there, single numbers are not.

    Of a pipeline this is what the busiest rank does: what only the first or the last rank does
    (embedding, loss) is counted as if one rank did both.

    Args:
      config: the configuration.
      layout: on a mesh, or on an abstract one (`preflight.abstract_layout`).
    """
    facts = Facts(config, layout)
    found = [*weight_traffic(facts), *activation_traffic(facts), *exchange_traffic(facts)]
    return [one for one in found if one.axis and one.count and one.bytes]


def branch_counts(config: Config, layout: Layout) -> Callable[[str], int | None]:
    """How often what stands in a branch runs: for `collectives.collectives`.

    A stage's actions run once for each of its microbatches, a permute in the ticks that use its
    pattern of edges.
    """
    facts = Facts(config, layout)
    if facts.size("pipe") == 1:
        return lambda op_name: None
    ticks = {name: count for way in facts.crossings().values() for name, count in way.items()}
    accumulation, chunks = config.train.accumulation, config.pipeline.virtual_stages

    def count(op_name: str) -> int | None:
        sent = re.search(r"send_(?:forward|backward)_\d+", op_name)
        if sent:
            return accumulation * ticks.get(sent.group(), 0)
        if "/stage/" not in op_name:
            return None
        once = re.search(r"embedding|loss|transpose\(jvp\(norm\)\)/reduce_sum", op_name)
        return facts.passes * (1 if once else chunks)

    return count
