"""Shared Hugging Face names and settings of families with grouped-query attention and RoPE."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.models.weights import config_keys, rope
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

# What they call the factors of low and of high frequencies.
_FACTORS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast"),
}
# Of the layers of all of them.
PROJECTIONS = (
    Name("model.layers.{L}.self_attn.q_proj.weight", "layers/query", "LDNH->(NH)D"),
    Name("model.layers.{L}.self_attn.k_proj.weight", "layers/key", "LDKH->(KH)D"),
    Name("model.layers.{L}.self_attn.v_proj.weight", "layers/value", "LDKH->(KH)D"),
    Name("model.layers.{L}.self_attn.o_proj.weight", "layers/out", "LNHD->D(NH)"),
)
ATTENTION = (
    *PROJECTIONS,
    Name("model.layers.{L}.input_layernorm.weight", "layers/attention_norm_scale", "LD->D"),
    Name("model.layers.{L}.post_attention_layernorm.weight", "layers/mlp_norm_scale", "LD->D"),
)
HEAD_NORMS = (
    Name("model.layers.{L}.self_attn.q_norm.weight", "layers/query_norm_scale", "LH->H"),
    Name("model.layers.{L}.self_attn.k_norm.weight", "layers/key_norm_scale", "LH->H"),
)
BIASES = (
    Name("model.layers.{L}.self_attn.q_proj.bias", "layers/query_bias", "LNH->(NH)"),
    Name("model.layers.{L}.self_attn.k_proj.bias", "layers/key_bias", "LKH->(KH)"),
    Name("model.layers.{L}.self_attn.v_proj.bias", "layers/value_bias", "LKH->(KH)"),
)
MLP = (
    Name("model.layers.{L}.mlp.gate_proj.weight", "layers/gate", "LDF->FD"),
    Name("model.layers.{L}.mlp.up_proj.weight", "layers/up", "LDF->FD"),
    Name("model.layers.{L}.mlp.down_proj.weight", "layers/down", "LFD->DF"),
)
# Where a part has a norm on either side, it takes the second of Llama's two names.
NORMS_ON_BOTH_SIDES = (
    Name("model.layers.{L}.input_layernorm.weight", "layers/attention_norm_scale", "LD->D"),
    Name(
        "model.layers.{L}.post_attention_layernorm.weight",
        "layers/after_attention_norm_scale",
        "LD->D",
    ),
    Name("model.layers.{L}.pre_feedforward_layernorm.weight", "layers/mlp_norm_scale", "LD->D"),
    Name(
        "model.layers.{L}.post_feedforward_layernorm.weight",
        "layers/after_mlp_norm_scale",
        "LD->D",
    ),
)
# All of them; Llama's first files hold the rotary frequencies, a tensor a layer.
family = functools.partial(
    Family,
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    buffers=r".*rotary_emb\.inv_freq",
)
# Layers with a window, and without.
LOCAL, GLOBAL = "sliding_attention", "full_attention"
# What a config.json of all of them has.
KEYS: KeyTable = {
    **config_keys.LANGUAGE,
    **rope.KEYS,
    **used(
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings",
    ),
    "hidden_act": only("silu", "swish"),
    "attention_bias": only(False),
    "mlp_bias": only(False),
    "lm_head_bias": only(False),
    "rope_interleaved": only(False),
}  # fmt: skip
# Of families whose layers may have a window from one on: here all layers are alike.
NO_WINDOW: KeyTable = {
    **used("layer_types"),
    "use_sliding_window": only(False),
    **irrelevant("use_sliding_window is false", "sliding_window", "max_window_layers"),
}
# Of mixtures of experts whose balancing loss is trained with whatever transformers returns.
ROUTER_OUTPUT = irrelevant(
    "it asks transformers for an output; router_aux_loss_coef weighs the loss here anyway",
    "output_router_logits",
)


def around(model: GroupedQuerySizes) -> tuple[Name, ...]:
    """What stands before and after the layers."""
    ends = (
        Name("model.embed_tokens.weight", "token_embedding", "VD->VD"),
        Name("model.norm.weight", "norm_scale", "D->D"),
    )
    return ends if model.tie_embeddings else (*ends, Name("lm_head.weight", "output", "VD->VD"))


def dense_names(model: GroupedQuerySizes) -> tuple[Name, ...]:
    """Of a model whose layers have attention and one SwiGLU."""
    return (*around(model), *ATTENTION, *MLP)


def norms_after_names(model: GroupedQuerySizes) -> tuple[Name, ...]:
    """Of a model whose layers have attention and one SwiGLU, with a norm on either side."""
    return (*around(model), *PROJECTIONS, *NORMS_ON_BOTH_SIDES, *MLP)


def read_sizes(
    asked: Asked,
    *,
    norm_eps: float,
    context_length: int,
    rope_theta: float,
    kv_heads: int | None,
    tied: bool = False,
    fraction: bool = False,
    whole_pairs: bool = True,
    unsaid_rope: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The settings of all of them, but for a window; defaults as the family has them.

    Args:
      asked: the config.json.
      norm_eps, context_length, rope_theta: what holds where it does not say.
      kv_heads: likewise; None: as many as query heads.
      tied: whether the embedding is the output matrix, likewise.
      fraction: whether a part of each head may be turned alone.
      whole_pairs: as in `nn.rotary.Yarn`.
      unsaid_rope: the rotary positions of a file without any.
    """
    context_length = asked.whole("max_position_embeddings", context_length)
    kind, said = rope.standardize(
        asked, theta=rope_theta, context_length=context_length, unsaid=unsaid_rope,
        types=("default",) if fraction else ("default", "linear", "llama3", "yarn"),
    )  # fmt: skip
    return {
        **read_widths(asked, kv_heads=kv_heads),
        "context_length": context_length,
        "norm_eps": asked.number("rms_norm_eps", norm_eps),
        "tie_embeddings": asked.flag("tie_word_embeddings", tied),
        **_read_rope(kind, said, fraction=fraction, whole_pairs=whole_pairs),
    }


