"""BERT for sequence classification: Hugging Face names and settings.

Theirs classifies a text at its first token; ours classifies every token, the first one included.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.bidirectional import (
    CLASSES_KEYS,
    encoder_names,
    read_sizes,
    write_sizes,
)
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.labels import read_classes, write_classes
from jaxtrain.models.weights.names import Name

_NAMES = (
    *encoder_names("bert."),
    Name("bert.pooler.dense.weight", "transform", "DF->FD"),
    Name("bert.pooler.dense.bias", "transform_bias", "D->D"),
    Name("classifier.weight", "output", "CD->CD"),
    Name("classifier.bias", "bias", "C->C"),
)


def _read(asked: Asked) -> Mapping[str, Any]:
    classes = read_classes(asked)
    return {**read_sizes(asked), "objective": "token_classification", "num_classes": classes}


def _write(model: BERT) -> Mapping[str, Any] | None:
    if model.objective != "token_classification" or model.first_position:
        return None
    return {**write_sizes(model), **write_classes(model.num_classes)}


def _names(_: BERT) -> tuple[Name, ...]:
    return _NAMES


FAMILY = Family(
    architecture="BertForSequenceClassification",
    model_type="bert",
    model=BERT,
    keys=CLASSES_KEYS,
    read=_read,
    write=_write,
    names=_names,
    prefix="bert.",
    copies={},
    buffers=r"bert\.embeddings\.position_ids",
)
