"""What replicas along `data` tell each other where they do not sum every gradient (`Exchange`).

Letters: n numbers of all parameters on a device, k replicas.
"""

import math
from collections.abc import Iterator

from jaxtrain.exchange.compression import BLOCK
from jaxtrain.planning.facts import Expected, Facts, split_over

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}


def exchange_traffic(facts: Facts) -> Iterator[Expected]:
    """Collectives over `data` in place of the sum of gradients; nothing in a synchronous step.

    What runs every `Exchange.period` steps says so in `Expected.every`.
    """
    if not facts.replicas_alone:
        return
    settings, k = facts.config.exchange, facts.size("data")
    match settings.method:
        case "local_sgd" | "diloco":
            copies = 1 + MOMENTS[facts.config.optimizer.name] * (settings.method == "local_sgd")
            what = "parameters and moments" if copies > 1 else "parameters"
            for size in _shards(facts):
                yield Expected(
                    "all-reduce", "data", copies, 4 * size, f"replicas: {what}",
                    "2 n (k-1)/k each", settings.period,
                )  # fmt: skip
        case "gossip":
            neighbours = 2 if k > 2 else 1
            for size in _shards(facts):
                yield Expected(
                    "collective-permute", "data", neighbours, facts.master_bytes * size,
                    "replicas: parameters to neighbours", "n a neighbour",
                )  # fmt: skip
        case "int8":
            blocks = sum(math.ceil(size / BLOCK) for size in _shards(facts))
            blocks = math.ceil(blocks / k) * k
            for width, cause in ((BLOCK, "codes"), (4, "scales")):
                cause = f"replicas: {cause} of gradients"
                yield Expected("all-to-all", "data", 1, blocks * width, cause, "n (k-1)/k")
                yield Expected("all-gather", "data", 1, blocks * width // k, cause, "n (k-1)/k")
        case "top_k":
            kept = sum(max(1, math.ceil(settings.keep * size)) for size in _shards(facts))
            for cause in ("values", "places"):
                yield Expected(
                    "all-gather", "data", 1, 4 * kept, f"replicas: {cause} of the largest",
                    "keep n (k-1)",
                )  # fmt: skip


def _shards(facts: Facts) -> list[int]:
    """Numbers of each parameter's array on the device that updates it, all layers in one."""
    return [
        (facts.L if weight.is_layer else 1)
        * math.prod(weight.shape)
        // facts.devices([axis for _, axis in split_over(facts.layout.moment(weight.axes))])
        for weight in facts.weights
    ]
