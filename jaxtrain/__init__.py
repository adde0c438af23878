"""SPMD training on JAX and Flax whose claims can be checked before an accelerator is rented."""

from jaxtrain.planning.plan import Plan, plan
from jaxtrain.settings import Config, load_config
from jaxtrain.train import Trainer

__all__ = ["Config", "Plan", "Trainer", "load_config", "plan"]
