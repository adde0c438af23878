"""Whether a model and its data fit together, and which settings neither of them reads."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.models.model import ImageModel, TokenModel, reads_images, reads_tokens
from jaxtrain.training.settings import Config

# What a loop over equal layers, attention and a sequence read: nothing else does.
_OF_SEQUENCES = (
    "Remat.policy", "Scan.layers_per_iteration", "Attention.kernel", "Attention.context_parallel",
    "Loss.chunk_size", "Precision.matmul",
)  # fmt: skip


def refuse(config: Config, *, reads_data: bool) -> Iterator[str]:
    """A sentence for each reason why the model cannot learn from the data.

    Args:
      config: the configuration.
      reads_data: whether the tokenizer is at hand, and its vocabulary compared with the model's.
    """
    model, data, name = config.train.model, config.train.data, type(config.train.model).__name__
    inputs = data.abstract_batch(config.train.global_batch_size).inputs
    wants = "text" if model.inputs == "tokens" else "images"
    gives = "text" if inputs.ndim == 2 else "images"
    if wants != gives:
        yield (
            f"Train.model=@{name}() learns from {wants}, but Train.data=@{type(data).__name__}() "
            f"gives {gives}; use {'@TextData()' if wants == 'text' else '@ImageData()'}"
        )
    elif reads_tokens(model):
        yield from _text(config, model, inputs.shape[1])
        if reads_data:
            yield from _vocabulary(model, data)
    elif reads_images(model):
        yield from _images(config, model, data, inputs.shape[-1])


def _text(config: Config, model: TokenModel, length: int) -> Iterator[str]:
    if length > model.context_length:
        yield (
            f"TextData.sequence_length={length} is longer than {type(model).__name__}."
            f"context_length={model.context_length}; use at most {model.context_length}"
        )
    if model.attention is None:
        yield from _without_effect(config, "Attention.kernel", "Attention.context_parallel")


def _vocabulary(model: TokenModel, data: Any) -> Iterator[str]:
    name, vocab_size = type(model).__name__, data.vocab_size
    if vocab_size > model.vocab_size:
        yield (
            f"{name}.vocab_size={model.vocab_size} is smaller than the tokenizer's {vocab_size} "
            f"tokens (TextData.tokenizer={data.tokenizer!r}); use at least {vocab_size}"
        )


def _images(config: Config, model: ImageModel, data: Any, channels: int) -> Iterator[str]:
    name = type(model).__name__
    yield from _without_effect(config, *_OF_SEQUENCES)
    if channels != model.channels:
        yield (
            f"{name}.channels={model.channels}, but the images of {type(data).__name__} have "
            f"{channels}; set {name}.channels={channels}"
        )
    if data.num_classes > model.num_classes:
        yield (
            f"{name}.num_classes={model.num_classes} is smaller than the data's "
            f"{data.num_classes} classes; set {name}.num_classes={data.num_classes}"
        )


def _without_effect(config: Config, *unread: str) -> Iterator[str]:
    """Settings that the model does not read and that are not at their defaults."""
    for setting in unread:
        section, field = setting.split(".")
        settings = getattr(config, section.lower())
        value, default = getattr(settings, field), getattr(type(settings)(), field)
        if value != default:
            name = type(config.train.model).__name__
            yield f"{setting}={value!r} does nothing for {name}; leave it at {default!r}"
