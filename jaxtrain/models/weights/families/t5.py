"""T5 1.0 and 1.1: Hugging Face names and settings."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.config.key_table import only, read_keys
from jaxtrain.models.transformers.t5 import T5
from jaxtrain.models.weights import config_file
from jaxtrain.models.weights.config_file import (
    ConfigFile,
    Row,
    constant,
    derive,
    flag,
    ignore,
    integer,
    number,
    requires,
    write_only,
)
from jaxtrain.models.weights.family import Family, Name

_MLPS = {"relu": "relu", "gated-gelu": "gated_gelu"}
_THEIR_MLPS = {ours: theirs for theirs, ours in _MLPS.items()}


def _attention(theirs: str, ours: str) -> Iterator[Name]:
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        yield Name(f"{theirs}.{short}.weight", f"{ours}{name}", "LDNH->(NH)D")
    yield Name(f"{theirs}.o.weight", f"{ours}out", "LNHD->D(NH)")


def _stack(stack: str, positions: str, *, gated: bool, crosses: bool) -> Iterator[Name]:
    """Yield the encoder's names, or the decoder's."""
    block, ours = f"{stack}.block.{{L}}.layer", f"{stack}_layers"
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Name(first, f"{positions}_distances", "RN->RN")
    yield from _attention(f"{block}.0.SelfAttention", f"{ours}/")
    yield Name(f"{block}.0.layer_norm.weight", f"{ours}/attention_norm_scale", "LD->D")
    if crosses:
        yield from _attention(f"{block}.1.EncDecAttention", f"{ours}/cross_")
        yield Name(f"{block}.1.layer_norm.weight", f"{ours}/cross_norm_scale", "LD->D")
    mlp = f"{block}.{1 + crosses}"
    into = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    for name, own in into.items():
        yield Name(f"{mlp}.DenseReluDense.{name}.weight", f"{ours}/{own}", "LDF->FD")
    yield Name(f"{mlp}.DenseReluDense.wo.weight", f"{ours}/down", "LFD->DF")
    yield Name(f"{mlp}.layer_norm.weight", f"{ours}/mlp_norm_scale", "LD->D")
    yield Name(f"{stack}.final_layer_norm.weight", f"{stack}_norm_scale", "D->D")


def _names(model: T5) -> tuple[Name, ...]:
    gated = model.mlp == "gated_gelu"
    output = () if model.tie_embeddings else (Name("lm_head.weight", "output", "VD->VD"),)
    return (
        Name("shared.weight", "token_embedding", "VD->VD"),
        *_stack("encoder", "source", gated=gated, crosses=False),
        *_stack("decoder", "target", gated=gated, crosses=True),
        *output,
    )


def _read_scale(config: ConfigFile) -> dict[str, Any]:
    """Files of transformers before 5 imply it by tied embeddings."""
    tied = config.flag("tie_word_embeddings", True)
    return {"scale_outputs": config.flag("scale_decoder_outputs", tied)}


_EMBEDDING = "shared.weight"
_T5 = Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    model=T5,
    rows=(
        Row(config_file.LANGUAGE),
        # transformers does not scale with a separate output matrix.
        requires(lambda model: model.tie_embeddings or not model.scale_outputs),
        integer("vocab_size", "vocab_size"),
        integer("num_layers", "num_layers"),
        derive(
            "num_decoder_layers",
            lambda config: config.integer("num_layers"),
            lambda model: model.num_layers,
        ),
        integer("d_model", "embed_dim"),
        integer("num_heads", "num_heads"),
        integer("d_kv", "head_dim"),
        integer("d_ff", "mlp_dim"),
        integer("n_positions", "context_length", 512),
        Row(
            {"feed_forward_proj": only(*_MLPS)},
            lambda config: {
                "mlp": _MLPS.get(config.content.get("feed_forward_proj", "relu"), "relu")
            },
            lambda model: {"feed_forward_proj": _THEIR_MLPS[model.mlp]},
        ),
        flag("tie_word_embeddings", "tie_embeddings", True),
        Row(
            read_keys("scale_decoder_outputs"),
            _read_scale,
            lambda model: {"scale_decoder_outputs": model.scale_outputs},
        ),
        integer("relative_attention_num_buckets", "buckets", 32),
        integer("relative_attention_max_distance", "distance", 128),
        number("layer_norm_epsilon", "norm_eps", 1e-6),
        constant("is_encoder_decoder", True),
        write_only(decoder_start_token_id=0, pad_token_id=0),
        ignore("feed_forward_proj says it", "dense_act_fn", "is_gated_act"),
        ignore("each of the two stacks has its own", "is_decoder"),
    ),
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    names=_names,
    prefix="",
    copies={
        "encoder.embed_tokens.weight": _EMBEDDING,
        "decoder.embed_tokens.weight": _EMBEDDING,
        "lm_head.weight": _EMBEDDING,
    },
    # Cross-attention bias in early files: never used.
    buffers=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)

FAMILIES = (_T5,)
