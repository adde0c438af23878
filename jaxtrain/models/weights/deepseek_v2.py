"""DeepSeek-V2: Hugging Face names and settings; softmax router with group-limited routing."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant, only
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.weights import deepseek
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def _read(asked: Asked) -> Mapping[str, Any]:
    groups = {"expert_groups": 1, "groups_per_token": 1}
    if asked.content.get("topk_method") == _LIMITED:
        groups = {
            "expert_groups": asked.whole("n_group"),
            "groups_per_token": asked.whole("topk_group"),
        }
    return {
        **deepseek.read_sizes(asked, dense_layers=0, routed_scale=1.0, kv_heads=None),
        **groups,
        "router": "softmax",
        "normalize_gates": False,
        "bias_speed": 0.0,
        "balance_weight": asked.number("aux_loss_alpha", 0.001),
    }


def _write(model: DeepSeek) -> Mapping[str, Any] | None:
    if model.router != "softmax" or model.normalize_gates or model.predicted_tokens > 1:
        return None
    return {
        **deepseek.write_sizes(model),
        "topk_method": _GREEDY if model.expert_groups == 1 else _LIMITED,
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
        "scoring_func": "softmax",
        "aux_loss_alpha": model.balance_weight,
    }


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    model=DeepSeek,
    keys={
        **deepseek.KEYS,
        **irrelevant("transformers puts qk_rope_head_dim in its place", "head_dim"),
        "topk_method": only(_GREEDY, _LIMITED),
        "scoring_func": only("softmax"),
        "norm_topk_prob": only(False),
    },
    aliases={"num_experts": "n_routed_experts"},
    read=_read,
    write=_write,
    names=deepseek.names,
    prefix=deepseek.PREFIX,
    copies=deepseek.COPIES,
)