def read_widths(asked: Asked, *, kv_heads: int | None) -> dict[str, Any]:
    """How much there is of everything; `kv_heads` as above."""
    heads = asked.whole("num_attention_heads")
    # null is as many as query heads in every family.
    if kv_heads is None or asked.content.get("num_key_value_heads", 0) is None:
        kv_heads = heads
    return {
        "embed_dim": asked.whole("hidden_size"),
        "num_heads": heads,
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": asked.whole("num_hidden_layers"),
        "num_kv_heads": asked.whole("num_key_value_heads", kv_heads),
        "mlp_dim": asked.whole("intermediate_size"),
    }


def read_head_dim(asked: Asked, default: int | None = None) -> int | None:
    """The width of a head where it is another than embed_dim / num_heads, else None.

    Args:
      asked: the config.json.
      default: what holds where it does not say; None: embed_dim / num_heads.
    """
    heads, width = asked.whole("num_attention_heads"), asked.whole("hidden_size")
    found = asked.whole("head_dim", default or width // max(heads, 1))
    return None if found * heads == width else found


def reject_own_head_dim(asked: Asked) -> None:
    """Collects a width of heads that is another than embed_dim / num_heads."""
    if asked.content.get("head_dim") is not None and read_head_dim(asked) is not None:
        asked.reject(f"head_dim = {asked.content['head_dim']}; here it is hidden_size / heads")


def read_window(asked: Asked, default: int | None) -> int | None:
    """Tokens a query sees back; null is all of them, no such key the family's default."""
    if asked.content.get("sliding_window", default) is None:
        return None
    return asked.whole("sliding_window", default)


def read_global_every(asked: Asked, default: int) -> int:
    """The period of layers of two kinds, which files may spell out; `default` where they do not."""
    num_layers, found = asked.whole("num_hidden_layers"), asked.content.get("layer_types")
    if found is None:
        return default
    if not _one_a_layer(asked, found):
        asked.reject(f"layer_types is no list of one kind for each of {num_layers} layers")
        return default
    # Without a global layer any period does that is longer than the model.
    every = found.index(GLOBAL) + 1 if GLOBAL in found else num_layers + 1
    if list(found) != kinds(num_layers, every):
        asked.reject("layer_types in no regular order; here every so manieth sees all tokens")
    return every


def kinds(num_layers: int, every: int) -> list[str]:
    """Of which kind each layer is."""
    return [LOCAL if number % every else GLOBAL for number in range(1, num_layers + 1)]


def _one_a_layer(asked: Asked, found: Any) -> bool:
    """Whether this is a list with one element a layer."""
    return isinstance(found, list) and len(found) == asked.whole("num_hidden_layers")


def reject_other_layers(asked: Asked) -> None:
    """Collects layers of other kinds than the one that sees all tokens."""
    found = asked.content.get("layer_types")
    if found is None:
        return
    if not _one_a_layer(asked, found) or any(kind != GLOBAL for kind in found):
        asked.reject(f"layer_types of other layers than {GLOBAL!r}, or not one a layer")


def _read_rope(kind: str, said: Asked, *, fraction: bool, whole_pairs: bool) -> dict[str, Any]:
    """The settings of rotary positions, from what `rope.standardize` returns."""
    found: dict[str, Any] = {"rope_theta": said.number("rope_theta")}
    if fraction:
        found["rope_fraction"] = said.number("partial_rotary_factor")
    else:
        said.only("partial_rotary_factor", [1.0], default=1.0)
    if kind == "llama3":
        found |= {
            "rope_scaling": said.number("factor"),
            "rope_low_frequency_factor": said.number("low_freq_factor"),
            "rope_high_frequency_factor": said.number("high_freq_factor"),
            "rope_original_context_length": said.whole("original_max_position_embeddings"),
        }
    elif kind == "yarn":
        found |= {
            "rope_type": "yarn",
            "rope_scaling": said.number("factor"),
            "rope_low_frequency_factor": said.number("beta_slow", 1.0) or 1.0,
            "rope_high_frequency_factor": said.number("beta_fast", 32.0) or 32.0,
            "rope_original_context_length": said.whole("original_max_position_embeddings"),
        }
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            said.only(key, [None], default=None)
        said.only("truncate", [whole_pairs], default=True)
    elif kind == "linear":
        factor = said.number("factor")
        found |= {} if factor == 1 else {"rope_type": "linear", "rope_scaling": factor}
    return found


def write_sizes(model: GroupedQuerySizes) -> Mapping[str, Any]:
    """What config.json says of them, as transformers 4 and 5 both read it."""
    scaling = None
    if model.rope_type == "linear":
        scaling = {"rope_type": "linear", "factor": model.rope_scaling}
    elif model.rope_scaling != 1:
        low, high = _FACTORS[model.rope_type]
        scaling = {
            "rope_type": model.rope_type,
            "factor": model.rope_scaling,
            low: model.rope_low_frequency_factor,
            high: model.rope_high_frequency_factor,
            "original_max_position_embeddings": model.rope_original_context_length,
        }
        if not model.rope_whole_pairs:
            scaling["truncate"] = False
    return {
        **write_widths(model),
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
    }


def write_widths(model: GroupedQuerySizes) -> dict[str, Any]:
    """What config.json says of all of them, but for rotations and the gate."""
    return {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.key_dim,
        "intermediate_size": model.mlp_dim,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }
