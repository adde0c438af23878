"""Mixtral, Qwen 2 MoE, Qwen 3 MoE and GPT-OSS: Hugging Face names and settings."""

from typing import Any

from jaxtrain.config.key_table import only, read_keys
from jaxtrain.models.transformers.gpt_oss import GPTOSS
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.weights.config_file import (
    ConfigFile,
    Row,
    constant,
    flag,
    holds,
    ignore,
    integer,
    number,
    requires,
)
from jaxtrain.models.weights.families.grouped_query import (
    ATTENTION,
    BIASES,
    HEAD_NORMS,
    NO_WINDOW,
    ROUTER_OUTPUT,
    embedding_names,
    family,
    head_dim,
    layer_types,
    rows,
    window,
)
from jaxtrain.models.weights.family import Name, in_turn
from jaxtrain.models.weights.formats import awq, mxfp4

_MOE = "model.layers.{L}.block_sparse_moe"
_EXPERTS = (
    Name(f"{_MOE}.gate.weight", "layers/experts/router", "LDE->ED"),
    Name(f"{_MOE}.experts.{{E}}.w1.weight", "layers/experts/gate", "LEDF->FD"),
    Name(f"{_MOE}.experts.{{E}}.w3.weight", "layers/experts/up", "LEDF->FD"),
    Name(f"{_MOE}.experts.{{E}}.w2.weight", "layers/experts/down", "LEFD->DF"),
)
_BALANCE = number("router_aux_loss_coef", "balance_weight", 0.001)

_MIXTRAL = family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    model=Mixtral,
    rows=(
        *rows(norm_eps=1e-5, context_length=131072, rope_theta=1000000.0, kv_heads=8),
        integer("num_local_experts", "num_experts", 8),
        integer("num_experts_per_tok", "experts_per_token", 2),
        _BALANCE,
        window(None),
        Row({**ROUTER_OUTPUT, "router_jitter_noise": only(0.0)}),
        holds(qkv_bias=False, qk_norm=False, shared_mlp_dim=None, normalize_gates=True),
        requires(lambda model: model.attention.key_dim * model.num_heads == model.embed_dim),
    ),
    aliases={"num_experts": "num_local_experts"},
    names=lambda model: (*embedding_names(model), *ATTENTION, *_EXPERTS),
)

_MLP = "model.layers.{L}.mlp"
_QWEN_EXPERTS = (
    Name(f"{_MLP}.gate.weight", "layers/experts/router", "LDE->ED"),
    Name(f"{_MLP}.experts.{{E}}.gate_proj.weight", "layers/experts/gate", "LEDF->FD"),
    Name(f"{_MLP}.experts.{{E}}.up_proj.weight", "layers/experts/up", "LEDF->FD"),
    Name(f"{_MLP}.experts.{{E}}.down_proj.weight", "layers/experts/down", "LEFD->DF"),
)
_QWEN_SHARED = (
    Name(f"{_MLP}.shared_expert_gate.weight", "layers/share", "LDX->XD"),
    Name(f"{_MLP}.shared_expert.gate_proj.weight", "layers/shared_gate", "LDF->FD"),
    Name(f"{_MLP}.shared_expert.up_proj.weight", "layers/shared_up", "LDF->FD"),
    Name(f"{_MLP}.shared_expert.down_proj.weight", "layers/shared_down", "LFD->DF"),
)


def _qwen_rows(
    *, kv_heads: int, mlp_dim: int, experts: int, per_token: int, **own: Any
) -> tuple[Row, ...]:
    """Return the rows of Qwen's mixtures; the values are those of missing keys."""
    return (
        *rows(norm_eps=1e-6, context_length=32768, rope_theta=10000.0, kv_heads=kv_heads, **own),
        # Instead of intermediate_size, which all files have.
        integer("moe_intermediate_size", "mlp_dim", mlp_dim),
        integer("num_experts", "num_experts", experts),
        integer("num_experts_per_tok", "experts_per_token", per_token),
        flag("norm_topk_prob", "normalize_gates", False),
        _BALANCE,
        *NO_WINDOW,
        constant("decoder_sparse_step", 1),
        constant("mlp_only_layers", []),
        Row(ROUTER_OUTPUT),
        holds(sliding_window=None),
    )


