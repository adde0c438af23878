"""Shared names and settings of Hugging Face families with BERT's encoder."""

from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights import config_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name


def normed(theirs: str, ours: str, form: str) -> tuple[Name, Name]:
    """The two lines of a layer norm, whose name there ends so."""
    return (
        Name(f"{theirs}.weight", f"{ours}_scale", form),
        Name(f"{theirs}.bias", f"{ours}_bias", form),
    )


def encoder_names(stem: str) -> tuple[Name, ...]:
    """Of all below the heads, in a model whose names begin so, or where they are bare with ""."""
    layer = f"{stem}encoder.layer.{{L}}"
    qkv = f"{layer}.attention.self.{{P:query|key|value}}"
    return (
        Name(f"{stem}embeddings.word_embeddings.weight", "token_embedding", "VD->VD"),
        Name(f"{stem}embeddings.position_embeddings.weight", "position_embedding", "CD->CD"),
        Name(f"{stem}embeddings.token_type_embeddings.weight", "type_embedding", "YD->YD"),
        *normed(f"{stem}embeddings.LayerNorm", "embedding_norm", "D->D"),
        Name(f"{qkv}.weight", "layers/qkv", "LPDNH->(NH)D"),
        Name(f"{qkv}.bias", "layers/qkv_bias", "LPNH->(NH)"),
        Name(f"{layer}.attention.output.dense.weight", "layers/out", "LNHD->D(NH)"),
        Name(f"{layer}.attention.output.dense.bias", "layers/out_bias", "LD->D"),
        *normed(f"{layer}.attention.output.LayerNorm", "layers/attention_norm", "LD->D"),
        Name(f"{layer}.intermediate.dense.weight", "layers/up", "LDF->FD"),
        Name(f"{layer}.intermediate.dense.bias", "layers/up_bias", "LF->F"),
        Name(f"{layer}.output.dense.weight", "layers/down", "LFD->DF"),
        Name(f"{layer}.output.dense.bias", "layers/down_bias", "LD->D"),
        *normed(f"{layer}.output.LayerNorm", "layers/mlp_norm", "LD->D"),
    )


_BARE = encoder_names("")
# What a head for classes begins with.
_POOLER = (
    Name("pooler.dense.weight", "transform", "DF->FD"),
    Name("pooler.dense.bias", "transform_bias", "D->D"),
)
# Of models without a head.
BARE_BUFFERS = r"embeddings\.position_ids|pooler\..*"


def bare_names(model: BERT) -> tuple[Name, ...]:
    """Of an encoder without a head, and of the body of a model of classes that begins with one."""
    return (*_BARE, *_POOLER) if model.objective == "token_classification" else _BARE


_OWN: KeyTable = {
    **used(
        "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads",
        "intermediate_size", "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
    ),
    **irrelevant(
        "it is of the pooler of the authors' code, which no published model has",
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    ),
    "hidden_act": only("gelu"),
    "tie_word_embeddings": only(True),
    "is_decoder": only(False),
    "position_embedding_type": only("absolute"),
}  # fmt: skip
# What a config.json has of models of masked language, without a head, and of classes.
KEYS: KeyTable = {**config_keys.LANGUAGE, **_OWN}
ENCODER_KEYS: KeyTable = {**config_keys.ENCODER, **_OWN}
CLASSES_KEYS: KeyTable = {**config_keys.CLASSES, **_OWN}


def read_sizes(asked: Asked) -> dict[str, Any]:
    """The settings of all of them."""
    return {
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": asked.whole("num_hidden_layers"),
        "embed_dim": asked.whole("hidden_size"),
        "num_heads": asked.whole("num_attention_heads"),
        "mlp_dim": asked.whole("intermediate_size"),
        "context_length": asked.whole("max_position_embeddings", 512),
        "token_types": asked.whole("type_vocab_size", 2),
        "norm_eps": asked.number("layer_norm_eps", 1e-12),
    }


def write_sizes(model: BERT) -> dict[str, Any]:
    """What config.json says of all of them."""
    return {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_dim,
        "max_position_embeddings": model.context_length + model.first_position,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "is_decoder": False,
    }


def read_placed_sizes(asked: Asked) -> dict[str, Any]:
    """The settings of a RoBERTa, whose places are counted from the one after its padding token's
    number, 1: two rows of its table of positions are before them."""
    first, sizes = asked.whole("pad_token_id", 1) + 1, read_sizes(asked)
    return {**sizes, "context_length": sizes["context_length"] - first, "first_position": first}


def write_placed_sizes(model: BERT) -> dict[str, Any]:
    """What config.json says of a RoBERTa."""
    return {**write_sizes(model), "pad_token_id": model.first_position - 1}
