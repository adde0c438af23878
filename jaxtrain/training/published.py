"""Configuration of a published model: `hf:DIR` instead of a .gin file.

Its sizes are those of DIR's config.json and its first parameters DIR's; everything else is a
starting point for fine-tuning and can be overridden. Without a tokenizer.json its data
are random tokens, until a source and a tokenizer are bound.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.config.shipped import HUGGING_FACE
from jaxtrain.models.model import (
    ImageModel,
    Model,
    TokenModel,
    pooling_of,
    reads_images,
    reads_pairs,
    token_model,
)
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights.folder import (
    PREPROCESSOR,
    SENTENCES,
    TOKENIZER,
    Published,
    json_object,
    open_published,
)
from jaxtrain.models.weights.preprocessor import image_settings
from jaxtrain.training.objectives.tokens import reserved_tokens

_USUAL_SIDE = 224  # ImageNet's, as the default


def config_text(name: str) -> str:
    """Return the gin text for the Hugging Face folder or GGUF file of `hf:DIR`.

    Raises:
      UserError: there is no such folder, or its config.json has unsupported settings.
    """
    source = open_published(name.removeprefix(HUGGING_FACE), named=HUGGING_FACE)
    return "\n".join(_lines(source)) + "\n"


def _lines(source: Published) -> Iterator[str]:
    model = source.family_and_model[1]
    kind = type(model).__name__
    yield f"Train.model = @{kind}()"
    for field in dataclasses.fields(model):
        yield f"{kind}.{field.name} = {getattr(model, field.name)!r}"
    yield f"Train.start_from = {str(source.path)!r}"
    # A tenth of the pretraining learning rate.
    yield "Train.steps = 1000"
    yield "Train.global_batch_size = 8"
    yield "Optimizer.learning_rate = 2e-5"
    yield "Mesh.fsdp = -1"
    if reads_images(model):
        yield from _images(source, model)
    elif reads_pairs(model):
        yield from _pairs(source, model)
    elif model.objective == "token_classification":
        yield from _labelled_data(source, model)
    else:
        yield from _text(source, model)


def _read_json(source: Published, name: str) -> Mapping[str, Any]:
    """Return the contents of a JSON file next to the weights; empty if there is no such file."""
    return json_object(source.extra_files().get(name, b"{}"), source.path / name)


def _images(source: Published, model: ImageModel) -> Iterator[str]:
    """Yield bindings for random images, preprocessed as the folder's own images are for
    the model.
    """
    yield "Train.data = @ImageData()"
    yield "ImageData.source = 'synthetic'"
    yield f"ImageData.channels = {model.channels}"
    yield f"ImageData.num_classes = {model.num_classes}"
    if PREPROCESSOR not in source.extra_files():
        side = model.image_size if isinstance(model, ViT) else _USUAL_SIDE
        yield f"ImageData.image_size = {max(side, model.least_pixels)}"
        return
    where = str(source.path / PREPROCESSOR)
    for name, value in image_settings(_read_json(source, PREPROCESSOR), model, where=where).items():
        yield f"ImageData.{name} = {value!r}"


def _labelled_data(source: Published, published: Model) -> Iterator[str]:
    """Yield bindings for random texts with random labels, with the tokenizer set."""
    model: Any = token_model(published)
    yield "Train.data = @LabelledText()"
    yield f"LabelledText.synthetic_vocab_size = {model.vocab_size}"
    yield f"LabelledText.num_classes = {model.num_classes}"
    if (source.path / TOKENIZER).is_file():
        yield f"LabelledText.tokenizer = {str(source.path / TOKENIZER)!r}"
    yield f"LabelledText.sequence_length = {min(model.context_length, 128)}"


def _text(source: Published, published: Model) -> Iterator[str]:
    model = token_model(published)
    yield "Train.data = @TextData()"
    has_tokenizer = (source.path / TOKENIZER).is_file()
    if has_tokenizer:
        yield f"TextData.tokenizer = {str(source.path / TOKENIZER)!r}"
    # Bytes would differ from its training tokens; a sentence encoder is used
    # unchanged, and its vocabulary may have no room for a mask token.
    if not has_tokenizer or pooling_of(model) is not None:
        yield "TextData.source = 'synthetic'"
        yield f"TextData.synthetic_vocab_size = {model.vocab_size - reserved_tokens(model)}"
    # Rows have the usual length for fine-tuning, or the encoder's training length.
    longest = _read_json(source, SENTENCES).get("max_seq_length")
    usual = longest if isinstance(longest, int) and longest > 0 else 1024
    yield f"TextData.sequence_length = {min(model.context_length, usual)}"


def _pairs(source: Published, model: TokenModel) -> Iterator[str]:
    """Yield bindings for random tokens until pairs are bound, with the tokenizer set."""
    yield "Train.data = @PairData()"
    yield "PairData.source = 'synthetic'"
    yield f"PairData.synthetic_vocab_size = {model.vocab_size}"
    if (source.path / TOKENIZER).is_file():
        yield f"PairData.tokenizer = {str(source.path / TOKENIZER)!r}"
    begin = source.content.get("decoder_start_token_id")
    yield f"PairData.begin = {begin or 0}"
    for name in ("source_length", "target_length"):
        yield f"PairData.{name} = {min(model.context_length, 128)}"
