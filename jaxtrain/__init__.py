"""SPMD training on JAX and Flax whose claims can be checked before an accelerator is rented."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.analysis.planning.plan import plan
    from jaxtrain.analysis.planning.result import Plan
    from jaxtrain.parallel.devices import use_devices
    from jaxtrain.run.trainer import Trainer
    from jaxtrain.training.settings import Config, load_config

__all__ = ["Config", "Plan", "Trainer", "load_config", "plan", "use_devices"]

# Loaded when they are asked for: they load JAX, which takes seconds.
_HOMES = {
    "Config": "jaxtrain.training.settings",
    "Plan": "jaxtrain.analysis.planning.plan",
    "Trainer": "jaxtrain.run.trainer",
    "load_config": "jaxtrain.training.settings",
    "plan": "jaxtrain.analysis.planning.plan",
    "use_devices": "jaxtrain.parallel.devices",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
