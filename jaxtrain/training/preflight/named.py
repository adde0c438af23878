"""Names of activations in a model's layers, for remat policies."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxtrain.config.errors import did_you_mean
from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.remat import NAMES, Remat
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import base_step


def validate(config: Config) -> Iterator[str]:
    """Yield an error message for each name that the model's layers do not use."""
    given = activation_names(config)
    for setting, names in config.remat.named.items():
        for name in names:
            if name not in given:
                yield (
                    f"{setting}={names}: the layers of {type(config.train.model).__name__} name "
                    f"no activation {name!r}{did_you_mean(name, given)}"
                )


def activation_names(config: Config) -> frozenset[str]:
    """Return the activations, of `NAMES`, that the layers of a configuration's model name."""
    return _names(_plain(config))


def _plain(config: Config) -> Config:
    """Return the configuration without the settings that its names do not depend on."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, global_batch_size=1, accumulation=1),
        mesh=Mesh(fsdp=1),
        sharding=type(config.sharding)(),
        exchange=type(config.exchange)(),
        offload=type(config.offload)(),
        pipeline=Pipeline(),
        remat=Remat(),
        attention=Attention(kernel="reference"),
    )


@functools.lru_cache(maxsize=16)
def _names(config: Config) -> frozenset[str]:
    layout = abstract_layout(config, 1)
    setup = compose(config, layout).setup  # whatever happens to its gradients
    assert isinstance(layout.mesh, jax.sharding.AbstractMesh)
    with jax.sharding.use_abstract_mesh(layout.mesh), layout.current():
        batch = config.train.data.abstract_batch(1)
        batch = with_shardings(batch, setup.batch_shardings(batch))
        traced = jax.make_jaxpr(setup.gradients)(base_step(setup).abstract_state(), batch)
    return frozenset(NAMES) & frozenset(_names_in(traced.jaxpr))


def _names_in(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the names in a traced function and the functions that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in _jaxprs(equation.params.values()):
            yield from _names_in(inner)


def _jaxprs(values: Iterable[Any]) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _jaxprs(value)
