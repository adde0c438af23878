"""Llama, Mistral, Phi 3, Qwen 2 and Qwen 3, the dense ones: Hugging Face names and settings."""

from jaxtrain.config.key_table import ignore_keys, only
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights.config_file import Row, constant, holds, ignore, requires
from jaxtrain.models.weights.families.grouped_query import (
    BIASES,
    HEAD_NORMS,
    NO_WINDOW,
    dense_names,
    embedding_names,
    family,
    head_dim,
    rows,
    window,
)
from jaxtrain.models.weights.family import Name, one_after_the_other

# Llama 1 to 3.2, and similar models such as SmolLM2.
_LLAMA = family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    model=Llama,
    rows=(
        *rows(norm_eps=1e-6, context_length=2048, rope_theta=10000.0, head_dim=head_dim()),
        constant("attention_bias", False),
        constant("mlp_bias", False),
        ignore("the architecture says it", "is_llama_config"),
        ignore("transformers reads max_position_embeddings", "max_sequence_length"),
        holds(sliding_window=None, qkv_bias=False, qk_norm=False, rope_fraction=1.0),
    ),
    names=dense_names,
)
# arXiv 2310.06825; sliding window.
_MISTRAL = family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    model=Llama,
    rows=(
        *rows(
            norm_eps=1e-6,
            context_length=131072,
            rope_theta=10000.0,
            kv_heads=8,
            head_dim=head_dim(),
        ),
        window(4096),
        holds(qkv_bias=False, qk_norm=False, rope_fraction=1.0),
    ),
    names=dense_names,
)
_LAYER = "model.layers.{L}"


def _phi3_names(model: Llama) -> tuple[Name, ...]:
    queries, keys = (
        heads * model.block.attention.facts.key_dim
        for heads in (model.num_heads, model.num_kv_heads)
    )
    return (
        *embedding_names(model),
        Name(f"{_LAYER}.input_layernorm.weight", "layers/attention_norm_scale", "LD->D"),
        *one_after_the_other(
            f"{_LAYER}.self_attn.qkv_proj.weight",
            ("layers/query", "LDNH->(NH)D", queries),
            ("layers/key", "LDKH->(KH)D", keys),
            ("layers/value", "LDKH->(KH)D", keys),
        ),
        Name(f"{_LAYER}.self_attn.o_proj.weight", "layers/out", "LNHD->D(NH)"),
        Name(f"{_LAYER}.post_attention_layernorm.weight", "layers/mlp_norm_scale", "LD->D"),
        *one_after_the_other(
            f"{_LAYER}.mlp.gate_up_proj.weight",
            ("layers/gate", "LDF->FD", model.mlp_dim),
            ("layers/up", "LDF->FD", model.mlp_dim),
        ),
        Name(f"{_LAYER}.mlp.down_proj.weight", "layers/down", "LFD->DF"),
    )


# Phi 3 and 4 (arXiv 2404.14219); fused projections.
_PHI3 = family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    model=Llama,
    rows=(
        *rows(
            norm_eps=1e-5,
            context_length=4096,
            rope_theta=10000.0,
            head_dim=head_dim(),
            rotary={"fraction": True},
        ),
        window(None),
        ignore(
            "it belongs to sparse attention, which this architecture does not have",
            "full_attn_mod",
            "interpolate_factor",
        ),
        Row(
            ignore_keys(
                "it belongs to rotary scaling, which is not supported for this family",
                "original_max_position_embeddings",
            ),
            write=lambda model: {
                "partial_rotary_factor": model.rope_fraction,
                "original_max_position_embeddings": model.context_length,
            },
        ),
        holds(qkv_bias=False, qk_norm=False, rope_scaling=1.0),
        requires(lambda model: model.head_dim is None),
    ),
    names=_phi3_names,
)
_QWEN = {"norm_eps": 1e-6, "context_length": 32768, "rope_theta": 10000.0, "kv_heads": 32}
# Qwen 2 and 2.5 (arXiv 2407.10671).
_QWEN2 = family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    model=Llama,
    rows=(
        *rows(**_QWEN),
        *NO_WINDOW,
        Row({"use_mrope": only(False)}),
        holds(head_dim=None, sliding_window=None, qkv_bias=True, qk_norm=False, rope_fraction=1.0),
    ),
    names=lambda model: (*dense_names(model), *BIASES),
)
# arXiv 2505.09388; QK-norm.
_QWEN3 = family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    model=Llama,
    rows=(
        *rows(**_QWEN, head_dim=head_dim(128)),
        constant("attention_bias", False),
        *NO_WINDOW,
        holds(sliding_window=None, qkv_bias=False, qk_norm=True, rope_fraction=1.0),
    ),
    names=lambda model: (*dense_names(model), *HEAD_NORMS),
)

FAMILIES = (_LLAMA, _MISTRAL, _PHI3, _QWEN2, _QWEN3)
