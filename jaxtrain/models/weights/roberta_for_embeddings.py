"""RoBERTa without a head (sentence encoders): Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.bidirectional import (
    BARE_BUFFERS,
    ENCODER_KEYS,
    bare_names,
    read_placed_sizes,
    write_placed_sizes,
)
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.sentences import read_pooling, written_beside


def _read(asked: Asked) -> Mapping[str, Any]:
    return {**read_placed_sizes(asked), **read_pooling(asked)}


def _write(model: BERT) -> Mapping[str, Any] | None:
    if model.pooling is None or not model.first_position:
        return None
    return write_placed_sizes(model)


FAMILY = Family(
    architecture="RobertaModel",
    model_type="roberta",
    model=BERT,
    keys=ENCODER_KEYS,
    read=_read,
    write=_write,
    names=bare_names,
    prefix="",
    copies={},
    buffers=BARE_BUFFERS,
    beside=written_beside,
)
