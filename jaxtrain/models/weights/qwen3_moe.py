"""Qwen 3 with experts: Mixtral whose queries and keys are normed; names and settings elsewhere."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

_MLP = "model.layers.{L}.mlp"
_EXPERTS = (
    Name(f"{_MLP}.gate.weight", "layers/experts/router", "LDE->ED"),
    Name(f"{_MLP}.experts.{{E}}.gate_proj.weight", "layers/experts/gate", "LEDF->FD"),
    Name(f"{_MLP}.experts.{{E}}.up_proj.weight", "layers/experts/up", "LEDF->FD"),
    Name(f"{_MLP}.experts.{{E}}.down_proj.weight", "layers/experts/down", "LEFD->DF"),
)


def _names(model: Mixtral) -> tuple[Name, ...]:
    own = (*grouped_query.ATTENTION, *grouped_query.HEAD_NORMS, *_EXPERTS)
    return (*grouped_query.around(model), *own)


def _read(asked: Asked) -> Mapping[str, Any]:
    asked.only("attention_bias", [False], default=False)
    asked.only("use_sliding_window", [False], default=False)
    asked.only("decoder_sparse_step", [1], default=1)
    asked.only("mlp_only_layers", [[]], default=[])
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=32768, rope_theta=10000.0, kv_heads=4
    )
    return {
        **sizes,
        "mlp_dim": asked.whole("moe_intermediate_size", 768),
        "num_experts": asked.whole("num_experts", asked.whole("num_local_experts", 128)),
        "experts_per_token": asked.whole("num_experts_per_tok", 8),
        "normalize_gates": asked.flag("norm_topk_prob", False),
        "balance_weight": asked.number("router_aux_loss_coef", 0.001),
        "qk_norm": True,
        "head_dim": grouped_query.read_head_dim(asked),
    }


def _write(model: Mixtral) -> Mapping[str, Any] | None:
    if not model.qk_norm or model.sliding_window is not None:
        return None
    return {
        **grouped_query.write_sizes(model),
        "moe_intermediate_size": model.mlp_dim,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.normalize_gates,
        "router_aux_loss_coef": model.balance_weight,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    model=Mixtral,
    read=_read,
    write=_write,
    names=_names,
    prefix=grouped_query.PREFIX,
    copies=grouped_query.COPIES,
    buffers=grouped_query.BUFFERS,
)
