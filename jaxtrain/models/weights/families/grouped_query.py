"""Shared Hugging Face names and settings of families with grouped-query attention and RoPE."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxtrain.config.key_table import ignore_keys, only, read_keys
from jaxtrain.models.weights import config_file
from jaxtrain.models.weights.config_file import (
    ConfigFile,
    Row,
    constant,
    flag,
    integer,
    number,
    write_only,
)
from jaxtrain.models.weights.families import rope
from jaxtrain.models.weights.family import Family, Name
from jaxtrain.nn.transformer.decoder import DecoderSizes

# Layer names of all of them.
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
# Buffers; Llama's first files contain the rotary frequencies, a tensor per layer.
family = functools.partial(
    Family,
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    buffers=r".*rotary_emb\.inv_freq",
)
# Kinds of layers: with a window, and without.
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def embedding_names(model: DecoderSizes) -> tuple[Name, ...]:
    """Return the name lines of embedding, final norm and head."""
    ends = (
        Name("model.embed_tokens.weight", "token_embedding", "VD->VD"),
        Name("model.norm.weight", "norm_scale", "D->D"),
    )
    return ends if model.tie_embeddings else (*ends, Name("lm_head.weight", "output", "VD->VD"))


def dense_names(model: DecoderSizes) -> tuple[Name, ...]:
    """Return the name lines of a model whose layers have attention and one SwiGLU."""
    return (*embedding_names(model), *ATTENTION, *MLP)


def read_head_dim(config: ConfigFile, default: int | None = None) -> int | None:
    """Return the width of a head if it differs from embed_dim / num_heads, else None.

    Args:
      config: the config.json.
      default: the value of a missing key; None: embed_dim / num_heads.
    """
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    found = config.integer("head_dim", default or width // max(heads, 1))
    return None if found * heads == width else found


def head_dim(default: int | None = None) -> Row:
    """Return the row of a width of heads; `default` is that of `read_head_dim`."""
    return Row(
        read_keys("head_dim"),
        lambda config: {"head_dim": read_head_dim(config, default)},
        lambda model: {"head_dim": model.attention.key_dim},
    )


def _reject_own_head_dim(config: ConfigFile) -> dict[str, Any]:
    if config.content.get("head_dim") is not None and read_head_dim(config) is not None:
        config.reject(f"head_dim = {config.content['head_dim']}; it must be hidden_size / heads")
    return {}


# Of families whose heads all have the width embed_dim / num_heads.
NO_HEAD_DIM = head_dim()._replace(read=_reject_own_head_dim)
_SILU = constant("hidden_act", "silu", "swish")
_UNTIED = flag("tie_word_embeddings", "tie_embeddings", False)


def width_rows(
    *,
    context_length: int,
    norm_eps: float,
    kv_heads: int | None = None,
    head_dim: Row = NO_HEAD_DIM,
    tied: Row = _UNTIED,
) -> tuple[Row, ...]:
    """Return the rows of all of them, except rotations, the gate and a window.

    Args:
      context_length: the longest context if the file has none.
      norm_eps: the epsilon of the norms if the file has none.
      kv_heads: the number of key-value heads if the file has none; None: of query heads.
      head_dim: the row of the width of a head.
      tied: the row of tied embeddings.
    """

    def read_kv_heads(config: ConfigFile) -> dict[str, Any]:
        # null is as many as query heads in every family.
        key, default = "num_key_value_heads", kv_heads
        if default is None or config.content.get(key, 0) is None:
            default = config.integer("num_attention_heads")
        return {"num_kv_heads": config.integer(key, default)}

    return (
        Row(
            {
                **config_file.LANGUAGE,
                "attention_bias": only(False),
                "mlp_bias": only(False),
                "lm_head_bias": only(False),
                "rope_interleaved": only(False),
            }
        ),
        integer("vocab_size", "vocab_size"),
        integer("num_hidden_layers", "num_layers"),
        integer("hidden_size", "embed_dim"),
        integer("num_attention_heads", "num_heads"),
        Row(
            read_keys("num_key_value_heads"),
            read_kv_heads,
            lambda model: {"num_key_value_heads": model.num_kv_heads},
        ),
        head_dim,
        integer("intermediate_size", "mlp_dim"),
        integer("max_position_embeddings", "context_length", context_length),
        number("rms_norm_eps", "norm_eps", norm_eps),
        tied,
    )


def rows(
    *,
    context_length: int,
    rope_theta: float,
    gate: Row = _SILU,
    rotary: Mapping[str, Any] = MappingProxyType({}),
    **widths: Any,
) -> tuple[Row, ...]:
    """Return the rows of all of them, except a window.

    Args:
      context_length: the longest context if the file has none.
      rope_theta: the base of rotary frequencies if the file has none.
      gate: the row of the function of the MLP's gate.
      rotary: other arguments of `rope.rotary`.
      widths: other arguments of `width_rows`.
    """
    return (
        *width_rows(context_length=context_length, **widths),
        rope.rotary(theta=rope_theta, context_length=context_length, **rotary),
        gate,
    )


def window(default: int | None) -> Row:
    """Return the row of a window in all layers; null means none.

    Args:
      default: the value of a missing key, None too.
    """
    return integer("sliding_window", "sliding_window", default, null=True)


def _one_a_layer(config: ConfigFile, found: Any) -> bool:
    """Whether this is a list with one element per layer."""
    return isinstance(found, list) and len(found) == config.integer("num_hidden_layers")


def _reject_other_layers(config: ConfigFile) -> dict[str, Any]:
    """Reject layers other than global ones."""
    found = config.content.get("layer_types")
    if found is not None and not (
        _one_a_layer(config, found) and all(kind == GLOBAL for kind in found)
    ):
        config.reject(f"layer_types other than {GLOBAL!r}, or not one per layer")
    return {}


# For families whose upper layers may have a window: here all layers are alike.
NO_WINDOW = (
    Row(
        {
            **read_keys("layer_types"),
            **ignore_keys("use_sliding_window is false", "sliding_window", "max_window_layers"),
        },
        _reject_other_layers,
    ),
    constant("use_sliding_window", False),
    write_only(sliding_window=None),
)
# For mixtures of experts whose balancing loss is always trained.
ROUTER_OUTPUT = ignore_keys(
    "it makes transformers return an output; router_aux_loss_coef weights the loss here in any "
    "case",
    "output_router_logits",
)


def layer_types(default: int, key: str | None = None) -> Row:
    """Return the row of layers of two kinds in a period.

    Args:
      default: the period if the file does not list the kinds.
      key: of a period in older files, whose default is `default`; None: they have none.
    """

    def read(config: ConfigFile) -> dict[str, Any]:
        period = default if key is None else config.integer(key, default)
        return {"global_every": _read_global_every(config, period)}

    def write(model: Any) -> Mapping[str, Any]:
        assert model.global_every is not None, "a model with layers of two kinds"
        return {"layer_types": _kinds(model.num_layers, model.global_every)}

    return Row(read_keys("layer_types", *([] if key is None else [key])), read, write)


def _read_global_every(config: ConfigFile, default: int) -> int:
    """Return the period of layers of two kinds, from the file's list or `default`."""
    num_layers, found = config.integer("num_hidden_layers"), config.content.get("layer_types")
    if found is None:
        return default
    if not _one_a_layer(config, found):
        config.reject(f"layer_types is not a list with one kind for each of {num_layers} layers")
        return default
    # Without a global layer any period longer than the model works.
    every = found.index(GLOBAL) + 1 if GLOBAL in found else num_layers + 1
    if list(found) != _kinds(num_layers, every):
        config.reject(
            "layer_types in no regular order; here every n-th layer attends to all tokens"
        )
    return every


def _kinds(num_layers: int, every: int) -> list[str]:
    """Return the kind of each layer."""
    return [LOCAL if number % every else GLOBAL for number in range(1, num_layers + 1)]
