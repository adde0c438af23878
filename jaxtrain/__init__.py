"""SPMD training on JAX and Flax whose claims can be checked before you rent an accelerator."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.analysis.planning.plan import plan
    from jaxtrain.analysis.planning.result import Plan
    from jaxtrain.data.batch import Batch
    from jaxtrain.data.images.source import ImageData
    from jaxtrain.data.text.source import TextData
    from jaxtrain.nn.attention.attention import Attention
    from jaxtrain.nn.execution import Scan
    from jaxtrain.nn.precision import Precision
    from jaxtrain.nn.remat import Remat
    from jaxtrain.parallel.devices import use_devices
    from jaxtrain.parallel.mesh import Mesh
    from jaxtrain.parallel.sharding import Sharding
    from jaxtrain.run.trainer import Trainer
    from jaxtrain.training.corruption import Corruption
    from jaxtrain.training.exchange.exchange import Exchange
    from jaxtrain.training.guard import Guard
    from jaxtrain.training.objectives.losses import Loss
    from jaxtrain.training.optimizers.optimizer import Optimizer
    from jaxtrain.training.optimizers.schedule import Schedule
    from jaxtrain.training.pipeline.schedules import Pipeline
    from jaxtrain.training.settings import Checkpoint, Config, Timeouts, Train, load_config

# Loaded lazily: they import JAX, which takes seconds.
_HOMES = {
    "Attention": "jaxtrain.nn.attention.attention",
    "Batch": "jaxtrain.data.batch",
    "Checkpoint": "jaxtrain.training.settings",
    "Config": "jaxtrain.training.settings",
    "Corruption": "jaxtrain.training.corruption",
    "Exchange": "jaxtrain.training.exchange.exchange",
    "Guard": "jaxtrain.training.guard",
    "ImageData": "jaxtrain.data.images.source",
    "Loss": "jaxtrain.training.objectives.losses",
    "Mesh": "jaxtrain.parallel.mesh",
    "Optimizer": "jaxtrain.training.optimizers.optimizer",
    "Pipeline": "jaxtrain.training.pipeline.schedules",
    "Plan": "jaxtrain.analysis.planning.plan",
    "Precision": "jaxtrain.nn.precision",
    "Remat": "jaxtrain.nn.remat",
    "Scan": "jaxtrain.nn.execution",
    "Schedule": "jaxtrain.training.optimizers.schedule",
    "Sharding": "jaxtrain.parallel.sharding",
    "TextData": "jaxtrain.data.text.source",
    "Timeouts": "jaxtrain.training.settings",
    "Train": "jaxtrain.training.settings",
    "Trainer": "jaxtrain.run.trainer",
    "load_config": "jaxtrain.training.settings",
    "plan": "jaxtrain.analysis.planning.plan",
    "use_devices": "jaxtrain.parallel.devices",
}

__all__ = [
    "Attention", "Batch", "Checkpoint", "Config", "Corruption", "Exchange", "Guard",
    "ImageData", "Loss", "Mesh", "Optimizer", "Pipeline", "Plan", "Precision", "Remat", "Scan",
    "Schedule", "Sharding", "TextData", "Timeouts", "Train", "Trainer", "load_config", "plan",
    "use_devices",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
