"""DeepSeek-V3 and R1: Hugging Face names and settings; sigmoid router with a balancing bias."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant, only, used
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.weights import deepseek, float8
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family


def _read(asked: Asked) -> Mapping[str, Any]:
    turned = asked.content.get("qk_rope_head_dim", 64)
    asked.only("head_dim", [turned], default=turned)
    return {
        **deepseek.read_sizes(asked, dense_layers=3, routed_scale=2.5, kv_heads=128),
        "router": "sigmoid",
        "normalize_gates": asked.flag("norm_topk_prob", True),
        "expert_groups": asked.whole("n_group", 8),
        "groups_per_token": asked.whole("topk_group", 4),
        "balance_weight": asked.number("aux_loss_alpha", 0.0001),
    }


def _write(model: DeepSeek) -> Mapping[str, Any] | None:
    if model.router != "sigmoid":
        return None
    return {
        **deepseek.write_sizes(model),
        "topk_method": "noaux_tc",
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "aux_loss_alpha": model.balance_weight,
        "num_nextn_predict_layers": model.predicted_tokens - 1,
    }


# A module that predicts has the embedding and the output matrix beside it once more.
_COPIES = {
    f"model.layers.{number}.{name}": shared
    for number in range(1, 128)
    for name, shared in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    )
}

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    model=DeepSeek,
    keys={
        **deepseek.KEYS,
        **used("head_dim"),
        **irrelevant("logits come from the layers before", "num_nextn_predict_layers"),
        "topk_method": only("noaux_tc"),
        "scoring_func": only("sigmoid"),
        "rope_interleave": only(True),
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },  # fmt: skip
    read=_read,
    write=_write,
    names=deepseek.names,
    prefix=deepseek.PREFIX,
    copies={**deepseek.COPIES, **_COPIES},
    dequantized=(float8.METHOD,),
    # The published models' module that predicts a second token, where it is not asked for:
    # transformers skips it too.
    buffers=r"model\.layers\.61\..*",
)
