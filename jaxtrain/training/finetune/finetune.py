"""Fine-tuning settings: name patterns of trained parameters, validated."""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Annotated, Literal

import jax
from flax import nnx

from jaxtrain.config.errors import UserError, did_you_mean, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.models.model import Model, bias_speed_of
from jaxtrain.nn.dropout import validate_rate
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import Layout, by_name
from jaxtrain.training.finetune.tuning import Tuning


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tuning: which parameters a run trains (by default all), LoRA adapters, quantized
    weights.

    Attributes:
      freeze: patterns of frozen parameters, by their names in `Trainer.table`:
        `('layers/*', 'token_embedding')`; `*` matches any characters, slashes too. They have no
        gradient and no optimizer state.
      unfreeze: number of steps before frozen parameters are trained too, by pattern
        or role, such as {'layers/*[0:6]': 200, 'layers/*': 100}; the first match counts, other
        parameters are trained from the start. 'layers/*[0:6]' are the first six layers.
      reinitialize: patterns of parameters that are initialized instead of taken from
        Train.start_from, such as a new head, `('output',)`; there they may be missing, or have
        another shape.
      lora_rank: the rank of adapters, the only trained parameters (LoRA, arXiv 2106.09685); None:
        there are none.
      lora_alpha: an adapter's output is multiplied by this over the divisor of `lora_scale`.
      lora_scale: 'rank' divides by the rank, 'sqrt_rank' by its square root (rsLoRA, arXiv
        2312.03732).
      lora_dropout: dropout rate of an adapter's input in training, as
        in `torch.nn.Dropout`.
      lora_magnitudes: whether an adapter also trains the norm of the weights of each output
        feature, separately from their direction (DoRA, arXiv 2402.09353).
      lora_targets: which weights have an adapter: 'attention', 'mlp', or patterns of names.
      quantize_bits: the format of a transformer's layer weights while adapters are trained, or in
        a run of `jaxtrain quantize`, which trains nothing: 'nf4' is 4 bits in blocks of 64
        (QLoRA, arXiv 2305.14314), 'int8' a scale per output feature (LLM.int8(), arXiv
        2208.07339), 'int4' 16 even steps per group (AWQ, arXiv 2306.00978); 'none': in
        Precision.params.
      quantize_group: elements that share a scale in 'int4'.
      adapter: a PEFT folder from which a new run's adapters are initialized, of the same rank,
        scale and targets; None: random A and zero B.
    """

    freeze: tuple[str, ...] = ()
    unfreeze: dict[str, int] = dataclasses.field(default_factory=dict)
    reinitialize: tuple[str, ...] = ()
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    lora_scale: Literal["rank", "sqrt_rank"] = "rank"
    lora_dropout: float = 0.0
    lora_magnitudes: bool = False
    lora_targets: tuple[str, ...] = ("attention", "mlp")
    quantize_bits: Literal["none", "int8", "nf4", "int4"] = "none"
    quantize_group: int = 128
    adapter: Annotated[str | None, PathOr()] = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "lora_rank")
        for pattern, step in self.unfreeze.items():
            if step < 0:
                raise UserError(f"Finetune.unfreeze: {pattern!r} has {step}; use 0 or more steps")
        require_positive(self, "lora_alpha")
        if self.lora_rank is not None and self.freeze:
            raise UserError(
                f"Finetune.freeze={self.freeze!r} with Finetune.lora_rank={self.lora_rank}: with "
                "adapters, all other parameters are frozen; use Finetune.freeze=()"
            )
        require_at_least(2, self, "quantize_group")
        if self.quantize_group % 2:
            raise UserError(
                f"Finetune.quantize_group={self.quantize_group}: two codes share a byte, so it "
                f"must be even; the nearest even number is {self.quantize_group + 1}"
            )
        if self.lora_magnitudes and (self.lora_rank is None or self.quantize_bits != "none"):
            other = (
                "lora_rank=None"
                if self.lora_rank is None
                else f"quantize_bits={self.quantize_bits!r}"
            )
            raise UserError(
                f"Finetune.lora_magnitudes=True with Finetune.{other}: magnitudes need adapters of "
                "weights in Precision.params; set Finetune.lora_rank, such as 16, and "
                "Finetune.quantize_bits='none'"
            )
        validate_rate(self, "lora_dropout", self.lora_dropout)
        if self.lora_dropout and (self.lora_rank is None or self.lora_magnitudes):
            other = "lora_rank=None" if self.lora_rank is None else "lora_magnitudes=True"
            raise UserError(
                f"Finetune.lora_dropout={self.lora_dropout} with Finetune.{other}: dropout "
                "needs adapters without magnitudes; use Finetune.lora_dropout=0.0"
            )
        if self.lora_rank is None and self.adapter is not None:
            raise UserError(
                f"Finetune.adapter={self.adapter!r} with Finetune.lora_rank=None: no adapters are "
                "trained; set Finetune.lora_rank to the r of its adapter_config.json"
            )


def validate(
    settings: Finetune,
    shapes: Callable[[], nnx.State],
    *,
    layout: Layout | None = None,
    starts_from: str | None = None,
    trains: bool = False,
) -> Iterator[str]:
    """Yield an error message for each reason why these settings cannot be used.

    Args:
      settings: the fine-tuning settings.
      shapes: of the model's parameters; used only if something is not trained.
      layout: how parameters are sharded; None: unknown.
      starts_from: `Train.start_from`.
      trains: whether the run trains.
    """
    if settings.reinitialize:
        if starts_from is None:
            yield (
                f"Finetune.reinitialize={settings.reinitialize!r} with Train.start_from=None: "
                "all parameters are initialized; use Finetune.reinitialize=(), or name the run "
                "or model that the others come from"
            )
        yield from _validate_unmatched(
            "reinitialize", settings.reinitialize, list(by_name(shapes()))
        )
    holds_few = settings.quantize_bits != "none"
    if settings.lora_rank is None and not settings.freeze and not holds_few:
        return
    if trains and holds_few and settings.lora_rank is None:
        yield (
            f"Finetune.quantize_bits={settings.quantize_bits!r} with Finetune.lora_rank=None: "
            "quantized weights cannot be trained; set Finetune.lora_rank, such as 16, or use 'none'"
        )
    if settings.lora_rank is None and settings.freeze and holds_few:
        yield (
            f"Finetune.freeze={settings.freeze!r} with "
            f"Finetune.quantize_bits={settings.quantize_bits!r}: with quantized weights only "
            "adapters are trained; use Finetune.freeze=()"
        )
    if settings.lora_rank is not None or holds_few:
        yield from _validate_layers(settings, shapes(), layout)
    if settings.lora_rank is not None:
        yield from _validate_adapters(settings, shapes())
    if not settings.freeze:
        return
    known = list(by_name(shapes()))
    yield from _validate_unmatched("freeze", settings.freeze, known)
    if len(matching(settings.freeze, known)) == len(known):
        yield (
            f"Finetune.freeze={settings.freeze!r} matches all {len(known)} parameters, and none "
            "is left to train; match fewer"
        )


def _validate_unmatched(
    setting: str, patterns: Iterable[str], known: Collection[str]
) -> Iterator[str]:
    for pattern in patterns:
        if not matching([pattern], known):
            yield (
                f"Finetune.{setting}: {pattern!r} matches no parameter"
                f"{did_you_mean(pattern, known)}"
            )


def _validate_layers(settings: Finetune, shapes: nnx.State, layout: Layout | None) -> Iterator[str]:
    """Yield errors common to adapters and quantized weights."""
    # Imported here, as below: most runs train all parameters, unchanged.
    from jaxtrain.training.finetune.quantized_base import can_adapt, validate_blocks

    wanted = f"lora_rank={settings.lora_rank}"
    if settings.lora_rank is None:
        wanted = f"quantize_bits={settings.quantize_bits!r}"
    if not any(map(can_adapt, by_name(shapes).values())):
        yield (
            f"Finetune.{wanted}: adapters and quantization need transformer layers, which this "
            "model does not have; use Finetune.freeze to train a part of it"
        )
    if settings.quantize_bits in ("nf4", "int4"):
        yield from validate_blocks(shapes, layout, settings.quantize_bits, _group_of(settings))


def _group_of(settings: Finetune) -> int:
    """Return the number of values that share a scale."""
    from jaxtrain.nn.matmul.quantized import BLOCK

    return settings.quantize_group if settings.quantize_bits == "int4" else BLOCK


def _validate_adapters(settings: Finetune, shapes: nnx.State) -> Iterator[str]:
    from jaxtrain.training.finetune.lora import targets_of
    from jaxtrain.training.finetune.quantized_base import can_adapt

    able = [name for name, variable in by_name(shapes).items() if can_adapt(variable)]
    if not able:
        return
    if not settings.lora_targets:
        yield "Finetune.lora_targets=(): nothing is left to train; use ('attention', 'mlp')"
    groups = [name for name, found in targets_of(("attention", "mlp"), shapes) if found]
    known = [*groups, *able]  # experts are not an MLP
    for wanted, found in targets_of(settings.lora_targets, shapes):
        if not found:
            yield (
                f"Finetune.lora_targets: {wanted!r} matches no weight that can have an adapter"
                f"{did_you_mean(wanted, known)}"
            )


def tuning_of(
    settings: Finetune,
    build: Callable[[jax.Array], nnx.Module],
    untrained: frozenset[str] = frozenset(),
) -> Tuning:
    """Return the trainable/frozen partition of a model's parameters.

    Args:
      settings: the fine-tuning settings.
      build: key -> the model.
      untrained: names of parameters without gradients, from `balancing.biases`.

    Raises:
      UserError: a pattern matches none.
    """
    if settings.lora_rank is None and not settings.freeze and settings.quantize_bits == "none":
        return Tuning(untrained)
    shapes = nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), nnx.Param)
    own = dataclasses.replace(
        settings, reinitialize=()
    )  # which the model's structure does not depend on
    found = list(validate(own, lambda: shapes))
    if found:
        raise UserError("\n".join(found))
    names, rank = by_name(shapes), settings.lora_rank
    if settings.freeze:
        return Tuning(untrained | frozenset(matching(settings.freeze, names)))
    from jaxtrain.training.finetune.quantized_base import QuantizedBase, can_adapt

    all_names, quantized, kind = frozenset(names), frozenset[str](), settings.quantize_bits
    if kind != "none":
        quantized = frozenset(name for name, variable in names.items() if can_adapt(variable))
    of = QuantizedBase(all_names, quantized=quantized, kind="nf4" if kind == "none" else kind,
                 group=_group_of(settings))  # fmt: skip
    if rank is None:
        return of
    from jaxtrain.training.finetune.lora import LoRA, targets_of

    targets = {name for _, matches in targets_of(settings.lora_targets, shapes) for name in matches}
    divisor = rank if settings.lora_scale == "rank" else math.sqrt(rank)
    return LoRA(
        **vars(of), targets=frozenset(targets), rank=rank, scale=settings.lora_alpha / divisor,
        magnitudes=settings.lora_magnitudes, dropout=settings.lora_dropout,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def router_biases(model: Model) -> frozenset[str]:
    """Return the names of the router biases of a model."""
    return frozenset() if bias_speed_of(model) is None else router_biases_of(model.build)


def router_biases_of(build: Callable[[jax.Array], nnx.Module]) -> frozenset[str]:
    """Return the names of the router biases of any module; no array is made."""
    shapes = nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), nnx.Param)
    return frozenset(name for name, one in by_name(shapes).items() if role_of(one) == "balance")


def matching(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the names that match one of the patterns."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
