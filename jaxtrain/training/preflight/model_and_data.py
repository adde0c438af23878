"""Validation of model and data together, and of settings that neither reads."""

import math
from collections.abc import Iterator
from typing import Any

from jaxtrain.data.batch import Batch, example_shape, kind_of
from jaxtrain.data.text.source import TextData, text_of
from jaxtrain.models.model import (
    ImageModel,
    Model,
    TokenModel,
    VectorModel,
    features_of,
    reads_images,
    reads_pairs,
    reads_tokens,
    reads_vectors,
    token_classes_of,
)
from jaxtrain.training.objectives.language_modeling import NextToken
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.settings import Config

# Requirements of settings: a sequence of tokens, a loop over stacked layers.
_OF_SEQUENCES = (
    "Attention.kernel", "Attention.context_parallel", "Loss.chunk_size", "Precision.matmul",
    "Sharding.sequence_parallel", "Sharding.collective_matmul", "Sharding.tensor_layout",
)  # fmt: skip
_OF_LAYERS = (
    "Remat.policy", "Remat.save", "Remat.offload", "Scan.layers_per_iteration", "Offload.gradients",
)  # fmt: skip

# Kind of inputs -> its name, and a source of it.
_KINDS = {
    "tokens": ("text", "TextData"),
    "pairs": ("pairs", "PairData"),
    "images": ("images", "ImageData"),
    "vectors": ("vectors", "VectorData"),
}


def validate(config: Config, *, reads_data: bool) -> Iterator[str]:
    """Yield an error message for each reason why the model cannot learn from the data.

    Args:
      config: the configuration.
      reads_data: whether the tokenizer is available, so that its vocabulary is compared with the
        model's.
    """
    model, data, name = config.train.model, config.train.data, type(config.train.model).__name__
    batch = data.abstract_batch(config.train.global_batch_size)
    inputs = batch.inputs
    wants, source = _KINDS[model.inputs]
    yield from config.train.task.validate_loss(config.loss)
    if model.inputs != kind_of(batch):
        gives = _KINDS[kind_of(batch)][0]
        if _is_a(data, "SequenceData"):
            gives = "sequences of vectors"
        yield (
            f"Train.model=@{name}() learns from {wants}, but Train.data=@{type(data).__name__}() "
            f"gives {gives}; use @{source}()"
        )
    elif features_of(model) is not None or _is_a(data, "SequenceData"):
        yield from _sequences(config, model, batch)
    elif reads_tokens(model):
        yield from config.train.task.validate_reference(
            batch, f"Train.data=@{type(data).__name__}()"
        )
        yield from _text(config, model, inputs.shape[1], _section(data))
        yield from _labels(config, model)
        if reads_data:
            yield from _vocabulary(model, data)
    elif reads_pairs(model):
        yield from _pairs(config, model, batch)
        if reads_data:
            yield from _vocabulary(model, data)
    else:
        yield from _of_no_sequence(config, model)
        yield from config.train.task.validate_targets(batch.targets, model)
        if reads_images(model):
            yield from _images(model, data, inputs.shape[-1])
            model.flops(inputs.shape[1:])  # rejects images that are too small
        elif reads_vectors(model):
            yield from _vectors(model, data, batch)


def _is_a(data: Any, *names: str) -> bool:
    """Whether data are of a class with one of these names; imports no module for others."""
    return any(base.__name__ in names for base in type(data).__mro__)


def _section(data: Any) -> str:
    """Return the section that messages name for text settings: TextData for mixtures and
    spans too.
    """
    return "TextData" if _is_a(data, "Mixture", "SpanData") else type(data).__name__


def _lacks(data: Any, size: str) -> Iterator[str]:
    """Yield an error if user-provided data lack a property to compare with the model's."""
    if size not in dir(data):
        yield (
            f"Train.data=@{type(data).__name__}() has no {size}, which is checked against the "
            f"model's; give the class a field or a property {size}"
        )


def _lengths(config: Config, text: TextData) -> Iterator[str]:
    """Yield why rows cannot have these lengths in addition to the longest."""
    for name, size in (("context", config.mesh.context), ("pipe", config.mesh.pipe)):
        if size != 1:
            yield (
                f"TextData.lengths={text.lengths} with Mesh.{name}={size}: arrays sent between "
                f"those devices have one length; use Mesh.{name}=1, or TextData.lengths=()"
            )
    chunk = config.loss.chunk_size
    if chunk is not None and any(length % chunk for length in text.row_lengths):
        yield (
            f"Loss.chunk_size={chunk} does not divide all of TextData.lengths={text.lengths} and "
            f"the longest; use {math.gcd(*text.row_lengths)}, or None"
        )


def _text(config: Config, model: TokenModel, length: int, section: str) -> Iterator[str]:
    text = text_of(config.train.data)
    if text is not None and text.fill_in_middle is not None:
        objective = config.train.task
        if not isinstance(objective, NextToken):
            yield (
                "TextData.fill_in_middle is for models that predict the next token, but "
                f"{type(model).__name__}.objective={objective.name!r}; use None"
            )
    if text is not None and text.lengths:
        yield from _lengths(config, text)
    if length > model.context_length:
        yield (
            f"{section}.sequence_length={length} is longer than {type(model).__name__}."
            f"context_length={model.context_length}; use at most {model.context_length}"
        )
    if model.attention is None:
        yield from _without_effect(
            config, "Attention.kernel", "Attention.context_parallel", "Sharding.tensor_layout"
        )


