"""Shared Hugging Face settings of Gemma and Gemma 2."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, only
from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked

ACTIVATION = "gelu_pytorch_tanh"
KEYS: KeyTable = {
    **grouped_query.KEYS,
    "tie_word_embeddings": only(True),
    "use_bidirectional_attention": only(None, False),
}


def read(asked: Asked, *, kv_heads: int = 16) -> Mapping[str, Any]:
    """The settings of a Gemma; kv_heads is how many there are where config.json does not say."""
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=8192, rope_theta=10000.0, kv_heads=kv_heads, tied=True
    )
    del sizes["tie_embeddings"]
    return {**sizes, "head_dim": asked.whole("head_dim", 256)}


def write(model: GroupedQuerySizes) -> Mapping[str, Any]:
    """What config.json says of them."""
    said = {**grouped_query.write_sizes(model), "attention_bias": False}
    return {**said, "hidden_act": ACTIVATION, "hidden_activation": ACTIVATION}
