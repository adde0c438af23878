"""SPMD training on JAX and Flax whose claims can be checked before an accelerator is rented."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.mesh import use_devices
    from jaxtrain.planning.plan import Plan, plan
    from jaxtrain.settings import Config, load_config
    from jaxtrain.train import Trainer

__all__ = ["Config", "Plan", "Trainer", "load_config", "plan", "use_devices"]

# Loaded when they are asked for: they load JAX, which takes seconds.
_HOMES = {
    "Config": "jaxtrain.settings",
    "Plan": "jaxtrain.planning.plan",
    "Trainer": "jaxtrain.train",
    "load_config": "jaxtrain.settings",
    "plan": "jaxtrain.planning.plan",
    "use_devices": "jaxtrain.mesh",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
