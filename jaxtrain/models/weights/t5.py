"""T5 1.0 and 1.1: Hugging Face names and settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.transformers.t5 import T5
from jaxtrain.models.weights import config_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

_MLPS = {"relu": "relu", "gated-gelu": "gated_gelu"}


def _attention(theirs: str, ours: str) -> Iterator[Name]:
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        yield Name(f"{theirs}.{short}.weight", f"{ours}{name}", "LDNH->(NH)D")
    yield Name(f"{theirs}.o.weight", f"{ours}out", "LNHD->D(NH)")


def _stack(stack: str, places: str, *, gated: bool, crosses: bool) -> Iterator[Name]:
    """All of the encoder's names, or of the decoder's."""
    block, ours = f"{stack}.block.{{L}}.layer", f"{stack}_layers"
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Name(first, f"{places}_distances", "RN->RN")
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


_KEYS: KeyTable = {
    **config_keys.LANGUAGE,
    **used(
        "vocab_size", "num_layers", "num_decoder_layers", "d_model", "num_heads", "d_kv", "d_ff",
        "n_positions", "tie_word_embeddings", "scale_decoder_outputs",
        "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
    ),
    **irrelevant("feed_forward_proj says it", "dense_act_fn", "is_gated_act"),
    **irrelevant("each of the two stacks has its own", "is_decoder"),
    "is_encoder_decoder": only(True),
    "feed_forward_proj": only(*_MLPS),
}  # fmt: skip


def _read(asked: Asked) -> Mapping[str, Any]:
    num_layers = asked.whole("num_layers")
    asked.only("num_decoder_layers", [num_layers], default=num_layers)
    tied = asked.flag("tie_word_embeddings", True)
    return {
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": num_layers,
        "embed_dim": asked.whole("d_model"),
        "num_heads": asked.whole("num_heads"),
        "head_dim": asked.whole("d_kv"),
        "mlp_dim": asked.whole("d_ff"),
        "context_length": asked.whole("n_positions", 512),
        "mlp": _MLPS.get(asked.content.get("feed_forward_proj", "relu"), "relu"),
        "tie_embeddings": tied,
        # Files of transformers before 5 say it by the tie alone.
        "scale_outputs": asked.flag("scale_decoder_outputs", tied),
        "buckets": asked.whole("relative_attention_num_buckets", 32),
        "distance": asked.whole("relative_attention_max_distance", 128),
        "norm_eps": asked.number("layer_norm_epsilon", 1e-6),
    }


def _write(model: T5) -> Mapping[str, Any] | None:
    if model.scale_outputs and not model.tie_embeddings:
        return None  # transformers scales none of an output matrix of its own
    return {
        "vocab_size": model.vocab_size,
        "num_layers": model.num_layers,
        "num_decoder_layers": model.num_layers,
        "d_model": model.embed_dim,
        "num_heads": model.num_heads,
        "d_kv": model.head_dim,
        "d_ff": model.mlp_dim,
        "n_positions": model.context_length,
        "feed_forward_proj": next(name for name, own in _MLPS.items() if own == model.mlp),
        "tie_word_embeddings": model.tie_embeddings,
        "scale_decoder_outputs": model.scale_outputs,
        "relative_attention_num_buckets": model.buckets,
        "relative_attention_max_distance": model.distance,
        "layer_norm_epsilon": model.norm_eps,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }


_EMBEDDING = "shared.weight"
FAMILY = Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    model=T5,
    keys=_KEYS,
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },  # fmt: skip
    read=_read,
    write=_write,
    names=_names,
    prefix="",
    copies={
        "encoder.embed_tokens.weight": _EMBEDDING,
        "decoder.embed_tokens.weight": _EMBEDDING,
        "lm_head.weight": _EMBEDDING,
    },
    # Of attention to the source, in the first files: nothing ever read it.
    buffers=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
