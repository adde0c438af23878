"""Protocols of model settings, as used by data, planning and training."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

import jax
from flax import nnx

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.values import lacks
from jaxtrain.nn.facts import AttentionFacts, ExpertsFacts
from jaxtrain.nn.kv_cache import Cached

if TYPE_CHECKING:
    from jaxtrain.nn.layers import Pooling

# What `from jaxtrain.models import ...` finds in addition to the sizes of the architectures.
__all__ = [
    "AttentionFacts", "Cached", "ExpertsFacts", "ImageModel", "Inputs", "Model", "TokenModel",
    "VectorModel",
]  # fmt: skip

Inputs = Literal["tokens", "images", "pairs", "vectors"]


@runtime_checkable
class Model(Protocol):
    """Protocol of an architecture's settings, a frozen dataclass of sizes.

    `TokenModel`, `ImageModel` and `VectorModel` have the further attributes of each kind of input;
    the functions `..._of` below those that only some models have.

    Attributes:
      inputs: what it reads: rows of tokens (or of vectors, see `features_of`), images, pairs of
        rows of tokens (source and target), or feature vectors.
      settings: logical axis -> the field that gives it its size, for messages.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    inputs: ClassVar[Inputs]
    settings: ClassVar[dict[str, str]]

    # The others are fields, properties or class attributes: `experts = None`.

    @property
    def objective(self) -> str:
        """Its objective: a name of `training.objectives`."""
        ...

    @property
    def layers(self) -> int | None:
        """Number of stacked layers, from `parameters.stack`; None: there is no stack."""
        ...

    @property
    def attention(self) -> AttentionFacts | None:
        """Its attention; None: it has none."""
        ...

    @property
    def experts(self) -> ExpertsFacts | None:
        """Its experts; None: it has none."""
        ...

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Cached arrays of each layer; empty: the model does not generate."""
        ...

    def build(self, key: jax.Array) -> nnx.Module:
        """Return the newly initialized module."""
        ...

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one example, without recomputation.

        Raises UserError if examples of this shape are too small.

        Args:
          shape: of the example's inputs: (T,) tokens or (T, F) of vectors, an image (H, W, C),
            (S, T) tokens of a source and a target, a vector (D,).
        """
        ...


class Unstacked:
    """Base of models without stacked layers, attention, experts and generation."""

    layers = None
    attention = None
    experts = None
    cached = ()


@runtime_checkable
class TokenModel(Model, Protocol):
    """Further attributes of a model whose inputs are tokens, or pairs of rows for tokens.

    Its module is a `Transformer`, or of pairs a `PairModule`.
    """

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, of sources and targets alike."""
        ...

    @property
    def context_length(self) -> int:
        """The longest sequence, source or target, in tokens."""
        ...

    @property
    def embed_dim(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def layers(self) -> int:
        """Number of stacked layers, or of each of encoder and decoder."""
        ...


@runtime_checkable
class ImageModel(Model, Protocol):
    """Further attributes of a model whose inputs are images; its module is a `Predictor`."""

    @property
    def channels(self) -> int:
        """Channels of the images: 3 for RGB, 1 for gray."""
        ...

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        ...

    @property
    def least_pixels(self) -> int:
        """Size of the smallest supported images; used by `verify`."""
        ...


@runtime_checkable
class VectorModel(Model, Protocol):
    """Further attributes of a model whose inputs are vectors; its module is a `Predictor`."""

    @property
    def features(self) -> int:
        """Size of a vector."""
        ...

    @property
    def outputs(self) -> int:
        """Number of classes, or of regression outputs."""
        ...


def reads_tokens(model: Model) -> TypeGuard[TokenModel]:
    """Whether a model's inputs are tokens."""
    return model.inputs == "tokens"


def reads_pairs(model: Model) -> TypeGuard[TokenModel]:
    """Whether a model's inputs are pairs of rows for tokens."""
    return model.inputs == "pairs"


def reads_images(model: Model) -> TypeGuard[ImageModel]:
    """Whether a model's inputs are images."""
    return model.inputs == "images"


def reads_vectors(model: Model) -> TypeGuard[VectorModel]:
    """Whether a model's inputs are vectors."""
    return model.inputs == "vectors"


# -- optional facts ------------------------------------------------------------------------------


