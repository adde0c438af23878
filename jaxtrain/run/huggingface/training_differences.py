"""Differences between training an imported model here and in transformers.

Logits are compared in the receipt; losses beside the model's own and dropout are not in them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.models.model import Model
from jaxtrain.models.weights.config_keys import DROPOUT


def training_differences(model: Model, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each of them; most models have none.

    Args:
      model: the sizes of the imported model.
      content: of its config.json.
    """
    return (*_balancing(model, content), *_dropout(content))


def _balancing(model: Model, content: Mapping[str, Any]) -> Iterator[str]:
    weight = getattr(model, "balance_weight", 0.0)
    if model.experts is None or not weight:
        return
    name = f"{type(model).__name__}.balance_weight = {weight}"
    if "router_aux_loss_coef" not in content:
        yield f"{name} multiplies a load-balancing loss, which transformers has none of"
        return
    unused = "" if content.get("output_router_logits") else ", where output_router_logits is true,"
    yield (
        f"{name} multiplies the load-balancing loss of each row and layer by itself, averaged; in "
        f"transformers router_aux_loss_coef{unused} multiplies one of all rows and layers together"
    )


def _dropout(content: Mapping[str, Any]) -> Iterator[str]:
    found = [f"{key} = {content[key]}" for key in DROPOUT if content.get(key)]
    if found:
        yield f"{', '.join(found)} of config.json is not used: bind this package's own settings"
