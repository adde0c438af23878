"""ViT: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights import config_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.bidirectional import normed
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.labels import read_classes, write_classes
from jaxtrain.models.weights.names import Name

_LAYER = "vit.encoder.layer.{L}"
_QKV = f"{_LAYER}.attention.attention.{{P:query|key|value}}"


def _names(model: ViT) -> tuple[Name, ...]:
    side = model.patch_size
    sizes = (("S", side), ("U", side), ("C", model.channels))
    patches = "vit.embeddings.patch_embeddings.projection"
    return (
        Name(f"{patches}.weight", "patches", "(SUC)D->DCSU", sizes=sizes),
        Name(f"{patches}.bias", "patches_bias", "D->D"),
        Name("vit.embeddings.cls_token", "class_token", "D->()()D"),
        Name("vit.embeddings.position_embeddings", "position_embedding", "TD->()TD"),
        *normed(f"{_LAYER}.layernorm_before", "layers/attention_norm", "LD->D"),
        Name(f"{_QKV}.weight", "layers/qkv", "LPDNH->(NH)D"),
        Name(f"{_QKV}.bias", "layers/qkv_bias", "LPNH->(NH)"),
        Name(f"{_LAYER}.attention.output.dense.weight", "layers/out", "LNHD->D(NH)"),
        Name(f"{_LAYER}.attention.output.dense.bias", "layers/out_bias", "LD->D"),
        *normed(f"{_LAYER}.layernorm_after", "layers/mlp_norm", "LD->D"),
        Name(f"{_LAYER}.intermediate.dense.weight", "layers/up", "LDF->FD"),
        Name(f"{_LAYER}.intermediate.dense.bias", "layers/up_bias", "LF->F"),
        Name(f"{_LAYER}.output.dense.weight", "layers/down", "LFD->DF"),
        Name(f"{_LAYER}.output.dense.bias", "layers/down_bias", "LD->D"),
        *normed("vit.layernorm", "norm", "D->D"),
        Name("classifier.weight", "head/weight", "DC->CD"),
        Name("classifier.bias", "head/bias", "C->C"),
    )


_KEYS: KeyTable = {
    **config_keys.CLASSES,
    **used(
        "num_channels", "image_size", "patch_size", "num_hidden_layers", "hidden_size",
        "num_attention_heads", "intermediate_size", "layer_norm_eps",
    ),
    **irrelevant("it is of a head for hidden patches or of a pooler, which are not imported",
                 "encoder_stride", "pooler_output_size", "pooler_act"),
    "hidden_act": only("gelu"),
    "qkv_bias": only(True),
}  # fmt: skip


def _read(asked: Asked) -> Mapping[str, Any]:
    return {
        "num_classes": read_classes(asked),
        "channels": asked.whole("num_channels", 3),
        "image_size": asked.whole("image_size", 224),
        "patch_size": asked.whole("patch_size", 16),
        "num_layers": asked.whole("num_hidden_layers", 12),
        "embed_dim": asked.whole("hidden_size", 768),
        "num_heads": asked.whole("num_attention_heads", 12),
        "mlp_dim": asked.whole("intermediate_size", 3072),
        "norm_eps": asked.number("layer_norm_eps", 1e-12),
    }


def _write(model: ViT) -> Mapping[str, Any]:
    return {
        "num_channels": model.channels,
        "image_size": model.image_size,
        "patch_size": model.patch_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_dim,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": "gelu",
        "qkv_bias": True,
        **write_classes(model.num_classes),
    }


FAMILY = Family(
    architecture="ViTForImageClassification",
    model_type="vit",
    model=ViT,
    keys=_KEYS,
    read=_read,
    write=_write,
    names=_names,
    prefix="vit.",
    copies={},
    buffers=r"vit\.pooler\..*",
)
