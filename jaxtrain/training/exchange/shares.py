"""Means of metrics over asynchronous replicas."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def shares(weight: jax.Array) -> jax.Array:
    """Each replica's part of the whole weight, float32 [k]; equal parts where nothing counts."""
    total = weight.sum()
    return jnp.where(total > 0, weight / jnp.maximum(total, 1.0), 1.0 / weight.size)


@jax.jit
def means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars of metrics that hold one number for each replica [k], weighed with `weight` [k].

    Where replicas take steps without waiting for one another this is what makes them meet, so it
    is called for the steps that are written and for no other.
    """
    share = shares(metrics["weight"])
    return {
        name: (value * share).sum() if jnp.ndim(value) else value
        for name, value in metrics.items()
        if name != "weight"
    }
