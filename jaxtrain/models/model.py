"""Protocols of model settings: what data, planning and training ask of an architecture."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

import jax
from flax import nnx

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.values import lacks
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.facts import AttentionFacts, ExpertsFacts

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
    """What is required of an architecture's settings, a frozen dataclass of sizes.

    `TokenModel`, `ImageModel` and `VectorModel` have the further attributes of each kind of input;
    the functions `..._of` below those that only some models have.

    Attributes:
      inputs: what it reads: rows of tokens (or of vectors, see `features_of`), images, pairs of
        rows of tokens (source and target), or vectors of numbers.
      settings: logical axis -> the field that gives it its size, for messages.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    inputs: ClassVar[Inputs]
    settings: ClassVar[dict[str, str]]

    # Of the others each is a field, a property, or a plain name in the class: `experts = None`.

    @property
    def objective(self) -> str:
        """What it is trained to do: a name of `training.objectives`."""
        ...

    @property
    def layers(self) -> int | None:
        """Equal layers in one module, from `parameters.stack`; None: there is no such stack."""
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
        """What each layer keeps of the tokens so far; empty: the model does not generate."""
        ...

    def build(self, key: jax.Array) -> nnx.Module:
        """The module with freshly drawn parameters."""
        ...

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one example: of its mathematics, without recomputation.

        Raises UserError where examples of this shape are too small for it.

        Args:
          shape: of the example's inputs: (T,) tokens or (T, F) of vectors, an image (H, W, C),
            (S, T) tokens of a source and a target, a vector (D,).
        """
        ...


class Unstacked:
    """What a model says that has no equal layers, attention or experts, and does not generate."""

    layers = None
    attention = None
    experts = None
    cached = ()


@runtime_checkable
class TokenModel(Model, Protocol):
    """Further attributes of a model whose inputs are tokens, or pairs of rows of tokens.

    Its module is a `Transformer`, or of pairs a `PairModule`.
    """

    @property
    def vocab_size(self) -> int:
        """Different tokens, of sources and targets alike."""
        ...

    @property
    def context_length(self) -> int:
        """The longest sequence, source or target, in tokens."""
        ...

    @property
    def embed_dim(self) -> int:
        """Width of what goes from layer to layer."""
        ...

    @property
    def layers(self) -> int:
        """Equal layers in one module, or in each of an encoder and a decoder."""
        ...


@runtime_checkable
class ImageModel(Model, Protocol):
    """Further attributes of a model whose inputs are images; its module is a `Predictor`."""

    @property
    def channels(self) -> int:
        """Channels of the images: 3 for RGB, 1 for grey."""
        ...

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        ...

    @property
    def least_pixels(self) -> int:
        """The side of the smallest images that it is made for; `verify` proves with such."""
        ...


@runtime_checkable
class VectorModel(Model, Protocol):
    """Further attributes of a model whose inputs are vectors; its module is a `Predictor`."""

    @property
    def features(self) -> int:
        """Numbers of a vector."""
        ...

    @property
    def outputs(self) -> int:
        """Number of classes, or of regression outputs."""
        ...


def reads_tokens(model: Model) -> TypeGuard[TokenModel]:
    """Whether a model's inputs are tokens."""
    return model.inputs == "tokens"


def reads_pairs(model: Model) -> TypeGuard[TokenModel]:
    """Whether a model's inputs are pairs of rows of tokens."""
    return model.inputs == "pairs"


def reads_images(model: Model) -> TypeGuard[ImageModel]:
    """Whether a model's inputs are images."""
    return model.inputs == "images"


def reads_vectors(model: Model) -> TypeGuard[VectorModel]:
    """Whether a model's inputs are vectors."""
    return model.inputs == "vectors"


# -- what only some models have -------------------------------------------------------------------


def features_of(model: Model) -> int | None:
    """Return the size of the vectors that a model reads in place of tokens; None: it reads none."""
    # A protocol would ask for all the rest too, which a section that was rejected may not have.
    return getattr(model, "features", None) if reads_tokens(model) else None


def token_classes_of(model: Model) -> int | None:
    """Return the number of classes of tokens or texts; None: the model cannot classify them."""
    return getattr(model, "num_classes", None) if reads_tokens(model) else None


def pooling_of(model: Model) -> "tuple[Pooling, bool] | None":
    """Return how a model makes one vector of a text: how it pools the tokens' hidden states, and
    whether it normalizes the result to length 1; None: it makes none."""
    pooling = getattr(model, "pooling", None)
    return None if pooling is None else (pooling, getattr(model, "normalized", False))


def tokens_per_position(model: Model) -> int:
    """Return how many tokens a model predicts at each position, the next one included."""
    return getattr(model, "predicted_tokens", 1)


def patches_of(model: Model) -> tuple[int, int] | None:
    """Return the positions and the width of what an image is from layer to layer; None: the model
    has no equal layers of images."""
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
    """Raises UserError where a model reads vectors in place of tokens, and its other settings are
    of tokens.

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
            f"{name}.vocab_size={model.vocab_size} does nothing with {name}.features={features}: "
            f"vectors are no tokens; leave it out, or set {name}.features=None"
        )


def classifies(model: Model) -> TypeGuard[TokenModel]:
    """Whether a model classifies tokens or texts."""
    return reads_tokens(model) and model.objective == "token_classification"


def require_complete(model: Model) -> None:
    """Raises UserError where a model's settings do not say what models of its inputs do."""
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
    """Whether a pipeline can go through a model's layers."""
    return reads_tokens(model) or passes_of(model) > 1 or patches_of(model) is not None


def passes_of(model: Model) -> int:
    """Stacks of layers that a pipeline takes its microbatches through one after the other: each
    has `layers` of them."""
    return 2 if reads_pairs(model) and hasattr(model, "flops_of_stacks") else 1


def token_model(model: Model) -> TokenModel:
    """The same model, which is known to read tokens."""
    assert reads_tokens(model), f"{type(model).__name__} reads {model.inputs}"
    return model


def vector_model(model: Model) -> VectorModel:
    """The same model, which is known to read vectors."""
    assert reads_vectors(model), f"{type(model).__name__} reads {model.inputs}"
    return model


def pair_model(model: Model) -> TokenModel:
    """The same model, which is known to read pairs."""
    assert reads_pairs(model), f"{type(model).__name__} reads {model.inputs}"
    return model
