"""What the first two Gemmas share elsewhere: settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked

# "gelu" is what the first files say, and means the same there.
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")


def read(asked: Asked, *, kv_heads: int | None = None) -> Mapping[str, Any]:
    """The settings of a Gemma; kv_heads is how many there are where config.json does not say."""
    asked.only("attention_bias", [False], default=False)
    asked.only("tie_word_embeddings", [True], default=True)
    asked.only("use_bidirectional_attention", [None, False], default=None)
    asked.only("hidden_activation", _ACTIVATIONS, default=_ACTIVATIONS[0])
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=8192, rope_theta=10000.0, kv_heads=kv_heads,
        activations=_ACTIVATIONS, tied=True,
    )  # fmt: skip
    del sizes["tie_embeddings"]
    return {**sizes, "head_dim": asked.whole("head_dim", 256)}


def write(model: GroupedQuerySizes) -> Mapping[str, Any]:
    """What config.json says of them."""
    activation = _ACTIVATIONS[0]
    said = {**grouped_query.write_sizes(model), "attention_bias": False}
    return {**said, "hidden_act": activation, "hidden_activation": activation}
