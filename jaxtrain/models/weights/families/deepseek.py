"""DeepSeek-V2 and DeepSeek-V3: Hugging Face names and settings."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.config.key_table import ignore_keys, only, read_keys
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.weights import config_file
from jaxtrain.models.weights.config_file import (
    ConfigFile,
    Row,
    constant,
    derive,
    flag,
    holds,
    ignore,
    integer,
    number,
    read_rows,
    write_rows,
)
from jaxtrain.models.weights.families import rope
from jaxtrain.models.weights.family import Family, Name
from jaxtrain.models.weights.formats import float8

_PREFIX = "model."
_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}

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


def _names(model: DeepSeek) -> tuple[Name, ...]:
    return tuple(_lines(model))


def _lines(model: DeepSeek) -> Iterator[Name]:
    attention = (*_ATTENTION, *(_QUERIES if model.query_rank is None else _LATENT_QUERIES))
    yield Name("model.embed_tokens.weight", "token_embedding", "VD->VD")
    for at in range(model.dense_layers):
        for theirs, ours, form in (*attention, *_DENSE):
            ours = f"first_layers/{at}/{ours}"
            yield Name(f"model.layers.{at}.{theirs}", ours, form)
    of_experts = (*_EXPERTS, *(_BIAS if model.router == "sigmoid" else ()))
    for theirs, ours, form in (*attention, *of_experts):
        yield Name(
            f"model.layers.{{L}}.{theirs}", f"layers/{ours}", f"L{form}", first=model.dense_layers
        )
    for at in range(model.predicted_tokens - 1):
        layer = f"model.layers.{model.num_layers + at}"
        for theirs, ours, form in (*_PREDICTION, *attention, *of_experts):
            yield Name(f"{layer}.{theirs}", f"predictors/{at}/{ours}", form)
    yield Name("model.norm.weight", "norm_scale", "D->D")
    if not model.tie_embeddings:
        yield Name("lm_head.weight", "output", "VD->VD")


_YARN = (
    *rope.SCALINGS["yarn"],
    # If both are 1, rotary positions are not scaled.
    Row(
        read_keys("mscale", "mscale_all_dim"),
        lambda scaling: {"rope_score_factor": scaling.number("mscale_all_dim")},
        lambda model: {
            "mscale": model.rope_score_factor,
            "mscale_all_dim": model.rope_score_factor,
        },
    ),
)


def _read_rope(config: ConfigFile) -> dict[str, Any]:
    """Row of rotary positions of a part of each head."""
    context_length = config.integer("max_position_embeddings")
    kind, scaling = rope.standardize(
        config, theta=10000.0, context_length=context_length, types=("default", "yarn")
    )
    rope.reject_fraction(scaling)
    found = {"rope_theta": scaling.number("rope_theta"), "rope_scaling": 1.0}
    if kind == "yarn":
        found |= read_rows(_YARN, scaling)
        scaling.only("mscale", [found["rope_score_factor"]], default=None)
        scaling.only("attention_factor", [None], default=None)
        scaling.only("truncate", [True], default=True)
    return found


def _write_rope(model: DeepSeek) -> dict[str, Any]:
    scaling = None
    if model.rope_scaling != 1:
        # "type" is its name in the authors' code.
        scaling = {"rope_type": "yarn", "type": "yarn", **(write_rows(_YARN, model) or {})}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _rows(
    *, dense_layers: int, routed_scale: float, kv_heads: int | None, normalize: Row
) -> tuple[Row, ...]:
    """Return the rows of both versions, except for the router.

    Args:
      dense_layers, routed_scale, kv_heads: the values of missing keys; kv_heads None: the number of
        heads.
      normalize: the row of normalized gates.
    """
    return (
        Row(config_file.LANGUAGE),
        integer("vocab_size", "vocab_size"),
        integer("num_hidden_layers", "num_layers"),
        integer("first_k_dense_replace", "dense_layers", dense_layers),
        integer("hidden_size", "embed_dim"),
        integer("num_attention_heads", "num_heads"),
        derive(
            "num_key_value_heads",
            lambda config: config.integer("num_attention_heads"),
            lambda model: model.num_heads,
            default=kv_heads,
        ),
        integer("q_lora_rank", "query_rank", 1536, null=True),
        integer("kv_lora_rank", "key_value_rank", 512),
        integer("qk_nope_head_dim", "plain_dim", 128),
        integer("qk_rope_head_dim", "rotary_dim", 64),
        integer("v_head_dim", "value_dim", 128),
        integer("intermediate_size", "mlp_dim"),
        integer("moe_intermediate_size", "expert_mlp_dim"),
        integer("n_shared_experts", "shared_experts"),
        integer("n_routed_experts", "num_experts"),
        integer("num_experts_per_tok", "experts_per_token"),
        number("routed_scaling_factor", "routed_scale", routed_scale),
        normalize,
        integer("max_position_embeddings", "context_length"),
        number("rms_norm_eps", "norm_eps", 1e-6),
        flag("tie_word_embeddings", "tie_embeddings", False),
        Row(rope.KEYS, _read_rope, _write_rope),
        constant("hidden_act", "silu", "swish"),
        constant("attention_bias", False),
        ignore("qk_nope_head_dim and qk_rope_head_dim give the size", "qk_head_dim"),
        ignore("it distributes experts over devices", "ep_size"),
        ignore("transformers has no balancing loss of this family", "output_router_logits"),
        # Balancing here is over a sequence, as the published models were trained.
        Row({"seq_aux": only(True), "mlp_bias": only(False), "moe_layer_freq": only(1)}),
    )


_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def _read_groups(config: ConfigFile) -> dict[str, Any]:
    if config.content.get("topk_method") != _LIMITED:
        return {"expert_groups": 1, "groups_per_token": 1}
    return {
        "expert_groups": config.integer("n_group"),
        "groups_per_token": config.integer("topk_group"),
    }


def _write_groups(model: DeepSeek) -> dict[str, Any]:
    return {
        "topk_method": _GREEDY if model.expert_groups == 1 else _LIMITED,
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
    }


# Softmax router with group-limited routing.
_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    model=DeepSeek,
    rows=(
        *_rows(
            dense_layers=0,
            routed_scale=1.0,
            kv_heads=None,
            normalize=constant("norm_topk_prob", False),
        ),
        Row(
            {**read_keys("n_group", "topk_group"), "topk_method": only(_GREEDY, _LIMITED)},
            _read_groups,
            _write_groups,
        ),
        constant("scoring_func", "softmax"),
        number("aux_loss_alpha", "balance_weight", 0.001),
        ignore("transformers uses qk_rope_head_dim instead", "head_dim"),
        holds(router="softmax", normalize_gates=False, bias_speed=0.0, predicted_tokens=1),
    ),
    aliases={"num_experts": "n_routed_experts"},
    names=_names,
    prefix=_PREFIX,
    copies=_COPIES,
)
# A prediction module has a second copy of the embedding and the output matrix.
_PREDICTION_COPIES = {
    f"model.layers.{number}.{name}": shared
    for number in range(1, 128)
    for name, shared in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    )
}
# DeepSeek-V3 and R1; sigmoid router with a balancing bias.
_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    model=DeepSeek,
    rows=(
        *_rows(
            dense_layers=3,
            routed_scale=2.5,
            kv_heads=128,
            normalize=flag("norm_topk_prob", "normalize_gates", True),
        ),
        constant("topk_method", "noaux_tc"),
        integer("n_group", "expert_groups", 8),
        integer("topk_group", "groups_per_token", 4),
        constant("scoring_func", "sigmoid"),
        constant("rope_interleave", True),
        number("aux_loss_alpha", "balance_weight", 0.0001),
        derive("head_dim", lambda config: config.content.get("qk_rope_head_dim", 64)),
        Row(
            ignore_keys("logits come from the layers before", "num_nextn_predict_layers"),
            write=lambda model: {"num_nextn_predict_layers": model.predicted_tokens - 1},
        ),
        holds(router="sigmoid"),
    ),
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    names=_names,
    prefix=_PREFIX,
    copies={**_COPIES, **_PREDICTION_COPIES},
    dequantized=(float8.METHOD,),
    # The published models' multi-token prediction module, if it is not used:
    # transformers skips it too.
    buffers=r"model\.layers\.61\..*",
)

FAMILIES = (_V2, _V3)
