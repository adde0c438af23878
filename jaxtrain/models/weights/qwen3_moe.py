"""Qwen3-MoE: Hugging Face names and settings; QK-norm."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.weights import grouped_query, qwen_mixture
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name


def _names(model: Mixtral) -> tuple[Name, ...]:
    own = (*grouped_query.ATTENTION, *grouped_query.HEAD_NORMS, *qwen_mixture.EXPERTS)
    return (*grouped_query.around(model), *own)


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = qwen_mixture.read_sizes(asked, kv_heads=4, mlp_dim=768, experts=128, per_token=8)
    return {**sizes, "qk_norm": True, "head_dim": grouped_query.read_head_dim(asked)}


def _write(model: Mixtral) -> Mapping[str, Any] | None:
    is_other = model.qkv_bias or model.shared_mlp_dim is not None
    if not model.qk_norm or is_other or model.sliding_window is not None:
        return None
    return {**qwen_mixture.write_sizes(model), "attention_bias": False}


FAMILY = grouped_query.family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    model=Mixtral,
    keys=qwen_mixture.KEYS,
    aliases={"num_local_experts": "num_experts"},
    read=_read,
    write=_write,
    names=_names,
)
