"""Composition of a run's train step: the order of the transforms, and why it is this one."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optax

from jaxtrain.models.model import bias_speed_of
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import einsum_of
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.finetune.finetune import router_biases, tuning_of
from jaxtrain.training.guard import Guard
from jaxtrain.training.layouts import resolve_config
from jaxtrain.training.offload import Offload
from jaxtrain.training.optimizers.optimizer import chain, make_optimizer
from jaxtrain.training.optimizers.schedule import make_schedule, on_plateau
from jaxtrain.training.optimizers.unfreezing import Unfreezing
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup
from jaxtrain.training.step import Step, Transform, apply_transforms, base_step

if TYPE_CHECKING:
    from jaxtrain.nn.matmul.grouped import Grouped

# Transformations of all gradients together, and of each parameter separately.
_Parts = tuple[list[optax.GradientTransformation], list[optax.GradientTransformation]]


def compose(config: Config, layout: Layout, workdir: Path | None = None) -> Step:
    """Return the train step of a configuration on a layout.

    Accumulation, pipelines, adapters, freezing and unfreezing are fields of its setup: they are
    inside of the gradient. All else is a transform, omitted if its setting is at its
    default. 'auto' is resolved for the layout's devices, or for this process's where it has none.

    Args:
      config: the configuration.
      layout: from `layouts`.
      workdir: folder of files of offloaded state; None: a temporary folder.
    """
    if config.attention.kernel == "auto":
        config = resolve_config(config, platform_of(layout.mesh))
    setup, parts = _setup(config, layout)
    transforms = [make() for applies, make in _transforms(config, parts, workdir) if applies]
    return apply_transforms(base_step, *transforms)(setup)


# -- the order -------------------------------------------------------------------------------------


def _transforms(
    config: Config, parts: _Parts, workdir: Path | None
) -> list[tuple[Any, Callable[[], Transform]]]:
    """Yield whether each transform applies, and its constructor, from the innermost on. Each sees
    the gradient and the update of those before it."""
    optimizer, exchange, offload = config.optimizer, config.exchange, config.offload
    every, radius = config.train.noise_scale_every, optimizer.sharpness_radius
    speed = bias_speed_of(config.train.model)
    judges = config.guard.in_step or config.precision.loss_scale == "dynamic"
    return [
        # At the parameters themselves, which the next one moves to the devices.
        (hasattr(optimizer.rule, "curvature"), lambda: _estimate_curvature(config)),
        # All later ones see a step on the devices.
        (offload != Offload(), lambda: _offload_to_host(offload)),
        (offload.optimizer_state == "disk", lambda: _offload_to_disk(parts, workdir)),
        # An update that the guard judges too.
        (speed is not None, lambda: _balance_experts(speed)),
        # Takes several gradients, at the master parameters.
        (radius, lambda: _minimize_sharpness(radius)),
        (every, lambda: _measure_noise(every)),
        # Judges the gradient of the update, once.
        (judges, lambda: _guard_update(config.guard)),
        # Each replica takes its own step or gradient.
        (exchange.method != "synchronous", lambda: _exchange_with(exchange)),
    ]


# Imported here: a run needs few transforms.


def _estimate_curvature(config: Config) -> Transform:
    from jaxtrain.training.transforms import estimate_curvature, estimate_of

    return estimate_curvature(estimate_of(config.optimizer.rule))


def _offload_to_host(offload: Offload) -> Transform:
    from jaxtrain.training.offload.on_host import offload_to_host

    return offload_to_host(offload)


def _offload_to_disk(parts: _Parts, workdir: Path | None) -> Transform:
    from jaxtrain.training.offload.files import Scratch
    from jaxtrain.training.offload.on_disk import offload_to_disk

    first, rest = parts
    return offload_to_disk(Scratch(workdir), tuple(first), optax.chain(*rest))


def _balance_experts(speed: float | None) -> Transform:
    from jaxtrain.training.transforms import balance_experts

    return balance_experts(speed)


def _minimize_sharpness(radius: float) -> Transform:
    from jaxtrain.training.transforms import minimize_sharpness

    return minimize_sharpness(radius)


def _measure_noise(every: int) -> Transform:
    from jaxtrain.training.transforms import measure_noise

    return measure_noise(every)


def _guard_update(guard: Guard) -> Transform:
    from jaxtrain.training.transforms import guard_update

    return guard_update(guard)


def _exchange_with(exchange: Any) -> Transform:
    from jaxtrain.training.exchange.methods import exchange_with

    return exchange_with(exchange)


# -- the setup -------------------------------------------------------------------------------------


def _setup(config: Config, layout: Layout) -> tuple[Setup, _Parts]:
    """Return the setup of a configuration's step, and the parts of its optimizer."""
    train, model = config.train, config.train.model
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, train.steps)
    unfreezing = Unfreezing(tuple(config.finetune.unfreeze.items()))
    first, rest = make_optimizer(
        config.optimizer, schedule, lambda first, rest: (list(first), list(rest)),
        on_plateau(config.schedule), unfreezing,
    )  # fmt: skip
    join = chain
    if config.offload.optimizer_state == "host":
        from jaxtrain.training.offload.streaming import stream_update as join
    setup = Setup(
        build=train.task.builder(model),
        objective=train.task,
        optimizer=join(first, rest),
        schedule=schedule,
        layout=layout,
        precision=config.precision,
        loss=config.loss,
        execution=Execution(
            kernel=config.attention.kernel,
            context_parallel=config.attention.context_parallel,
            remat=config.remat.kept,
            layers_per_iteration=config.scan.layers_per_iteration,
            einsum=einsum_of(config.precision.matmul),
            grouped=_grouped_kernel_of(config, layout),
        ),
        accumulation=train.accumulation,
        pipeline=config.pipeline,
        seed=train.seed,
        tuning=train.task.adapt_tuning(
            tuning_of(config.finetune, model.build, router_biases(model))
        ),
        unfreezing=unfreezing,
    )
    return setup, (first, rest)


def _grouped_kernel_of(config: Config, layout: Layout) -> "Grouped | None":
    """Return the grouped matmul of the experts on a layout's devices, or None without experts."""
    if config.train.model.experts is None:
        return None
    from jaxtrain.nn.matmul.grouped import Grouped, kernel_on

    kernel = kernel_on(platform_of(layout.mesh), layout.mesh.size)
    return Grouped(float8=config.precision.matmul == "float8", kernel=kernel)
