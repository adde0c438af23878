"""Activations that a whole model saves for its backward pass, from the residuals that JAX derives.

For models without a loop over equal layers; `profile` is for the others.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.extend.core import Var

from jaxtrain.analysis.planning.textbook.profile import is_on_host, shard_bytes
from jaxtrain.data.batch import Batch
from jaxtrain.nn.precision import to_compute
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.compose import compose
from jaxtrain.training.offload import Offload
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import base_step


def of_forward(config: Config) -> Config:
    """Return the configuration without settings that a forward pass on a given layout is
    independent of, except the rows: a cache key for many layouts."""
    return dataclasses.replace(
        config,
        mesh=Mesh(fsdp=1),
        train=dataclasses.replace(config.train, accumulation=1),
        sharding=type(config.sharding)(),
        offload=Offload(),
        pipeline=Pipeline(),
    )


def of_weights(layout: Layout) -> Layout:
    """Return an equivalent layout for the forward pass: ZeRO stages 1 and 2 shard what it does not
    read, and up to stage 2 fsdp shards only the batch, like data."""
    if layout.splits_parameters:
        return layout
    sizes = dict(layout.mesh.shape)
    sizes |= {"data": 1, "fsdp": sizes["data"] * sizes["fsdp"]}
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    mesh = layout.mesh.update(axis_sizes=tuple(sizes.values()))
    return dataclasses.replace(layout, mesh=mesh, zero=0)


def residual_bytes_of_rows(config: Config, layout: Layout, rows: int) -> tuple[int, int]:
    """Return `residual_bytes` for any number of rows, by linear extrapolation of two traces."""
    devices = layout.batch_devices()
    one, two = (residual_bytes(config, layout, times * devices) for times in (1, 2))
    first, host = (a + (rows // devices - 1) * (b - a) for a, b in zip(one, two, strict=True))
    return first, host


@functools.lru_cache(maxsize=4096)
def residual_bytes(config: Config, layout: Layout, rows: int) -> tuple[int, int]:
    """Return the bytes that `rows` save for the backward pass, on a device and on its host."""
    setup = compose(config, layout).setup
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        state = base_step(setup).abstract_state()
        batch = config.train.data.abstract_batch(rows)
        batch = with_shardings(batch, setup.batch_shardings(batch))

        def forward(weights: Any, statistics: Any, batch: Batch) -> Any:
            trained, frozen = to_compute(weights, setup.precision.compute)

            def loss(trained: Any) -> Any:
                whole = setup.tuning.join((trained, frozen))
                sums, statistics_ = setup.sums(whole, statistics, batch, train=True)
                return sums["loss"], statistics_

            return jax.tree.leaves(jax.vjp(loss, trained, has_aux=True)[1])

        closed: Any = jax.make_jaxpr(forward)(state.weights, state.statistics, batch)
    found = [var.aval for var in _of_examples(closed.jaxpr, len(jax.tree.leaves(batch)))]
    on_host = sum(shard_bytes(x) for x in found if is_on_host(x))
    return sum(map(shard_bytes, found)) - on_host, on_host


# Results that a compiler recomputes in the fusion that reads them: a mask from its operands, and
# constants.
_MADE_AGAIN = frozenset({"broadcast_in_dim", "eq", "ge", "gt", "iota", "le", "lt", "ne"})


def _of_examples(jaxpr: Any, count: int) -> list[Any]:
    """Return the outputs, without duplicates, that depend on the last `count` inputs but are not
    inputs themselves: weights are part of the arguments, also if reshaped."""
    depends, made_again = set(jaxpr.invars[len(jaxpr.invars) - count :]), set()
    inputs = set(depends)
    for equation in jaxpr.eqns:
        if any(isinstance(var, Var) and var in depends for var in equation.invars):
            depends |= {*equation.outvars}
        if equation.primitive.name in _MADE_AGAIN:
            made_again |= {*equation.outvars}
    outputs = dict.fromkeys(var for var in jaxpr.outvars if isinstance(var, Var))
    return [var for var in outputs if var in depends - inputs - made_again]
