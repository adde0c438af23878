"""Qwen1.5-MoE and Qwen2-MoE: Hugging Face names and settings; shared expert."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import only, used
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.weights import grouped_query, qwen_mixture
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name

_SHARED = (
    Name(f"{qwen_mixture.MLP}.shared_expert_gate.weight", "layers/share", "LDX->XD"),
    Name(f"{qwen_mixture.MLP}.shared_expert.gate_proj.weight", "layers/shared_gate", "LDF->FD"),
    Name(f"{qwen_mixture.MLP}.shared_expert.up_proj.weight", "layers/shared_up", "LDF->FD"),
    Name(f"{qwen_mixture.MLP}.shared_expert.down_proj.weight", "layers/shared_down", "LFD->DF"),
)


def _names(model: Mixtral) -> tuple[Name, ...]:
    own = (*grouped_query.ATTENTION, *grouped_query.BIASES, *qwen_mixture.EXPERTS, *_SHARED)
    return (*grouped_query.around(model), *own)


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = qwen_mixture.read_sizes(asked, kv_heads=16, mlp_dim=1408, experts=60, per_token=4)
    grouped_query.reject_own_head_dim(asked)
    shared = asked.whole("shared_expert_intermediate_size", 5632)
    return {**sizes, "qkv_bias": True, "shared_mlp_dim": shared}


def _write(model: Mixtral) -> Mapping[str, Any] | None:
    is_other = model.qk_norm or model.sliding_window is not None or model.head_dim is not None
    if is_other or not model.qkv_bias or model.shared_mlp_dim is None:
        return None
    said = qwen_mixture.write_sizes(model)
    return {**said, "shared_expert_intermediate_size": model.shared_mlp_dim, "qkv_bias": True}


FAMILY = grouped_query.family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    model=Mixtral,
    keys={
        **qwen_mixture.KEYS,
        **used("shared_expert_intermediate_size"),
        "qkv_bias": only(True),
    },
    read=_read,
    write=_write,
    names=_names,
)
