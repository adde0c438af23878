"""Program construction: settings to the pure functions of a run."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax

from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import Model, reads_pairs, reads_tokens
from jaxtrain.nn.attention.kernels import Choice, Request, choose
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.dot import einsum_of
from jaxtrain.nn.parameters import role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import Layout, by_name, logical_axes
from jaxtrain.training.balancing import biases, speed_of
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.offload.offload import Offload
from jaxtrain.training.optimizers.optimizer import chain, make_optimizer
from jaxtrain.training.optimizers.plateau import on_plateau
from jaxtrain.training.optimizers.rule import Rule
from jaxtrain.training.optimizers.schedule import make_schedule
from jaxtrain.training.optimizers.unfreezing import Unfreezing
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Program, parameter_shapes

if TYPE_CHECKING:
    from jaxtrain.nn.matmul.grouped import Grouped
    from jaxtrain.training.exchange.exchange_program import ExchangeProgram


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
    """What a configuration's model asks of a kernel; None where there is no attention over text.

    Of pairs it is the target's attention to the source: a kernel that can do that without a causal
    mask can do theirs to themselves.
    """
    model, batch = config.train.model, config.train.data.abstract_batch(1)
    attention = model.attention
    if not (reads_tokens(model) or reads_pairs(model)) or attention is None:
        return None
    length = batch.inputs.shape[1]
    return Request(
        platform=platform,
        dtype=config.precision.compute,
        causal=attention.causal,
        window=attention.window,
        segment_ids=batch.segment_ids is not None,
        cached=False,
        head_dim=attention.key_dim,
        T=length,
        S=length if batch.source is None else batch.source.shape[1],
        biased=attention.biased,
        capped=attention.softcap is not None,
        sinks=attention.sinks,
        pattern=attention.pattern,
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


def make_program(
    config: Config, layout: Layout, workdir: Path | None = None
) -> "Program | ExchangeProgram":
    """The pure functions that a configuration makes on a layout.

    What 'auto' means is required of the layout's devices, or of this process's where it has none.

    Args:
      config: the configuration.
      layout: from `layouts`.
      workdir: where the files of what is offloaded to disks are; None: in a temporary folder.
    """
    if config.attention.kernel == "auto":
        config = resolved(config, platform_of(layout.mesh))
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.steps)
    waits = Unfreezing(tuple(config.finetune.unfreeze.items()))
    first, rest = make_optimizer(
        config.optimizer, schedule, lambda first, rest: (first, rest), on_plateau(config.schedule),
        waits,
    )  # fmt: skip
    optimizer, made = chain(first, rest), Program
    if config.offload.optimizer_state == "disk":
        from jaxtrain.training.offload.files import Scratch
        from jaxtrain.training.offload.on_disk import OnDisk

        kept = {"first": tuple(first), "rule": optax.chain(*rest)}
        made = functools.partial(OnDisk, offload=config.offload, scratch=Scratch(workdir), **kept)
    elif config.offload != Offload():
        from jaxtrain.training.offload.on_host import OnHost
        from jaxtrain.training.offload.streaming import streamed

        if config.offload.optimizer_state == "host":
            optimizer = streamed(first, rest)
        made = functools.partial(OnHost, offload=config.offload)
    program = made(
        build=config.train.task.builder(config.train.model),
        objective=config.train.task,
        optimizer=optimizer,
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
        accumulation=config.train.accumulation,
        pipeline=config.pipeline,
        guard=config.guard,
        curvature=_curvature_of(config.optimizer.rule),
        seed=config.train.seed,
        tuning=config.train.task.adapt_tuning(
            tuning_of(config.finetune, config.train.model.build, biases(config.train.model))
        ),
        bias_speed=speed_of(config.train.model),
        unfreezing=waits,
    )
    return _with_other_gradients(config, program)


def _curvature_of(rule: Rule) -> Any:
    """What `Program.curvature` is for a rule: only Sophia's are given an estimate."""
    if not hasattr(rule, "curvature"):
        return None
    from jaxtrain.training.curvature import estimate_of

    return estimate_of(rule)


def _with_other_gradients(config: Config, program: Program) -> "Program | ExchangeProgram":
    """The program whose replicas agree, or whose gradients are taken or measured, otherwise."""
    if config.exchange.method != "synchronous":
        from jaxtrain.training.exchange.methods import with_exchange

        return with_exchange(config.exchange, program)
    if config.train.noise_scale_every:
        from jaxtrain.training.noise import with_noise

        return with_noise(config.train.noise_scale_every, program)
    if config.optimizer.sharpness_radius:
        from jaxtrain.training.sharpness import with_sharpness

        return with_sharpness(config.optimizer.sharpness_radius, program)
    return program


def _grouped_kernel_of(config: Config, layout: Layout) -> "Grouped | None":
    """What experts' products are multiplied by on a layout's devices; None: there are none."""
    if config.train.model.experts is None:
        return None
    from jaxtrain.nn.matmul.grouped import Grouped, kernel_on

    kernel = kernel_on(platform_of(layout.mesh), layout.mesh.size)
    return Grouped(float8=config.precision.matmul == "float8", kernel=kernel)


def flops_per_step(config: Config) -> float:
    """FLOPs that the model's mathematics needs for a global batch: 6 N a token and causal
    attention, without recomputation (arXiv 2204.02311, appendix B).

    A frozen weight of a model that reads tokens needs 4 N: it has no gradient. The backward pass
    that nothing before the first trained weight needs is not taken off.
    """
    train = config.train
    example = example_shape(train.data.abstract_batch(1))
    whole = train.model.flops(example)
    if config.finetune != Finetune() and reads_tokens(train.model):
        tuning = tuning_of(config.finetune, train.model.build)
        unneeded = _count_frozen(train.model, tuning)
        adapters = jax.eval_shape(
            lambda: tuning.draw(parameter_shapes(train.model.build), jax.random.key(0))
        )
        added = sum(math.prod(x.shape) for x in jax.tree.leaves(adapters))
        whole += math.prod(example) * (6 * added - 2 * unneeded)
    return whole * train.global_batch_size


def _count_frozen(model: Model, tuning: Tuning) -> float:
    """Numbers of frozen weights that a token is multiplied with; of experts those it goes to."""
    shapes = parameter_shapes(model.build)
    tied = all(role_of(variable) != "output" for variable in by_name(shapes).values())
    count = 0.0
    for name, variable in by_name(shapes).items():
        only_read = role_of(variable) == "position" or (
            role_of(variable) == "embedding" and not tied
        )
        if name in tuning.frozen and is_matrix(variable) and not only_read:
            size = math.prod(variable.get_value().shape)
            if "experts" in logical_axes(variable) and role_of(variable) != "router":
                assert model.experts is not None, "experts belong to a mixture"
                size *= model.experts.per_token / model.experts.count
            count += size
    return count
