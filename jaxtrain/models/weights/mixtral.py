"""Mixtral: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import only, used
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name

_MOE = "model.layers.{L}.block_sparse_moe"
_EXPERTS = (
    Name(f"{_MOE}.gate.weight", "layers/experts/router", "LDE->ED"),
    Name(f"{_MOE}.experts.{{E}}.w1.weight", "layers/experts/gate", "LEDF->FD"),
    Name(f"{_MOE}.experts.{{E}}.w3.weight", "layers/experts/up", "LEDF->FD"),
    Name(f"{_MOE}.experts.{{E}}.w2.weight", "layers/experts/down", "LEFD->DF"),
)


def _names(model: Mixtral) -> tuple[Name, ...]:
    return (*grouped_query.around(model), *grouped_query.ATTENTION, *_EXPERTS)


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-5, context_length=131072, rope_theta=1000000.0, kv_heads=8
    )
    grouped_query.reject_own_head_dim(asked)
    return {
        **sizes,
        "num_experts": asked.whole("num_local_experts", 8),
        "experts_per_token": asked.whole("num_experts_per_tok", 2),
        "balance_weight": asked.number("router_aux_loss_coef", 0.001),
        "sliding_window": grouped_query.read_window(asked, None),
    }


def _write(model: Mixtral) -> Mapping[str, Any] | None:
    wide = model.key_dim * model.num_heads != model.embed_dim
    is_qwen = model.qk_norm or model.qkv_bias or model.shared_mlp_dim is not None
    if wide or is_qwen or not model.normalize_gates:
        return None
    return {
        **grouped_query.write_sizes(model),
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.balance_weight,
        "sliding_window": model.sliding_window,
    }


FAMILY = grouped_query.family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    model=Mixtral,
    keys={
        **grouped_query.KEYS,
        **used(
            "num_local_experts",
            "num_experts_per_tok",
            "router_aux_loss_coef",
            "sliding_window",
        ),
        **grouped_query.ROUTER_OUTPUT,
        "router_jitter_noise": only(0.0),
    },  # fmt: skip
    aliases={"num_experts": "num_local_experts"},
    read=_read,
    write=_write,
    names=_names,
)
