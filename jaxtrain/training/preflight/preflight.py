"""Preflight: validation of a configuration before a run; one message has every violation.

The table in `compatibility.py` lists conflicting features. A single feature's values
and the sizes that it divides are checked by a `validate` function next to it, which yields an error
message for each reason; this module lists them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import passes_of, reads_pairs
from jaxtrain.nn import execution, remat
from jaxtrain.nn.attention import context, kernel_registry, patterns
from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.remat import NAMES, Remat
from jaxtrain.parallel import dividing, mesh, sharding
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.training import corruption, layouts, offload, settings
from jaxtrain.training.compose import compose
from jaxtrain.training.exchange import exchange
from jaxtrain.training.finetune import finetune
from jaxtrain.training.layouts import abstract_layout, kernel_request
from jaxtrain.training.objectives import losses
from jaxtrain.training.optimizers import optimizer, unfreezing
from jaxtrain.training.pipeline import schedules
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight import model_and_data
from jaxtrain.training.preflight.compatibility import check_compatibility
from jaxtrain.training.preflight.run_context import NotApplicableError, RunContext
from jaxtrain.training.settings import Config
from jaxtrain.training.state import with_shardings
from jaxtrain.training.step import base_step


def check(
    config: Config,
    *,
    device_count: int,
    platform: str,
    kind: str | None = None,
    reads_data: bool = True,
    trains: bool = True,
) -> None:
    """Raise UserError with all reasons why this configuration cannot run on these devices.

    An error hides only the checks that depend on the invalid value.

    Args:
      config: the configuration.
      device_count: devices over all processes.
      platform: 'cpu', 'gpu', `kernel_registry.OLD_GPU` or 'tpu'.
      kind: the devices' `device_kind`; None skips checks of their capabilities.
      reads_data: whether the tokenizer is available, so that its vocabulary is compared with the
        model's.
      trains: whether the run trains.
    """
    ctx = RunContext(config, device_count, platform, kind, reads_data, trains)
    found: dict[str, None] = {}
    for part in _PARTS:
        try:
            for sentence in part(ctx, ctx.config):
                found[sentence] = None
        except NotApplicableError:
            continue
        except UserError as error:
            found[str(error)] = None
    if found:
        raise UserError("\n".join(found))


def _context(ctx: RunContext, config: Config) -> Iterable[str]:
    attention = ctx.model.attention
    if attention is None:
        return ()
    return context.validate(
        config.attention.context_parallel,
        context=ctx.size("context"),
        length=ctx.length,
        tensor=ctx.size("tensor"),
        num_heads=attention.num_heads,
        kernel=config.attention.kernel,
        model=ctx.name,
        pattern=attention.pattern,
    )


def _pattern(ctx: RunContext, config: Config) -> Iterable[str]:
    attention = ctx.model.attention
    if attention is None or config.attention.kernel not in ("auto", "sparse"):
        return ()
    exchanged = config.attention.context_parallel == "ulysses"
    parts = ctx.size("tensor") * (ctx.size("context") if exchanged else 1)
    return patterns.validate(
        attention.pattern, num_heads=attention.num_heads, parts=parts, model=ctx.name
    )


def _matmul(ctx: RunContext, config: Config) -> Iterable[str]:
    if config.precision.matmul == "compute":
        return ()
    from jaxtrain.nn.matmul import eight_bit

    return eight_bit.validate(
        config.precision.matmul,
        platform=ctx.platform,
        device_kind=ctx.kind,
        model=ctx.name,
        experts=ctx.model.experts is not None,
        recurrent=any(not one.every_token for one in ctx.model.cached),
    )


def _pipeline(ctx: RunContext, config: Config) -> Iterable[str]:
    return schedules.validate(
        config.pipeline,
        ctx.size("pipe"),
        num_layers=ctx.model.layers if "pipe" in ctx.usable else None,
        written=_layers_of(ctx),
        passes=passes_of(ctx.model),
        scan=config.scan,
    )


def _lengths(ctx: RunContext, config: Config) -> Iterable[str]:
    data, lengths = config.train.data, {}
    if reads_pairs(ctx.model):
        batch = data.abstract_batch(1)
        if batch.source is None:  # other data, which is rejected elsewhere
            return
        settings = (f"{type(data).__name__}.{side}_length" for side in ("source", "target"))
        lengths = dict(zip(settings, example_shape(batch), strict=True))
    else:
        lengths["TextData.sequence_length"] = ctx.length
    for written, length in lengths.items():
        yield from sharding.validate_length(
            config.sharding, ctx.sizes, length=length, written=written
        )


def _scan(ctx: RunContext, config: Config) -> Iterable[str]:
    count = ctx.model.layers
    if count is None or ctx.size("pipe") != 1:
        return ()
    written = f"{_layers_of(ctx)}={count}"
    return execution.validate(config.scan, num_layers=count, written=written)


def _layers_of(ctx: RunContext) -> str:
    """Return the setting for the number of layers, as users write it."""
    return f"{ctx.name}.{ctx.model.settings.get('layers', 'layers')}"


def _remat(ctx: RunContext, config: Config) -> Iterable[str]:
    yield from remat.validate(config.remat)
    if ctx.model.layers is not None and any(config.remat.named.values()):
        yield from validate_names(config)


def _kernel(ctx: RunContext, config: Config) -> Iterable[str]:
    request = None if ctx.platform is None else kernel_request(config, ctx.platform)
    # 'auto' only chooses supported kernels.
    if config.attention.kernel == "auto" or request is None:
        return ()
    return kernel_registry.validate(config.attention.kernel, request)


_PARTS: tuple[Callable[[RunContext, Config], Iterable[str]], ...] = (
    lambda ctx, c: mesh.validate(
        c.mesh, ctx.device_count, usable=ctx.usable, model=ctx.name, reasons=ctx.reasons
    ),
    lambda ctx, c: check_compatibility(ctx),
    lambda ctx, c: sharding.validate(c.sharding, ctx.sizes),
    _lengths,
    lambda ctx, c: layouts.validate_batch(
        c.train,
        ctx.layout_if_any,
        microbatches=c.pipeline.microbatches,
        exchange=c.exchange.method,
    ),
    lambda ctx, c: settings.validate_best(c.best, c.train),
    lambda ctx, c: settings.validate_automatic_saves(c.checkpoint, c.train),
    lambda ctx, c: dividing.validate(
        ctx.model, ctx.layout, shapes=ctx.shapes, free=c.mesh.free_axis
    ),
    lambda ctx, c: exchange.validate(c.exchange, ctx.layout_if_any),
    lambda ctx, c: offload.validate(c.offload),
    lambda ctx, c: finetune.validate(
        c.finetune,
        lambda: ctx.shapes,
        layout=ctx.layout_if_any,
        starts_from=c.train.start_from,
        trains=ctx.trains,
    ),
    lambda ctx, c: c.optimizer.rule.validate_layout(ctx.trained, ctx.layout),
    lambda ctx, c: optimizer.validate_groups(c.optimizer, ctx.trained),
    lambda ctx, c: unfreezing.validate(
        c.finetune.unfreeze,
        ctx.trained,
        last=c.train.steps,
        trains=ctx.trains,
    ),
    _context,
    _pattern,
    _pipeline,
    lambda ctx, c: corruption.validate(c.corruption, ctx.layout),
    _matmul,
    lambda ctx, c: c.train.task.validate_model(c.train.model),
    lambda ctx, c: c.train.task.validate_run(c.train.model, length=ctx.length),
    lambda ctx, c: model_and_data.validate(c, reads_data=ctx.reads_data),
    _scan,
    _remat,
    lambda ctx, c: losses.validate(c.loss, length=ctx.length, context=ctx.size("context")),
    _kernel,
)


# -- names of activations in a model's layers, for remat policies ----------------------------------


def validate_names(config: Config) -> Iterator[str]:
    """Yield an error message for each name that the model's layers do not use."""
    given = activation_names(config)
    for setting, names in config.remat.named.items():
        for name in names:
            if name not in given:
                yield (
                    f"{setting}={names}: the layers of {type(config.train.model).__name__} name "
                    f"no activation {name!r}{did_you_mean(name, given)}"
                )


# Sections that apply after the gradients are computed, or to the run around its steps.
_AFTER_GRADIENTS = ("optimizer", "schedule", "checkpoint", "best", "guard", "corruption", "tracker")


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
        **{name: type(getattr(config, name))() for name in _AFTER_GRADIENTS},
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
