"""A configuration becomes the pure functions of a run."""

import dataclasses
from typing import Any

from jaxtrain.exchange import ExchangeProgram, with_exchange
from jaxtrain.kernels import Choice, Request, choose, platform_of
from jaxtrain.layers import Execution
from jaxtrain.models import attends
from jaxtrain.optimizer import make_optimizer, make_schedule
from jaxtrain.settings import Config
from jaxtrain.sharding import Layout
from jaxtrain.step import Program


def resolve_kernel(config: Config, platform: str) -> Choice | None:
    """The attention kernel of a configuration on a platform: what `Attention.kernel` names, or what
    'auto' means there; None for a model without attention.

    Args:
      config: the configuration; a Mesh.context of -1 counts as one that splits sequences.
      platform: 'cpu', 'gpu', `kernels.OLD_GPU` or 'tpu': of the devices that it is for.
    """
    request = kernel_request(config, platform)
    if request is None:
        return None
    kernel = config.attention.kernel
    return choose(request) if kernel == "auto" else Choice(kernel, "as Attention.kernel says")


def kernel_request(config: Config, platform: str) -> Request | None:
    """What a configuration's model asks of a kernel; None where there is no attention over text."""
    model: Any = config.train.model
    batch = config.train.data.abstract_batch(1)
    if batch.inputs.ndim != 2 or not attends(model):
        return None
    length = batch.inputs.shape[1]
    return Request(
        platform=platform,
        dtype=config.precision.compute,
        causal=True,
        window=getattr(model, "sliding_window", None),
        segment_ids=batch.segment_ids is not None,
        cached=False,
        head_dim=model.head_dim,
        T=length,
        S=length,
        in_ring=config.mesh.context != 1 and config.attention.context_parallel == "ring",
    )


def resolved(config: Config, platform: str) -> Config:
    """The configuration with the name of the kernel that runs in place of 'auto'."""
    if config.attention.kernel != "auto":
        return config
    choice = resolve_kernel(config, platform)
    kernel: Any = "reference" if choice is None else choice.kernel
    return dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, kernel=kernel)
    )


def make_program(config: Config, layout: Layout) -> Program | ExchangeProgram:
    """The pure functions that a configuration makes on a layout.

    What 'auto' means is asked of the layout's devices, or of this process's where it has none.
    """
    if config.attention.kernel == "auto":
        config = resolved(config, platform_of(layout.mesh))
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.steps)
    program = Program(
        build=config.train.model.build,
        objective=config.train.model.objective,
        optimizer=make_optimizer(config.optimizer, schedule),
        schedule=schedule,
        layout=layout,
        precision=config.precision,
        loss=config.loss,
        execution=Execution(
            kernel=config.attention.kernel,
            context_parallel=config.attention.context_parallel,
            remat=config.remat.policy,
            layers_per_iteration=config.scan.layers_per_iteration,
            matmul=config.precision.matmul,
        ),
        accumulation=config.train.accumulation,
        pipeline=config.pipeline,
        guard=config.guard,
    )
    return with_exchange(config.exchange, program)
