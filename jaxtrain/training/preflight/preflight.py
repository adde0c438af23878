"""Preflight: report every violation in one message, before any compilation.

Each component has a `refuse(settings, ...) -> Iterator[str]` beside it: its own settings first, the
layout second where it asks for one, by name what else it must know; a sentence for each reason.
This is the list of them.
"""

import contextlib
import math
from collections.abc import Callable, Iterable

from jaxtrain.config.errors import UserError
from jaxtrain.config.partial import NotRead
from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import passes_of, reads_pairs
from jaxtrain.nn import execution, experts
from jaxtrain.nn.attention import context, kernels, patterns
from jaxtrain.nn.products import eight_bit, rings
from jaxtrain.parallel import dividing, mesh, sharding
from jaxtrain.training import balancing, corruption, curvature, guard, noise, settings, sharpness
from jaxtrain.training.exchange import exchange
from jaxtrain.training.finetune import finetune
from jaxtrain.training.objectives import losses
from jaxtrain.training.offload import offload
from jaxtrain.training.optimizers import optimizer, plateau, unfreezing
from jaxtrain.training.pipeline import schedules
from jaxtrain.training.preflight import model_and_data, named
from jaxtrain.training.preflight.outlook import Outlook
from jaxtrain.training.program import uneven
from jaxtrain.training.program.program import kernel_request
from jaxtrain.training.settings import Config


def check(
    config: Config,
    *,
    device_count: int,
    platform: str,
    kind: str | None = None,
    reads_data: bool = True,
    trains: bool = True,
) -> None:
    """Raises UserError with every reason why this configuration cannot run on these devices.

    Args:
      config: the configuration.
      device_count: devices over all processes.
      platform: 'cpu', 'gpu', `kernels.OLD_GPU` or 'tpu'.
      kind: the devices' `device_kind`; None where what they can do is not asked.
      reads_data: whether the tokenizer is at hand, and its vocabulary compared with the model's.
      trains: whether anything is to be trained.
    """
    found = _refusals(Outlook(config, device_count, platform, kind, reads_data, trains))
    if found:
        raise UserError("\n".join(found))


def also_wrong(config: Config) -> list[str]:
    """What else is wrong with the configuration of a `ConfigError`, rejected while it was read."""
    count = None
    with contextlib.suppress(NotRead):
        config = settings.settled(config)
    with contextlib.suppress(NotRead):
        sizes = [getattr(config.mesh, axis) for axis in mesh.MESH_AXES]
        count = config.mesh.simulated_devices or (None if -1 in sizes else math.prod(sizes))
    return _refusals(Outlook(config, count))


def _refusals(seen: Outlook) -> list[str]:
    """What all parts say; an error hides only what cannot be asked without what it spoils."""
    found: dict[str, None] = {}
    for part in _PARTS:
        try:
            for sentence in part(seen, seen.config):
                found[sentence] = None
        except NotRead:
            continue
        except UserError as error:
            found[str(error)] = None
    return list(found)


def _context(seen: Outlook, config: Config) -> Iterable[str]:
    attention = seen.model.attention
    if attention is None:
        return ()
    return context.refuse(
        config.attention.context_parallel,
        context=seen.size("context"),
        length=seen.length,
        tensor=seen.size("tensor"),
        num_heads=attention.num_heads,
        kernel=config.attention.kernel,
        model=seen.name,
        pattern=attention.pattern,
    )


def _pattern(seen: Outlook, config: Config) -> Iterable[str]:
    attention = seen.model.attention
    if attention is None or config.attention.kernel not in ("auto", "sparse"):
        return ()
    exchanged = config.attention.context_parallel == "ulysses"
    parts = seen.size("tensor") * (seen.size("context") if exchanged else 1)
    return patterns.refuse(
        attention.pattern, num_heads=attention.num_heads, parts=parts, model=seen.name
    )


def _matmul(seen: Outlook, config: Config) -> Iterable[str]:
    return eight_bit.refuse(
        config.precision.matmul,
        platform=seen.platform,
        device_kind=seen.kind,
        model=seen.name,
        experts=seen.model.experts is not None,
        recurrent=any(not one.every_token for one in seen.model.cached),
    )


def _rings(seen: Outlook, config: Config) -> Iterable[str]:
    del seen
    return rings.refuse(config.sharding.collective_matmul, matmul=config.precision.matmul)


def _pipeline(seen: Outlook, config: Config) -> Iterable[str]:
    is_split = seen.size("context") > 1
    return schedules.refuse(
        config.pipeline,
        seen.size("pipe"),
        num_layers=seen.model.layers if "pipe" in seen.usable else None,
        written=_layers_of(seen),
        passes=passes_of(seen.model),
        scan=config.scan,
        context_parallel=config.attention.context_parallel if is_split else None,
        collective_matmul=config.sharding.collective_matmul,
    )


