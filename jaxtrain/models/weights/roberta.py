"""RoBERTa (arXiv 1907.11692): Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights.bidirectional import (
    KEYS,
    encoder_names,
    normed,
    read_placed_sizes,
    write_placed_sizes,
)
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

_NAMES = (
    *encoder_names("roberta."),
    Name("lm_head.dense.weight", "transform", "DF->FD"),
    Name("lm_head.dense.bias", "transform_bias", "D->D"),
    *normed("lm_head.layer_norm", "norm", "D->D"),
    Name("lm_head.bias", "bias", "V->V"),
)


def _write(model: BERT) -> Mapping[str, Any] | None:
    if model.objective != "masked_token" or not model.first_position or model.pooling is not None:
        return None
    return write_placed_sizes(model)


def _names(_: BERT) -> tuple[Name, ...]:
    return _NAMES


FAMILY = Family(
    architecture="RobertaForMaskedLM",
    model_type="roberta",
    model=BERT,
    keys=KEYS,
    read=read_placed_sizes,
    write=_write,
    names=_names,
    prefix="roberta.",
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    buffers=r"roberta\.embeddings\.position_ids|roberta\.pooler\..*",
)
