"""GPT-OSS: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant, only, used
from jaxtrain.models.transformers.gpt_oss import GPTOSS
from jaxtrain.models.weights import awq, grouped_query, mxfp4
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name, in_turn

_LAYER, _OURS = "model.layers.{L}", "layers/experts"
_ATTENTION = (
    Name(f"{_LAYER}.self_attn.o_proj.bias", "layers/out_bias", "LD->D"),
    Name(f"{_LAYER}.self_attn.sinks", "layers/sinks", "LN->N"),
)
_EXPERTS = (
    Name(f"{_LAYER}.mlp.router.weight", f"{_OURS}/router", "LDE->ED"),
    Name(f"{_LAYER}.mlp.router.bias", f"{_OURS}/router_bias", "LE->E"),
    *in_turn(
        f"{_LAYER}.mlp.experts.gate_up_proj", f"{_OURS}/gate", f"{_OURS}/up", form="LEDF->EDF"
    ),
    *in_turn(
        f"{_LAYER}.mlp.experts.gate_up_proj_bias",
        f"{_OURS}/gate_bias",
        f"{_OURS}/up_bias",
        form="LEF->EF",
    ),
    Name(f"{_LAYER}.mlp.experts.down_proj", f"{_OURS}/down", "LEFD->EFD"),
    Name(f"{_LAYER}.mlp.experts.down_proj_bias", f"{_OURS}/down_bias", "LED->ED"),
)


def _names(model: GPTOSS) -> tuple[Name, ...]:
    attention = (*grouped_query.ATTENTION, *grouped_query.BIASES, *_ATTENTION)
    return (*grouped_query.around(model), *attention, *_EXPERTS)


# What transformers takes where a config.json has no word of rotary positions.
_UNSAID_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-5, context_length=131072, rope_theta=150000.0, kv_heads=8,
        whole_pairs=False, unsaid_rope=_UNSAID_ROPE,
    )  # fmt: skip
    if sizes.get("rope_type") != "yarn":
        # Where nothing is bound, our class slows positions as the published sizes have it.
        sizes = {"rope_type": "llama3", "rope_scaling": 1.0, **sizes}
    balance = asked.number("router_aux_loss_coef", 0.001)
    return {
        **sizes,
        "head_dim": asked.whole("head_dim", 64),
        "num_experts": asked.whole("num_local_experts", 128),
        "experts_per_token": asked.whole("num_experts_per_tok", 4),
        # The published 0.9 is in no loss there, unless the router's logits are asked for.
        "balance_weight": balance if asked.flag("output_router_logits", False) else 0.0,
        "swiglu_limit": asked.number("swiglu_limit", 7.0),
        "sliding_window": asked.whole("sliding_window", 128),
        "global_every": grouped_query.read_global_every(asked, 2),
    }


def _write(model: GPTOSS) -> Mapping[str, Any]:
    said = grouped_query.write_sizes(model)
    return {
        **said,
        # Without a word of it transformers slows positions as the published sizes have it.
        "rope_scaling": said["rope_scaling"] or {"rope_type": "default"},
        "attention_bias": True,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.balance_weight,
        "output_router_logits": model.balance_weight > 0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": model.swiglu_limit,
        "sliding_window": model.sliding_window,
        "layer_types": grouped_query.kinds(model.num_layers, model.global_every),
    }


FAMILY = grouped_query.family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    model=GPTOSS,
    keys={
        **grouped_query.KEYS,
        **used(
            "num_local_experts",
            "num_experts_per_tok",
            "router_aux_loss_coef",
            "output_router_logits",
            "swiglu_limit",
            "sliding_window",
            "layer_types",
        ),
        **irrelevant("num_experts_per_tok says it", "experts_per_token"),
        **irrelevant("the rotary positions say it", "initial_context_length"),
        "attention_bias": only(True),
        "swiglu_alpha": only(1.702),
    },  # fmt: skip
    aliases={"num_experts": "num_local_experts"},
    read=_read,
    write=_write,
    names=_names,
    dequantized=(mxfp4.METHOD, awq.METHOD),
)