# Qwen1.5-MoE and Qwen2-MoE; shared expert.
_QWEN2 = family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    model=Mixtral,
    rows=(
        *_qwen_rows(kv_heads=16, mlp_dim=1408, experts=60, per_token=4),
        integer("shared_expert_intermediate_size", "shared_mlp_dim", 5632),
        constant("qkv_bias", True),
        holds(head_dim=None, qkv_bias=True, qk_norm=False),
        requires(lambda model: model.shared_mlp_dim is not None),
    ),
    names=lambda model: (
        *embedding_names(model), *ATTENTION, *BIASES, *_QWEN_EXPERTS, *_QWEN_SHARED,
    ),
)  # fmt: skip
# QK-norm.
_QWEN3 = family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    model=Mixtral,
    rows=(
        *_qwen_rows(kv_heads=4, mlp_dim=768, experts=128, per_token=8, head_dim=head_dim()),
        constant("attention_bias", False),
        holds(qkv_bias=False, qk_norm=True, shared_mlp_dim=None),
    ),
    aliases={"num_local_experts": "num_experts"},
    names=lambda model: (*embedding_names(model), *ATTENTION, *HEAD_NORMS, *_QWEN_EXPERTS),
)

_LAYER, _OURS = "model.layers.{L}", "layers/experts"
_GPT_OSS_NAMES = (
    *ATTENTION,
    *BIASES,
    Name(f"{_LAYER}.self_attn.o_proj.bias", "layers/out_bias", "LD->D"),
    Name(f"{_LAYER}.self_attn.sinks", "layers/sinks", "LN->N"),
    Name(f"{_MLP}.router.weight", f"{_OURS}/router", "LDE->ED"),
    Name(f"{_MLP}.router.bias", f"{_OURS}/router_bias", "LE->E"),
    *in_turn(f"{_MLP}.experts.gate_up_proj", f"{_OURS}/gate", f"{_OURS}/up", form="LEDF->EDF"),
    *in_turn(
        f"{_MLP}.experts.gate_up_proj_bias",
        f"{_OURS}/gate_bias",
        f"{_OURS}/up_bias",
        form="LEF->EF",
    ),
    Name(f"{_MLP}.experts.down_proj", f"{_OURS}/down", "LEFD->EFD"),
    Name(f"{_MLP}.experts.down_proj_bias", f"{_OURS}/down_bias", "LED->ED"),
)
# transformers' default for a config.json without rotary positions.
_UNSAID_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_balance(config: ConfigFile) -> dict[str, Any]:
    """Return the published 0.9 is unused there, unless router logits are requested."""
    weight = config.number("router_aux_loss_coef", 0.001)
    return {"balance_weight": weight if config.flag("output_router_logits", False) else 0.0}


_GPT_OSS = family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    model=GPTOSS,
    rows=(
        *rows(
            norm_eps=1e-5, context_length=131072, rope_theta=150000.0, kv_heads=8,
            head_dim=integer("head_dim", "head_dim", 64),
            rotary={"whole_pairs": False, "unsaid": _UNSAID_ROPE},
        ),
        # null would mean transformers' default.
        Row(write=lambda model: {} if model.rope_scaling != 1 else {
            "rope_scaling": {"rope_type": "default"}
        }),
        constant("attention_bias", True),
        integer("num_local_experts", "num_experts", 128),
        integer("num_experts_per_tok", "experts_per_token", 4),
        Row(
            read_keys("router_aux_loss_coef", "output_router_logits"),
            _read_balance,
            lambda model: {
                "router_aux_loss_coef": model.balance_weight,
                "output_router_logits": model.balance_weight > 0,
            },
        ),
        constant("swiglu_alpha", 1.702),
        number("swiglu_limit", "swiglu_limit", 7.0),
        integer("sliding_window", "sliding_window", 128),
        layer_types(2),
        ignore("num_experts_per_tok says it", "experts_per_token"),
        ignore("the rotary embedding gives it", "initial_context_length"),
    ),
    aliases={"num_experts": "num_local_experts"},
    names=lambda model: (*embedding_names(model), *_GPT_OSS_NAMES),
    dequantized=(mxfp4.METHOD, awq.METHOD),
)  # fmt: skip

FAMILIES = (_MIXTRAL, _QWEN2, _QWEN3, _GPT_OSS)
