"""Shared Hugging Face names and settings of Qwen's mixture-of-experts models."""

from typing import Any

from jaxtrain.config.key_table import KeyTable, only, used
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name

MLP = "model.layers.{L}.mlp"
EXPERTS = (
    Name(f"{MLP}.gate.weight", "layers/experts/router", "LDE->ED"),
    Name(f"{MLP}.experts.{{E}}.gate_proj.weight", "layers/experts/gate", "LEDF->FD"),
    Name(f"{MLP}.experts.{{E}}.up_proj.weight", "layers/experts/up", "LEDF->FD"),
    Name(f"{MLP}.experts.{{E}}.down_proj.weight", "layers/experts/down", "LEFD->DF"),
)


KEYS: KeyTable = {
    **grouped_query.KEYS,
    **grouped_query.NO_WINDOW,
    **used(
        "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob",
        "router_aux_loss_coef",
    ),
    **grouped_query.ROUTER_OUTPUT,
    "decoder_sparse_step": only(1),
    "mlp_only_layers": only([]),
}  # fmt: skip


def read_sizes(
    asked: Asked, *, kv_heads: int, mlp_dim: int, experts: int, per_token: int
) -> dict[str, Any]:
    """The settings of Qwen's mixtures; the others are what holds where it does not say."""
    grouped_query.reject_other_layers(asked)
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=32768, rope_theta=10000.0, kv_heads=kv_heads
    )
    return {
        **sizes,
        "mlp_dim": asked.whole("moe_intermediate_size", mlp_dim),
        "num_experts": asked.whole("num_experts", experts),
        "experts_per_token": asked.whole("num_experts_per_tok", per_token),
        "normalize_gates": asked.flag("norm_topk_prob", False),
        "balance_weight": asked.number("router_aux_loss_coef", 0.001),
    }


def write_sizes(model: Mixtral) -> dict[str, Any]:
    """What config.json says of all of them."""
    return {
        **grouped_query.write_sizes(model),
        "moe_intermediate_size": model.mlp_dim,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.normalize_gates,
        "router_aux_loss_coef": model.balance_weight,
        "use_sliding_window": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
