"""BERT for masked language modeling: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights.bidirectional import (
    KEYS,
    encoder_names,
    normed,
    read_sizes,
    write_sizes,
)
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

_HEAD = "cls.predictions"
_NAMES = (
    *encoder_names("bert."),
    Name(f"{_HEAD}.transform.dense.weight", "transform", "DF->FD"),
    Name(f"{_HEAD}.transform.dense.bias", "transform_bias", "D->D"),
    *normed(f"{_HEAD}.transform.LayerNorm", "norm", "D->D"),
    Name(f"{_HEAD}.bias", "bias", "V->V"),
)


def _write(model: BERT) -> Mapping[str, Any] | None:
    if model.objective != "masked_token" or model.first_position or model.pooling is not None:
        return None
    return write_sizes(model)


def _names(_: BERT) -> tuple[Name, ...]:
    return _NAMES


FAMILY = Family(
    architecture="BertForMaskedLM",
    model_type="bert",
    model=BERT,
    keys=KEYS,
    read=read_sizes,
    write=_write,
    names=_names,
    prefix="bert.",
    copies={
        f"{_HEAD}.decoder.weight": "bert.embeddings.word_embeddings.weight",
        f"{_HEAD}.decoder.bias": f"{_HEAD}.bias",
    },
    # Places in order, in files of transformers before 4.31; the heads of other tasks.
    buffers=r"bert\.embeddings\.position_ids|bert\.pooler\..*|cls\.seq_relationship\..*",
)