def features_of(model: Model) -> int | None:
    """Return the size of the vectors that a model reads instead of tokens; None: it reads
    tokens."""
    # A protocol would require all members, which a rejected section may lack.
    return getattr(model, "features", None) if reads_tokens(model) else None


def token_classes_of(model: Model) -> int | None:
    """Return the number of classes of tokens or texts; None: the model cannot classify them."""
    return getattr(model, "num_classes", None) if reads_tokens(model) else None


def pooling_of(model: Model) -> "tuple[Pooling, bool] | None":
    """Return how a model embeds a text: how it pools the tokens' hidden states, and
    whether it normalizes the result to length 1; None: it does not embed texts."""
    pooling = getattr(model, "pooling", None)
    return None if pooling is None else (pooling, getattr(model, "normalized", False))


def tokens_per_position(model: Model) -> int:
    """Return how many tokens a model predicts at each position, the next one included."""
    return getattr(model, "predicted_tokens", 1)


def patches_of(model: Model) -> tuple[int, int] | None:
    """Return the positions and the width of an image's residual stream; None: the model
    has no stacked layers."""
    sizes: Any = model
    has_patches = reads_images(model) and hasattr(model, "tokens")
    return (sizes.tokens, sizes.embed_dim) if has_patches else None


def stack_flops(model: Model, shape: tuple[int, ...]) -> tuple[float, ...]:
    """Return the training FLOPs of one example in the layers of an encoder, and of a decoder.

    Args:
      model: the settings of a model with two stacks: `passes_of` it is 2.
      shape: of the example's inputs.
    """
    sizes: Any = model
    return sizes.flops_of_stacks(shape)


def validate_features(model: Any) -> None:
    """Raise UserError if a model reads vectors instead of tokens, but its other settings are
    for tokens.

    Args:
      model: the settings of a model that has `features`.
    """
    name, features = type(model).__name__, model.features
    require_at_least(1, model, "features")
    if features is None:
        return
    if model.objective != "token_classification":
        raise UserError(
            f"{name}.features={features} with {name}.objective={model.objective!r}, which predicts "
            f"tokens; use {name}.objective='token_classification', or {name}.features=None"
        )
    if model.vocab_size != type(model).vocab_size:
        raise UserError(
            f"{name}.vocab_size={model.vocab_size} has no effect with {name}.features={features}: "
            f"vectors are no tokens; leave it out, or set {name}.features=None"
        )


def classifies(model: Model) -> TypeGuard[TokenModel]:
    """Whether a model classifies tokens or texts."""
    return reads_tokens(model) and model.objective == "token_classification"


def require_complete(model: Model) -> None:
    """Raise UserError if a model's settings lack members that its kind of inputs requires."""
    kinds: dict[Inputs, Any] = {
        "tokens": TokenModel, "pairs": TokenModel, "images": ImageModel, "vectors": VectorModel
    }  # fmt: skip
    kind = kinds[model.inputs]
    lacking = lacks(model, kind)
    if lacking:
        raise UserError(
            f"Train.model=@{type(model).__name__}() has inputs={model.inputs!r}, but no "
            f"{', '.join(lacking)}; models.model.{kind.__name__} says what each of them is"
        )


def has_stages(model: Model) -> bool:
    """Whether a model's layers support pipeline parallelism."""
    return reads_tokens(model) or passes_of(model) > 1 or patches_of(model) is not None


def passes_of(model: Model) -> int:
    """Number of stacks of layers that a pipeline runs in sequence: each
    has `layers` of them."""
    return 2 if reads_pairs(model) and hasattr(model, "flops_of_stacks") else 1


def bias_speed_of(model: Model) -> float | None:
    """Return the step size of the router biases (auxiliary-loss-free balancing); None
    without any.
    """
    return None if model.experts is None else model.experts.bias_speed


def token_model(model: Model) -> TokenModel:
    """Narrow a model to one that reads tokens."""
    assert reads_tokens(model), f"{type(model).__name__} reads {model.inputs}"
    return model


def vector_model(model: Model) -> VectorModel:
    """Narrow a model to one that reads vectors."""
    assert reads_vectors(model), f"{type(model).__name__} reads {model.inputs}"
    return model


def pair_model(model: Model) -> TokenModel:
    """Narrow a model to one that reads pairs."""
    assert reads_pairs(model), f"{type(model).__name__} reads {model.inputs}"
    return model
