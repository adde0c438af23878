"""Compatibility table: which features can be combined, one row per feature.

A row lists the properties of a step that a feature needs and those that it removes for other
features, each with its reason. Two features conflict if one needs what the other removes. A new
feature is one row: the checks before a run, the search's space, docs/feature_matrix.md and the
tests of all pairs read it.

Not in the table are checks of one setting's value, sizes that do not divide, names
that match nothing, and limits of a model or a device.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.models.model import bias_speed_of, passes_of
from jaxtrain.parallel.sharding import MASTERS_ELSEWHERE
from jaxtrain.training.corruption import Corruption, first_comparison
from jaxtrain.training.objectives.objective import LogitsObjective
from jaxtrain.training.optimizers.moments import ROUNDED
from jaxtrain.training.optimizers.rule import Rule
from jaxtrain.training.pipeline.schedules import SPLIT
from jaxtrain.training.preflight.run_context import (
    Feature,
    RunContext,
    Text,
    messages_of_conflicts,
    text_of,
)  # fmt: skip


def check_compatibility(context: RunContext) -> Iterator[str]:
    """Yield an error message for each pair of incompatible features of a run."""
    yield from messages_of_conflicts(FEATURES, context)


# -- settings of features -------------------------------------------------------------------------


def _value(context: RunContext, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(context.config, section.lower()), name)


def _unless(off: Any, *paths: str) -> Callable[[RunContext], str | None]:
    """Return the first of these settings that is not `off`."""

    def find(context: RunContext) -> str | None:
        values = {path: _value(context, path) for path in paths}
        return next((f"{path}={v!r}" for path, v in values.items() if v != off), None)

    return find


def _where(
    condition: Callable[[RunContext], bool], written: Text
) -> Callable[[RunContext], str | None]:
    return lambda context: text_of(written, context) if condition(context) else None


def _is(path: str, *values: Any) -> Callable[[RunContext], str | None]:
    """Return the setting if its value is one of these."""
    return _where(
        lambda context: _value(context, path) in values,
        lambda context: f"{path}={_value(context, path)!r}",
    )


def _axis(axis: str) -> Callable[[RunContext], str | None]:
    return _where(lambda c: c.size(axis) > 1, lambda c: f"Mesh.{axis}={c.size(axis)}")


def _no_axis(axis: str) -> Callable[[RunContext], str | None]:
    return _where(lambda c: c.size(axis) == 1, f"Mesh.{axis}=1")


def _rule(condition: Callable[[Rule], bool]) -> Callable[[RunContext], str | None]:
    return _where(
        lambda c: condition(c.config.optimizer.rule),
        lambda c: f"Optimizer.name={c.config.optimizer.name!r}",
    )


def _of_pipeline(path: str, *values: Any) -> Callable[[RunContext], str | None]:
    """Return the pipeline setting, if there is one."""
    written = _is(path, *values)
    return lambda context: written(context) if context.size("pipe") > 1 else None


def _default(*settings: tuple[str, Any]) -> Callable[[RunContext], str]:
    """Return a function that formats the settings not at their default, with their
    default values.
    """
    return lambda context: " and ".join(
        f"{path}={off!r}" for path, off in settings if _value(context, path) != off
    )


def _partial_training(context: RunContext) -> str | None:
    finetune = context.config.finetune
    if finetune.freeze:
        return f"Finetune.freeze={finetune.freeze!r}"
    if finetune.quantize_bits != "none":
        return f"Finetune.quantize_bits={finetune.quantize_bits!r}"
    return None if finetune.lora_rank is None else f"Finetune.lora_rank={finetune.lora_rank}"


def _is_dropless(context: RunContext) -> bool:
    return context.model.experts is not None and context.capacity is None


def _another_rule(context: RunContext) -> str:
    return "another rule, such as Optimizer.name='adamw'"


_ADAPTERS = (
    ("Finetune.quantize_bits", "none"),
    ("Finetune.lora_rank", None),
    ("Finetune.lora_dropout", 0.0),
)
_COMPARES = tuple((f"Corruption.{name}", off) for name, off in vars(Corruption()).items())
_OFFLOADS = ("Offload.optimizer_state", "Offload.parameters", "Offload.gradients")
_SYNCHRONOUS = "Exchange.method='synchronous'"
_TRAIN_LOCALLY = ("local_sgd", "diloco", "gossip")
_COMPRESS = ("int8", "top_k", "sign_sgd", "power_sgd")
_ONCE_A_STEP = "a pipeline runs its schedule once a step"
_REPLICAS_TRAIN_ALL = "such replicas train all parameters"
_WHOLE_FOR_CURVATURE = "its curvature estimate needs whole layers and sequences"
_GRADIENTS_WHOLE = "gradients of microbatches are whole there already"

FEATURES: tuple[Feature, ...] = (
    # -- the mesh --
    Feature(
        "pipeline parallelism",
        _axis("pipe"),
        "Mesh.pipe=1",
        takes={
            "several passes": _ONCE_A_STEP,
            "whole layers": "",
            "own gradients": "pipelines reduce their gradients synchronously",
            "known positions": "",
            "1d axes": "",
            "one model": "",
        },
    ),
    Feature(
        "encoder-decoder pipeline",
        _where(
            lambda c: c.size("pipe") > 1 and passes_of(c.model) > 1,
            lambda c: f"Mesh.pipe={c.size('pipe')}",
        ),
        "Mesh.pipe=1",
        takes={
            "one ring": (
                "ranks in encoder layers and ranks in decoder layers would run different rings "
                "at the same time, and all ranks must take part in each"
            )
        },
    ),
    Feature(
        "context parallelism",
        _axis("context"),
        "Mesh.context=1",
        takes={
            "whole sequences": "",
            "gradients of a layer": "",
            "known positions": "",
            "1d axes": "",
        },
    ),
    Feature("data parallelism", _axis("data"), "Mesh.data=1", takes={"gradients of a layer": ""}),
    Feature(
        "expert parallelism",
        _axis("expert"),
        "Mesh.expert=1",
        takes={"gradients of a layer": "", "1d axes": ""},
    ),
    Feature(
        "one replica",
        _no_axis("data"),
        "Mesh.data=2",
        takes={"replicas": "there are no replicas to exchange with"},
    ),
    Feature(
        "no tensor parallelism",
        _no_axis("tensor"),
        "Mesh.tensor=2",
        takes={"tensor ranks": ""},
    ),
    # -- what is sharded --
    Feature(
        "2D, 2.5D and 3D tensor parallelism",
        _unless("1d", "Sharding.tensor_layout"),
        "Sharding.tensor_layout='1d'",
        needs={
            "tensor ranks": "it arranges the ranks of the tensor axis",
            "1d axes": "only '1d' works with that axis",
            "whole stream": "it already splits the residual stream along embed",
            "dense layers": "it has no table for a mixture of experts",
        },
        takes={"1d weights": ""},
    ),
    Feature(
        "sequence parallelism",
        _unless(False, "Sharding.sequence_parallel"),
        "Sharding.sequence_parallel=False",
        needs={"tensor ranks": "it splits the sequence over tensor"},
        takes={"whole stream": ""},
    ),
    Feature(
        "no sequence parallelism",
        _is("Sharding.sequence_parallel", False),
        "Sharding.sequence_parallel=True",
        takes={"split sequences": ""},
    ),
    Feature(
        "collective matmul",
        _unless(False, "Sharding.collective_matmul"),
        "Sharding.collective_matmul=False",
        needs={
            "split sequences": "it sends parts of a split sequence around",
            "wide products": "8-bit matmuls have no ring",
            "one ring": "",
        },
        takes={"no ring": ""},
    ),
    Feature(
        "local gradient accumulation",
        _is("Sharding.accumulate", "local"),
        "Sharding.accumulate='shard'",
        needs={"sharded gradients": _GRADIENTS_WHOLE},
        takes={"sharded sums": ""},
    ),
    Feature(
        "ZeRO 0 and 1",
        _is("Sharding.zero", 0, 1),
        "Sharding.zero=3",
        takes={"sharded gradients": ""},
    ),
    Feature(
        "no fsdp axis", _no_axis("fsdp"), "Mesh.fsdp=2", takes={"sharded gradients": ""}
    ),
    Feature(
        "ZeRO 0 to 2 over fsdp",
        _where(
            lambda c: c.size("fsdp") > 1 and c.config.sharding.zero < 3,
            lambda c: f"Sharding.zero={c.config.sharding.zero}",
        ),
        "Sharding.zero=3",
        takes={"sharded parameters": ""},
    ),
    Feature(
        "sharded master weights",
        _is("Sharding.masters", "sharded"),
        "Sharding.masters='whole'",
        needs={"ZeRO 1": ""},
        takes={"whole masters": ""},
    ),
    Feature(
        "ZeRO 0, 2 and 3",
        _unless(1, "Sharding.zero"),
        "Sharding.zero=1",
        takes={"ZeRO 1": lambda c: MASTERS_ELSEWHERE[c.config.sharding.zero]},
    ),
    Feature(
        "unrolled layers",
        _unless(1, "Scan.layers_per_iteration"),
        "Scan.layers_per_iteration=1",
        takes={"a loop over layers": ""},
    ),
    # -- experts --
    Feature(
        "mixture of experts",
        _where(lambda c: c.model.experts is not None, lambda c: f"the experts of {c.name}"),
        "a model without experts",
        takes={"dense layers": ""},
    ),
    Feature(
        "experts with a capacity",
        _where(
            lambda c: c.capacity is not None, lambda c: f"{c.name}.capacity_factor={c.capacity}"
        ),
        lambda c: f"{c.name}.capacity_factor=None (dropless)",
        needs={
            "whole sequences": (
                "an expert's capacity is counted along whole rows, which context splits"
            )
        },
    ),
    Feature(
        "dropless experts",
        _where(_is_dropless, lambda c: f"the dropless experts of {c.name}"),
        lambda c: f"{c.name}.capacity_factor=1.25",
        takes={"second derivatives": "JAX has no second derivative of their grouped matmuls"},
    ),
    Feature(
        "router biases",
        _where(
            lambda c: bias_speed_of(c.model) is not None,
            lambda c: f"the router biases of {c.name}",
        ),
        "a router without biases",
        needs={"one verdict": "the biases are updated by the load of all replicas"},
    ),
    # -- the gradient --
    Feature(
        "sharpness-aware minimization",
        _unless(0, "Optimizer.sharpness_radius"),
        "Optimizer.sharpness_radius=0",
        needs={
            "several passes": "",
            "rows of all replicas": "both passes are over the rows of all replicas",
            "gradient elsewhere": "its curvature is estimated at the unperturbed parameters",
        },
        takes={"plain gradient": "its gradient is not the one whose noise is measured"},
    ),
    Feature(
        "gradient noise scale",
        _unless(0, "Train.noise_scale_every"),
        "Train.noise_scale_every=0",
        needs={
            "several passes": "",
            "rows of all replicas": "it is measured on gradients over the rows of all replicas",
            "plain gradient": "",
            "microbatches": "the norm of a microbatch's gradient is compared with the batch's",
        },
    ),
    Feature(
        "no gradient accumulation",
        _is("Train.accumulation", 1),
        "Train.accumulation=2",
        takes={"microbatches": ""},
    ),
    Feature(
        "Sophia",
        _rule(lambda rule: hasattr(rule, "curvature")),
        _another_rule,
        needs={
            "whole layers": _WHOLE_FOR_CURVATURE,
            "whole sequences": _WHOLE_FOR_CURVATURE,
            "rows of all replicas": "each replica would estimate its own curvature",
        },
        takes={"gradient elsewhere": ""},
    ),
    Feature(
        "Sophia-H",
        _rule(lambda rule: getattr(rule, "curvature", None) == "hutchinson"),
        _another_rule,
        needs={"second derivatives": ("", "Optimizer.name='sophia_g'")},
    ),
    Feature(
        "Sophia-G",
        _rule(lambda rule: getattr(rule, "curvature", None) == "gauss_newton_bartlett"),
        _another_rule,
        needs={"logits": ("it samples targets from logits", "Optimizer.name='sophia_h'")},
    ),
    Feature(
        "objective without logits",
        _where(
            lambda c: not isinstance(c.config.train.task, LogitsObjective),
            lambda c: f"the objective {c.config.train.task.name!r}, which has no logits",
        ),
        "an objective of classes",
        takes={"logits": ""},
    ),
    Feature(
        "distillation",
        _where(
            lambda c: c.config.train.task.name == "distillation",
            lambda c: f"Distillation.teacher={getattr(c.config.train.task, 'teacher', None)!r}",
        ),
        "another objective",
        needs={"one model": "the stages of a pipeline hold only one model"},
        takes={"all parameters trained": _REPLICAS_TRAIN_ALL},
    ),
    # -- the update --
    Feature(
        "guard against bad steps",
        _where(
            lambda c: c.config.guard.policy != "stop" or c.config.guard.spike_sigma is not None,
            lambda c: f"Guard.policy={c.config.guard.policy!r}"
            if c.config.guard.policy != "stop"
            else f"Guard.spike_sigma={c.config.guard.spike_sigma}",
        ),
        _default(("Guard.policy", "stop"), ("Guard.spike_sigma", None)),
        needs={
            "one verdict": (
                "between exchanges a replica does not know of a bad step of another, and error "
                "feedback would propagate it"
            )
        },
    ),
    Feature(
        "offload",
        _unless("none", *_OFFLOADS),
        _default(*((path, "none") for path in _OFFLOADS)),
        needs={
            "whole layers": (
                "the state is streamed one layer at a time, and a pipeline splits the layers "
                "over its stages"
            ),
            "one state": "replicas with their own state keep it on their devices",
        },
        takes={"state in device memory": ""},
    ),
    Feature(
        "state on disk",
        _is("Offload.optimizer_state", "disk"),
        "Offload.optimizer_state='none'",
        takes={"copies of the state": "files of the state change in place, and a copy of them "
               "would hold up every such step"},
    ),
    Feature(
        "local checkpoints",
        _unless(None, "Checkpoint.local_directory"),
        "Checkpoint.local_directory=None",
        needs={"copies of the state": ""},
    ),
    Feature(
        "gradient offload",
        _is("Offload.gradients", "host"),
        "Offload.gradients='none'",
        needs={
            "gradients of a layer": (
                "gradients are reduced over that axis once a step, on the devices"
            ),
            "sharded sums": "whole gradients are summed there, on the devices",
            "sharded parameters": (
                "gradients are sharded like the parameters, which only stage 3 shards"
            ),
            "a loop over layers": "they are transferred one layer at a time",
        },
    ),
    Feature(
        "corruption checks",
        _where(
            lambda c: first_comparison(c.config.corruption) is not None,
            lambda c: str(first_comparison(c.config.corruption)),
        ),
        _default(*_COMPARES),
        needs={
            "state in device memory": (
                "bits are compared in device memory, from which the state is offloaded"
            )
        },
    ),
    Feature(
        "learning rate reduced on a plateau",
        _unless(0, "Schedule.plateau_patience"),
        "Schedule.plateau_patience=0",
        needs={
            "one loss": "each replica has its own loss, and their learning rates would diverge"
        },
    ),
    Feature(
        "state that has no mean",
        _rule(lambda rule: rule.no_mean is not None),
        _another_rule,
        takes={"moments with a mean": lambda c: str(c.config.optimizer.rule.no_mean)},
    ),
    Feature(
        "rounded moments",
        _unless("float32", "Optimizer.moments"),
        "Optimizer.moments='float32'",
        takes={"moments with a mean": ROUNDED},
    ),
    Feature(
        "rule that averages iterates",
        _rule(lambda rule: rule.averages),
        _another_rule,
        takes={"parameters that wait": "it averages the iterates of all steps"},
    ),
    # -- what is trained --
    Feature(
        "gradual unfreezing",
        _where(
            lambda c: bool(c.config.finetune.unfreeze),
            lambda c: f"Finetune.unfreeze={dict(c.config.finetune.unfreeze)!r}",
        ),
        "Finetune.unfreeze={}",
        needs={"parameters that wait": ""},
        takes={"all parameters trained": _REPLICAS_TRAIN_ALL},
    ),
    Feature(
        "freezing, LoRA and quantized weights",
        _where(lambda c: _partial_training(c) is not None, lambda c: str(_partial_training(c))),
        _default(("Finetune.freeze", ()), *_ADAPTERS),
        takes={"all parameters trained": _REPLICAS_TRAIN_ALL},
    ),
    Feature(
        "LoRA and quantized weights",
        _where(
            lambda c: c.config.finetune.lora_rank is not None
            or c.config.finetune.quantize_bits != "none",
            lambda c: f"Finetune.lora_rank={c.config.finetune.lora_rank}"
            if c.config.finetune.lora_rank is not None
            else f"Finetune.quantize_bits={c.config.finetune.quantize_bits!r}",
        ),
        _default(*_ADAPTERS),
        needs={"1d weights": "adapters and codes are sharded for '1d'"},
    ),
    Feature(
        "LoRA dropout",
        _unless(0, "Finetune.lora_dropout"),
        "Finetune.lora_dropout=0.0",
        needs={
            "known positions": (
                "the dropout mask depends on rows and positions that these devices do not know"
            )
        },
    ),
    # -- replicas --
    Feature(
        "gradient exchange that is not synchronous",
        _unless("synchronous", "Exchange.method"),
        _SYNCHRONOUS,
        needs={"own gradients": "", "all parameters trained": ""},
        takes={"rows of all replicas": "", "one verdict": "", "one state": ""},
    ),
    Feature(
        "replicas with their own steps or compressed gradients",
        _is("Exchange.method", *_TRAIN_LOCALLY, *_COMPRESS),
        _SYNCHRONOUS,
        needs={
            "replicas": "",
            "sharded sums": "replicas of the other methods sum along fsdp for every microbatch",
            "whole masters": (
                "replicas of the other methods each gather their own parameters along fsdp"
            ),
        },
    ),
    Feature(
        "local SGD, DiLoCo and gossip",
        _is("Exchange.method", *_TRAIN_LOCALLY),
        _SYNCHRONOUS,
        takes={"one loss": ""},
    ),
    Feature(
        "local SGD",
        _is("Exchange.method", "local_sgd"),
        "Exchange.method='diloco', which averages no moments",
        needs={"moments with a mean": ""},
    ),
    # -- pipelines and products --
    Feature(
        "zero-bubble and DualPipe-V schedules",
        _of_pipeline("Pipeline.schedule", *SPLIT),
        lambda c: "Pipeline.schedule='1f1b'"
        if c.config.pipeline.virtual_stages == 1
        else "Pipeline.schedule='1f1b' and Pipeline.virtual_stages=1",
        needs={
            "no ring": (
                "ranks that compute weight gradients during another rank's tick would have to "
                "take part in its ring too, which costs what this schedule saves"
            )
        },
    ),
    Feature(
        "ring attention",
        _where(
            lambda c: c.size("context") > 1 and c.config.attention.context_parallel == "ring",
            "Attention.context_parallel='ring'",
        ),
        "Attention.context_parallel='ulysses'",
        takes={"no ring": ""},
    ),
    Feature(
        "stored residuals of a pipeline",
        _of_pipeline("Pipeline.backward", "residuals"),
        "Pipeline.backward='recompute'",
        needs={
            "residuals in device memory": "the stored residuals of a stage are in device memory"
        },
    ),
    Feature(
        "activation offload",
        _where(
            lambda c: c.config.remat.offloads,
            lambda c: f"Remat.offload={c.config.remat.offload!r}"
            if c.config.remat.offload
            else "Remat.policy='offload'",
        ),
        lambda c: "Remat.offload=()" if c.config.remat.offload else "Remat.policy='full'",
        takes={
            "residuals in device memory": "",
            "second derivatives": "JAX has no second derivative of activations in host memory",
        },
    ),
    Feature(
        "8-bit matmuls",
        _unless("compute", "Precision.matmul"),
        "Precision.matmul='compute'",
        takes={
            "wide products": "",
            "second derivatives": "rounding to 8 bits has no second derivative",
        },
    ),
)  # fmt: skip
