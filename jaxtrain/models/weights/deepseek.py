"""Shared Hugging Face names and settings of DeepSeek-V2 and DeepSeek-V3."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.weights import config_keys, rope
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name

PREFIX = "model."
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}

# A layer's tensors: the name after "model.layers.N.", ours in the layer, our dimensions and theirs.
Lines = tuple[tuple[str, str, str], ...]
_ATTENTION: Lines = (
    ("input_layernorm.weight", "attention_norm_scale", "D->D"),
    ("self_attn.kv_a_proj_with_mqa.weight", "key_value_down", "DC->CD"),
    ("self_attn.kv_a_layernorm.weight", "key_value_norm_scale", "C->C"),
    ("self_attn.kv_b_proj.weight", "key_value_up", "CNH->(NH)C"),
    ("self_attn.o_proj.weight", "out", "NHD->D(NH)"),
    ("post_attention_layernorm.weight", "mlp_norm_scale", "D->D"),
)
_QUERIES: Lines = (("self_attn.q_proj.weight", "query", "DNH->(NH)D"),)
_LATENT_QUERIES: Lines = (
    ("self_attn.q_a_proj.weight", "query_down", "DC->CD"),
    ("self_attn.q_a_layernorm.weight", "query_norm_scale", "C->C"),
    ("self_attn.q_b_proj.weight", "query_up", "CNH->(NH)C"),
)


def _swiglu(theirs: str, ours: str, experts: str = "") -> Lines:
    return tuple(
        (f"{theirs}.{name}_proj.weight", f"{ours}{name}", form)
        for name, form in (
            ("gate", f"{experts}DF->FD"),
            ("up", f"{experts}DF->FD"),
            ("down", f"{experts}FD->DF"),
        )
    )


_DENSE = _swiglu("mlp", "")
_EXPERTS: Lines = (
    ("mlp.gate.weight", "experts/router", "DE->ED"),
    *_swiglu("mlp.experts.{E}", "experts/", "E"),
    *_swiglu("mlp.shared_experts", "shared_"),
)
_BIAS: Lines = (("mlp.gate.e_score_correction_bias", "experts/bias", "E->E"),)


# Parameters of a multi-token prediction module around its layer.
_PREDICTION: Lines = (
    ("enorm.weight", "token_norm_scale", "D->D"),
    ("hnorm.weight", "hidden_norm_scale", "D->D"),
    ("eh_proj.weight", "project", "CD->DC"),
    ("shared_head.norm.weight", "norm_scale", "D->D"),
)


def names(model: DeepSeek) -> tuple[Name, ...]:
    """The map between the names of both."""
    return tuple(_names(model))


def _names(model: DeepSeek) -> Iterator[Name]:
    attention = (*_ATTENTION, *(_QUERIES if model.query_rank is None else _LATENT_QUERIES))
    yield Name("model.embed_tokens.weight", "token_embedding", "VD->VD")
    for number in range(model.dense_layers):
        for theirs, ours, form in (*attention, *_DENSE):
            ours = f"first_layers/{number}/{ours}"
            yield Name(f"model.layers.{number}.{theirs}", ours, form)
    of_experts = (*_EXPERTS, *(_BIAS if model.router == "sigmoid" else ()))
    for theirs, ours, form in (*attention, *of_experts):
        yield Name(
            f"model.layers.{{L}}.{theirs}", f"layers/{ours}", f"L{form}", first=model.dense_layers
        )
    for number in range(model.predicted_tokens - 1):
        layer = f"model.layers.{model.num_layers + number}"
        for theirs, ours, form in (*_PREDICTION, *attention, *of_experts):
            yield Name(f"{layer}.{theirs}", f"predictors/{number}/{ours}", form)
    yield Name("model.norm.weight", "norm_scale", "D->D")
    if not model.tie_embeddings:
        yield Name("lm_head.weight", "output", "VD->VD")


KEYS: KeyTable = {
    **config_keys.LANGUAGE,
    **rope.KEYS,
    **used(
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_hidden_layers", "first_k_dense_replace", "num_attention_heads",
        "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "n_shared_experts", "n_routed_experts",
        "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
        "routed_scaling_factor", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "aux_loss_alpha",
    ),
    **irrelevant("qk_nope_head_dim and qk_rope_head_dim say it", "qk_head_dim"),
    **irrelevant("it lays experts out over devices", "ep_size"),
    **irrelevant("transformers has no balancing loss of this family", "output_router_logits"),
    # Balancing here is over a sequence, as the published models were trained.
    "seq_aux": only(True),
    "hidden_act": only("silu", "swish"),
    "attention_bias": only(False),
    "mlp_bias": only(False),
    "moe_layer_freq": only(1),
}  # fmt: skip


def read_sizes(
    asked: Asked, *, dense_layers: int, routed_scale: float, kv_heads: int | None
) -> dict[str, Any]:
    """The settings of both, but for the router.

    Args:
      asked: the config.json.
      dense_layers, routed_scale: what holds where it does not say.
      kv_heads: likewise; None: as many as heads.
    """
    heads = asked.whole("num_attention_heads")
    asked.only("num_key_value_heads", [heads], default=kv_heads or heads)
    latent = asked.content.get("q_lora_rank", 1536)
    return {
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": asked.whole("num_hidden_layers"),
        "dense_layers": asked.whole("first_k_dense_replace", dense_layers),
        "embed_dim": asked.whole("hidden_size"),
        "num_heads": heads,
        "query_rank": None if latent is None else asked.whole("q_lora_rank", 1536),
        "key_value_rank": asked.whole("kv_lora_rank", 512),
        "plain_dim": asked.whole("qk_nope_head_dim", 128),
        "rotary_dim": asked.whole("qk_rope_head_dim", 64),
        "value_dim": asked.whole("v_head_dim", 128),
        "mlp_dim": asked.whole("intermediate_size"),
        "expert_mlp_dim": asked.whole("moe_intermediate_size"),
        "shared_experts": asked.whole("n_shared_experts"),
        "num_experts": asked.whole("n_routed_experts"),
        "experts_per_token": asked.whole("num_experts_per_tok"),
        "routed_scale": asked.number("routed_scaling_factor", routed_scale),
        "context_length": asked.whole("max_position_embeddings"),
        "norm_eps": asked.number("rms_norm_eps", 1e-6),
        "tie_embeddings": asked.flag("tie_word_embeddings", False),
        **_read_rope(asked),
    }


def _read_rope(asked: Asked) -> dict[str, Any]:
    """Rotary positions, of a part of each head."""
    context_length = asked.whole("max_position_embeddings")
    kind, said = rope.standardize(
        asked, theta=10000.0, context_length=context_length, types=("default", "yarn")
    )
    said.only("partial_rotary_factor", [1.0], default=1.0)
    found: dict[str, Any] = {"rope_theta": said.number("rope_theta"), "rope_scaling": 1.0}
    if kind == "yarn":
        found |= {
            "rope_scaling": said.number("factor"),
            "rope_low_frequency_factor": said.number("beta_slow", 1.0) or 1.0,
            "rope_high_frequency_factor": said.number("beta_fast", 32.0) or 32.0,
            "rope_original_context_length": said.whole("original_max_position_embeddings"),
            "rope_score_factor": said.number("mscale_all_dim"),
        }
        # Where both are one, positions turn and do not stretch.
        said.only("mscale", [found["rope_score_factor"]], default=None)
        said.only("attention_factor", [None], default=None)
        said.only("truncate", [True], default=True)
    return found


def write_sizes(model: DeepSeek) -> dict[str, Any]:
    """What config.json says of them, but for the router."""
    scaling = None
    if model.rope_scaling != 1:
        scaling = {
            "rope_type": "yarn",
            "type": "yarn",  # its name in the authors' code
            "factor": model.rope_scaling,
            "beta_slow": model.rope_low_frequency_factor,
            "beta_fast": model.rope_high_frequency_factor,
            "original_max_position_embeddings": model.rope_original_context_length,
            "mscale": model.rope_score_factor,
            "mscale_all_dim": model.rope_score_factor,
        }
    return {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "first_k_dense_replace": model.dense_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.query_rank,
        "kv_lora_rank": model.key_value_rank,
        "qk_nope_head_dim": model.plain_dim,
        "qk_rope_head_dim": model.rotary_dim,
        "v_head_dim": model.value_dim,
        "intermediate_size": model.mlp_dim,
        "moe_intermediate_size": model.expert_mlp_dim,
        "n_shared_experts": model.shared_experts,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "routed_scaling_factor": model.routed_scale,
        "norm_topk_prob": model.normalize_gates,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
    }
