"""BERT and RoBERTa (arXiv 1907.11692): Hugging Face names and settings, one family per head."""

import functools
from typing import Any

from jaxtrain.config.key_table import KeyTable, ignore_keys, only, read_keys
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights import config_file, sentences
from jaxtrain.models.weights.config_file import (
    CLASSES,
    ConfigFile,
    Row,
    constant,
    holds,
    integer,
    number,
    requires,
)
from jaxtrain.models.weights.family import Family, Name, layer_norm, linear

# -- names -----------------------------------------------------------------------------------------


def _encoder(stem: str) -> tuple[Name, ...]:
    """Return the name lines of the body, below the heads.

    Args:
      stem: their prefix; "" for a model without a head.
    """
    layer = f"{stem}encoder.layer.{{L}}"
    qkv = f"{layer}.attention.self.{{P:query|key|value}}"
    return (
        Name(f"{stem}embeddings.word_embeddings.weight", "token_embedding", "VD->VD"),
        Name(f"{stem}embeddings.position_embeddings.weight", "position_embedding", "CD->CD"),
        Name(f"{stem}embeddings.token_type_embeddings.weight", "type_embedding", "YD->YD"),
        *layer_norm(f"{stem}embeddings.LayerNorm", "embedding_norm", "D->D"),
        *linear(qkv, "layers/qkv", "LPDNH->(NH)D", "LPNH->(NH)"),
        *linear(f"{layer}.attention.output.dense", "layers/out", "LNHD->D(NH)", "LD->D"),
        *layer_norm(f"{layer}.attention.output.LayerNorm", "layers/attention_norm", "LD->D"),
        *linear(f"{layer}.intermediate.dense", "layers/up", "LDF->FD", "LF->F"),
        *linear(f"{layer}.output.dense", "layers/down", "LFD->DF", "LD->D"),
        *layer_norm(f"{layer}.output.LayerNorm", "layers/mlp_norm", "LD->D"),
    )


def _transform(theirs: str) -> tuple[Name, ...]:
    """Return the name lines of a head's layer."""
    return linear(theirs, "transform", "DF->FD", "D->D")


_HEAD = "cls.predictions"
_BERT_MASKED = (
    *_encoder("bert."),
    *_transform(f"{_HEAD}.transform.dense"),
    *layer_norm(f"{_HEAD}.transform.LayerNorm", "norm", "D->D"),
    Name(f"{_HEAD}.bias", "bias", "V->V"),
)
_ROBERTA_MASKED = (
    *_encoder("roberta."),
    *_transform("lm_head.dense"),
    *layer_norm("lm_head.layer_norm", "norm", "D->D"),
    Name("lm_head.bias", "bias", "V->V"),
)
_CLASSIFIER = (
    *_encoder("bert."),
    *_transform("bert.pooler.dense"),
    Name("classifier.weight", "output", "CD->CD"),
    Name("classifier.bias", "bias", "C->C"),
)


def _bare(model: BERT) -> tuple[Name, ...]:
    """Names of an encoder without a head, and of a classifier's body."""
    has_pooler = model.objective == "token_classification"
    return (*_encoder(""), *(_transform("pooler.dense") if has_pooler else ()))


# -- settings --------------------------------------------------------------------------------------

_OWN: KeyTable = {
    **ignore_keys(
        "it belongs to a pooler in the authors' code, which no published model has",
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    ),
    "position_embedding_type": only("absolute"),
}  # fmt: skip
_POSITIONS = integer("max_position_embeddings", "context_length", 512)


def _read_positions(config: ConfigFile) -> dict[str, Any]:
    """Positions start after the padding token's id, 1: two rows of the
    position table come before."""
    first = config.integer("pad_token_id", 1) + 1
    context_length = config.integer("max_position_embeddings", 512) - first
    return {"context_length": context_length, "first_position": first}


_ROBERTA_POSITIONS = Row(
    read_keys("max_position_embeddings"),
    _read_positions,
    lambda model: {"max_position_embeddings": model.context_length + model.first_position},
)


def _rows(keys: KeyTable, positions: Row) -> tuple[Row, ...]:
    """Return the rows of an encoder.

    Args:
      keys: the shared key table of the kind of head.
      positions: the row of the position table.
    """
    return (
        Row({**keys, **_OWN}),
        integer("vocab_size", "vocab_size"),
        integer("num_hidden_layers", "num_layers"),
        integer("hidden_size", "embed_dim"),
        integer("num_attention_heads", "num_heads"),
        integer("intermediate_size", "mlp_dim"),
        positions,
        integer("type_vocab_size", "token_types", 2),
        number("layer_norm_eps", "norm_eps", 1e-12),
        constant("hidden_act", "gelu"),
        constant("tie_word_embeddings", True),
        constant("is_decoder", False),
    )


def _bert_rows(keys: KeyTable) -> tuple[Row, ...]:
    return (*_rows(keys, _POSITIONS), holds(first_position=0))


def _roberta_rows(keys: KeyTable) -> tuple[Row, ...]:
    return (
        *_rows(keys, _ROBERTA_POSITIONS),
        requires(lambda model: model.first_position > 0),
        Row(write=lambda model: {"pad_token_id": model.first_position - 1}),
    )


_MASKED = holds(objective="masked_token", pooling=None)
_POOLING = (
    Row(read=sentences.read_pooling),
    requires(lambda model: model.pooling is not None),
)

_bert = functools.partial(Family, model_type="bert", model=BERT)
_roberta = functools.partial(Family, model_type="roberta", model=BERT)
_bare_encoder = {
    "names": _bare,
    "prefix": "",
    "copies": {},
    "buffers": r"embeddings\.position_ids|pooler\..*",
    "extra_files": sentences.write_sentence_files,
}
FAMILIES = (
    _bert(
        architecture="BertForMaskedLM",
        rows=(*_bert_rows(config_file.LANGUAGE), _MASKED),
        names=lambda _: _BERT_MASKED,
        prefix="bert.",
        copies={
            f"{_HEAD}.decoder.weight": "bert.embeddings.word_embeddings.weight",
            f"{_HEAD}.decoder.bias": f"{_HEAD}.bias",
        },
        # Position ids in files of transformers before 4.31; the heads of other tasks.
        buffers=r"bert\.embeddings\.position_ids|bert\.pooler\..*|cls\.seq_relationship\..*",
    ),
    # Sentence encoders.
    _bert(
        architecture="BertModel",
        rows=(*_bert_rows(config_file.ENCODER), *_POOLING),
        **_bare_encoder,
    ),
    # Theirs classifies a text at its first token; ours classifies every token.
    _bert(
        architecture="BertForSequenceClassification",
        rows=(
            *_bert_rows(config_file.CLASSIFIER), CLASSES, holds(objective="token_classification")
        ),
        names=lambda _: _CLASSIFIER,
        prefix="bert.",
        copies={},
        buffers=r"bert\.embeddings\.position_ids",
    ),
    _roberta(
        architecture="RobertaForMaskedLM",
        rows=(*_roberta_rows(config_file.LANGUAGE), _MASKED),
        names=lambda _: _ROBERTA_MASKED,
        prefix="roberta.",
        copies={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        buffers=r"roberta\.embeddings\.position_ids|roberta\.pooler\..*",
    ),
    _roberta(
        architecture="RobertaModel",
        rows=(*_roberta_rows(config_file.ENCODER), *_POOLING),
        **_bare_encoder,
    ),
)  # fmt: skip