def _lengths(seen: Outlook, config: Config) -> Iterable[str]:
    data, lengths = config.train.data, {}
    if reads_pairs(seen.model):
        batch = data.abstract_batch(1)
        if batch.source is None:  # other data, which is rejected elsewhere
            return
        settings = (f"{type(data).__name__}.{side}_length" for side in ("source", "target"))
        lengths = dict(zip(settings, example_shape(batch), strict=True))
    else:
        lengths["TextData.sequence_length"] = seen.length
    for written, length in lengths.items():
        yield from sharding.refuse_length(
            config.sharding, seen.sizes, length=length, written=written
        )


def _scan(seen: Outlook, config: Config) -> Iterable[str]:
    count = seen.model.layers
    if count is None or seen.size("pipe") != 1:
        return ()
    written = f"{_layers_of(seen)}={count}"
    return execution.refuse(config.scan, num_layers=count, written=written)


def _layers_of(seen: Outlook) -> str:
    """How the user writes the number of layers."""
    return f"{seen.name}.{seen.model.settings.get('layers', 'layers')}"


def _kernel(seen: Outlook, config: Config) -> Iterable[str]:
    request = None if seen.platform is None else kernel_request(config, seen.platform)
    # What 'auto' chooses can do what is asked.
    if config.attention.kernel == "auto" or request is None:
        return ()
    return kernels.refuse(config.attention.kernel, request)


_PARTS: tuple[Callable[[Outlook, Config], Iterable[str]], ...] = (
    lambda seen, c: mesh.refuse(
        c.mesh, seen.devices, usable=seen.usable, model=seen.name, reasons=seen.reasons
    ),
    lambda seen, c: sharding.refuse(c.sharding, seen.sizes, experts="experts" in seen.logical),
    _lengths,
    lambda seen, c: uneven.refuse(
        c.train,
        seen.layout_if_any,
        microbatches=c.pipeline.microbatches,
        exchange=c.exchange.method,
    ),
    lambda seen, c: settings.refuse_best(c.best, c.train),
    lambda seen, c: settings.validate_automatic_saves(c.checkpoint, c.train),
    lambda seen, c: dividing.refuse(
        seen.model, seen.layout, shapes=seen.shapes, free=c.mesh.free_axis
    ),
    lambda seen, c: exchange.refuse(c.exchange, seen.layout_if_any),
    lambda seen, c: balancing.refuse(seen.model, exchange=c.exchange.method, name=seen.name),
    lambda seen, c: offload.refuse(
        c.offload,
        seen.sizes,
        exchange=c.exchange.method,
        compares=corruption.switched_on(c.corruption),
        sharding=c.sharding,
        layers_per_iteration=c.scan.layers_per_iteration,
    ),
    lambda seen, c: guard.refuse(c.guard, exchange=c.exchange.method),
    lambda seen, c: finetune.refuse(
        c.finetune,
        lambda: seen.shapes,
        exchange=c.exchange.method,
        layout=seen.layout_if_any,
        starts_from=c.train.start_from,
        trains=seen.trains,
    ),
    lambda seen, c: optimizer.refuse(c.optimizer, exchange=c.exchange.method),
    lambda seen, c: plateau.refuse(c.schedule, exchange=c.exchange.method),
    lambda seen, c: noise.refuse(
        c.train.noise_scale_every,
        seen.sizes,
        accumulation=c.train.accumulation,
        exchange=c.exchange.method,
        radius=c.optimizer.sharpness_radius,
    ),
    lambda seen, c: sharpness.refuse(
        c.optimizer.sharpness_radius,
        seen.sizes,
        exchange=c.exchange.method,
        curvature=curvature.of_rule(c.optimizer.rule),
    ),
    lambda seen, c: c.optimizer.rule.refuse_layout(seen.trained, seen.layout),
    lambda seen, c: optimizer.refuse_groups(c.optimizer, seen.trained),
    lambda seen, c: unfreezing.refuse(
        c.finetune.unfreeze,
        seen.trained,
        rule=c.optimizer.rule,
        exchange=c.exchange.method,
        last=c.train.steps,
        trains=seen.trains,
    ),
    lambda seen, c: curvature.refuse(
        c.optimizer.rule,
        c.train.task,
        seen.sizes,
        exchange=c.exchange.method,
        model=seen.model,
    ),
    _context,
    _pattern,
    lambda seen, c: experts.refuse(seen.capacity, context=seen.size("context"), model=seen.name),
    _pipeline,
    lambda seen, c: corruption.refuse(c.corruption, seen.layout),
    _matmul,
    _rings,
    lambda seen, c: c.train.task.refuse_model(c.train.model),
    lambda seen, c: c.train.task.refuse_run(
        c.train.model, length=seen.length, pipe=seen.size("pipe"), exchange=c.exchange.method
    ),
    lambda seen, c: model_and_data.refuse(c, reads_data=seen.reads_data),
    _scan,
    lambda seen, c: named.refuse(c, ranks=seen.size("pipe")),
    lambda seen, c: losses.refuse(c.loss, length=seen.length, context=seen.size("context")),
    _kernel,
)