def _labels(config: Config, model: TokenModel) -> Iterator[str]:
    """Yield errors if data and objective differ in labels or tokens, or if labels exceed
    classes.
    """
    data: Any = config.train.data
    name, objective = type(model).__name__, config.train.task
    if not isinstance(objective, TokenObjective):
        return
    has_labels, classes = _is_a(data, "ClassedRows"), token_classes_of(model)
    if objective.labels and classes is None:
        yield f"{name}.objective={objective.name!r} predicts classes, and {name} has no num_classes"
    elif objective.labels != has_labels:
        gives = "labels" if has_labels else "texts alone"
        use = "LabelledText() or @TaggedText" if objective.labels else "TextData"
        yield (
            f"{name}.objective={objective.name!r}, but Train.data=@{type(data).__name__}() gives "
            f"{gives}; use @{use}(), or another {name}.objective"
        )
    elif has_labels and classes is not None and data.num_classes > classes:
        yield (
            f"{name}.num_classes={classes} is smaller than {data.section}.num_classes="
            f"{data.num_classes}; use at least {data.num_classes}"
        )


def _pairs(config: Config, model: TokenModel, batch: Batch) -> Iterator[str]:
    yield from _without_effect(config, "Loss.chunk_size", "Sharding.tensor_layout")
    if model.attention is None:
        yield from _without_effect(config, "Attention.kernel")
    name, data = type(model).__name__, config.train.data
    for setting, length in zip(
        ("source_length", "target_length"), example_shape(batch), strict=True
    ):
        if length > model.context_length:
            more = " by a smaller TextData.sequence_length" * _is_a(data, "SpanData")
            yield (
                f"{type(data).__name__}.{setting}={length} is longer than {name}.context_length="
                f"{model.context_length}; use at most {model.context_length}{more}"
            )


def _vocabulary(model: TokenModel, data: Any) -> Iterator[str]:
    lacking = list(_lacks(data, "vocab_size"))
    if lacking:
        yield from lacking
        return
    name, vocab_size = type(model).__name__, data.vocab_size
    if vocab_size > model.vocab_size:
        more = " and sentinels" * _is_a(data, "SpanData")
        whose = f"{type(data).__name__}'s {vocab_size} tokens"
        if "tokenizer" in dir(data):  # user-provided data may have none
            setting = f"{_section(data)}.tokenizer={data.tokenizer!r}"
            whose = f"the tokenizer's {vocab_size} tokens{more} ({setting})"
        yield (
            f"{name}.vocab_size={model.vocab_size} is smaller than {whose}; use at least "
            f"{vocab_size}"
        )


def _of_no_sequence(config: Config, model: Model) -> Iterator[str]:
    yield from _without_effect(config, *_OF_SEQUENCES)
    if model.layers is None:
        yield from _without_effect(config, *_OF_LAYERS)


def _vectors(model: VectorModel, data: Any, batch: Batch) -> Iterator[str]:
    name, features = type(model).__name__, batch.inputs.shape[1]
    if features != model.features:
        setting = f"{name}.features" if "features" in vars(model) else f"the first of {name}.widths"
        yield (
            f"{name} reads vectors of {model.features} values, but those of "
            f"{type(data).__name__} have {features}; set {setting} to {features}"
        )


def _sequences(config: Config, model: Model, batch: Batch) -> Iterator[str]:
    """Yield errors for models that read vectors instead of tokens, or data of vectors."""
    data: Any = config.train.data
    name, features = type(model).__name__, features_of(model)
    if not _is_a(data, "SequenceData"):
        yield (
            f"{name}.features={features} reads vectors, but Train.data=@{type(data).__name__}() "
            f"gives tokens; use @SequenceData(), or {name}.features=None"
        )
    elif features != data.features:
        has = "features" in vars(model)
        use = f"set {name}.features={data.features}" if has else "use @GRU() or another that has it"
        yield (
            f"{name} reads {f'vectors of {features} values' if features else 'tokens'}, but those "
            f"of Train.data=@SequenceData() have {data.features} values each; {use}"
        )
    elif reads_tokens(model):
        yield from _text(config, model, batch.inputs.shape[1], _section(data))
        yield from _labels(config, model)


def _images(model: ImageModel, data: Any, channels: int) -> Iterator[str]:
    name = type(model).__name__
    if channels != model.channels:
        yield (
            f"{name}.channels={model.channels}, but the images of {type(data).__name__} have "
            f"{channels}; set {name}.channels={channels}"
        )
    lacking = list(_lacks(data, "num_classes"))
    yield from lacking
    if not lacking and data.num_classes > model.num_classes:
        yield (
            f"{name}.num_classes={model.num_classes} is smaller than the data's "
            f"{data.num_classes} classes; set {name}.num_classes={data.num_classes}"
        )


def _without_effect(config: Config, *unread: str) -> Iterator[str]:
    """Yield an error for settings not at their defaults that the model does not read."""
    for setting in unread:
        section, field = setting.split(".")
        settings = getattr(config, section.lower())
        value, default = getattr(settings, field), getattr(type(settings)(), field)
        if value != default:
            name = type(config.train.model).__name__
            yield f"{setting}={value!r} has no effect for {name}; leave it at {default!r}"
