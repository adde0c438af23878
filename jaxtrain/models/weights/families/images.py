"""ViT and ResNet-18 to 152: Hugging Face names and settings, running statistics included."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.config.key_table import only, read_keys
from jaxtrain.models.convolutional.resnet import BLOCKS_PER_STAGE, BOTTLENECKS, ResNet
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights import config_file
from jaxtrain.models.weights.config_file import (
    CLASSES,
    ConfigFile,
    Row,
    constant,
    holds,
    ignore,
    integer,
    number,
    requires,
)
from jaxtrain.models.weights.family import Family, Name, layer_norm, linear

_CHANNELS = integer("num_channels", "channels", 3)

# -- ViT -------------------------------------------------------------------------------------------

_LAYER = "vit.encoder.layer.{L}"
_QKV = f"{_LAYER}.attention.attention.{{P:query|key|value}}"


def _vit_names(model: ViT) -> tuple[Name, ...]:
    side = model.patch_size
    sizes = (("S", side), ("U", side), ("C", model.channels))
    patches = "vit.embeddings.patch_embeddings.projection"
    return (
        Name(f"{patches}.weight", "patches", "(SUC)D->DCSU", sizes=sizes),
        Name(f"{patches}.bias", "patches_bias", "D->D"),
        Name("vit.embeddings.cls_token", "class_token", "D->()()D"),
        Name("vit.embeddings.position_embeddings", "position_embedding", "TD->()TD"),
        *layer_norm(f"{_LAYER}.layernorm_before", "layers/attention_norm", "LD->D"),
        *linear(_QKV, "layers/qkv", "LPDNH->(NH)D", "LPNH->(NH)"),
        *linear(f"{_LAYER}.attention.output.dense", "layers/out", "LNHD->D(NH)", "LD->D"),
        *layer_norm(f"{_LAYER}.layernorm_after", "layers/mlp_norm", "LD->D"),
        *linear(f"{_LAYER}.intermediate.dense", "layers/up", "LDF->FD", "LF->F"),
        *linear(f"{_LAYER}.output.dense", "layers/down", "LFD->DF", "LD->D"),
        *layer_norm("vit.layernorm", "norm", "D->D"),
        Name("classifier.weight", "head/weight", "DC->CD"),
        Name("classifier.bias", "head/bias", "C->C"),
    )


_VIT = Family(
    architecture="ViTForImageClassification",
    model_type="vit",
    model=ViT,
    rows=(
        Row(config_file.CLASSIFIER),
        _CHANNELS,
        integer("image_size", "image_size", 224),
        integer("patch_size", "patch_size", 16),
        integer("num_hidden_layers", "num_layers", 12),
        integer("hidden_size", "embed_dim", 768),
        integer("num_attention_heads", "num_heads", 12),
        integer("intermediate_size", "mlp_dim", 3072),
        number("layer_norm_eps", "norm_eps", 1e-12),
        constant("hidden_act", "gelu"),
        constant("qkv_bias", True),
        CLASSES,
        ignore(
            "it belongs to a head for masked patches or to a pooler, which are not imported",
            "encoder_stride", "pooler_output_size", "pooler_act",
        ),
    ),
    names=_vit_names,
    prefix="vit.",
    copies={},
    buffers=r"vit\.pooler\..*",
)  # fmt: skip

# -- ResNet ----------------------------------------------------------------------------------------

_WIDENING = {"basic": 1, "bottleneck": 4}  # channels after a stage over its width
_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}
_NORM_EPS = 1e-5  # of PyTorch's batch norms; config.json never sets another


def _convolution_and_norm(theirs: str, ours: str) -> Iterator[Name]:
    """Yield a convolution and its batch norm."""
    yield Name(f"{theirs}.convolution.weight", f"{ours}/kernel", "HWCD->DCHW")
    for there, here in _NORM.items():
        yield Name(f"{theirs}.normalization.{there}", f"{ours}/{here}", "D->D")


def _resnet_names(model: ResNet) -> tuple[Name, ...]:
    counts = BLOCKS_PER_STAGE[model.depth]
    positions = [(stage, layer) for stage, count in enumerate(counts) for layer in range(count)]
    found = list(_convolution_and_norm("resnet.embedder.embedder", "stem"))
    for at, (position, block) in enumerate(zip(positions, model.blocks(), strict=True)):
        theirs, ours = "resnet.encoder.stages.{}.layers.{}".format(*position), f"blocks/{at}"
        for i in range(len(block.convolutions)):
            found += _convolution_and_norm(f"{theirs}.layer.{i}", f"{ours}/convolutions/{i}")
        if block.shortcut is not None:
            found += _convolution_and_norm(f"{theirs}.shortcut", f"{ours}/shortcut")
    found.append(Name("classifier.1.weight", "head", "DC->CD"))
    found.append(Name("classifier.1.bias", "head_bias", "C->C"))
    return tuple(found)


def _counts(model: ResNet) -> tuple[str, ...]:
    """PyTorch's count of batches, which it uses for norms without momentum."""
    means = (name.theirs for name in _resnet_names(model) if name.theirs.endswith(".running_mean"))
    return tuple(mean.replace("running_mean", "num_batches_tracked") for mean in means)


def _read_resnet(config: ConfigFile) -> dict[str, Any]:
    kind = _kind(config.content.get("layer_type") != "basic")
    if kind == "bottleneck":  # there the stride is in the first 1x1 convolution
        config.only("downsample_in_bottleneck", [False], default=False)
    depths = {
        depth: list(counts)
        for depth, counts in BLOCKS_PER_STAGE.items()
        if _kind(depth in BOTTLENECKS) == kind
    }
    config.only("depths", depths.values(), default=[3, 4, 6, 3])
    found = config.content.get("depths") or [3, 4, 6, 3]
    width = config.integer("embedding_size", 64)
    config.only("hidden_sizes", [_sizes(width, kind)], default=[256, 512, 1024, 2048])
    return {
        "depth": next((depth for depth, counts in depths.items() if counts == found), 50),
        "width": width,
        "norm_eps": _NORM_EPS,
    }


def _kind(of_bottlenecks: bool) -> str:
    return "bottleneck" if of_bottlenecks else "basic"


def _sizes(width: int, kind: str) -> list[int]:
    """Channels after each stage."""
    return [width * _WIDENING[kind] * 2**stage for stage in range(4)]


def _write_resnet(model: ResNet) -> dict[str, Any]:
    kind = _kind(model.depth in BOTTLENECKS)
    return {
        "embedding_size": model.first_width,
        "hidden_sizes": _sizes(model.first_width, kind),
        "depths": list(BLOCKS_PER_STAGE[model.depth]),
        "layer_type": kind,
    }


_RESNET = Family(
    architecture="ResNetForImageClassification",
    model_type="resnet",
    model=ResNet,
    rows=(
        Row(config_file.CLASSIFIER),
        requires(lambda model: model.for_imagenet),
        holds(norm_eps=_NORM_EPS),
        _CHANNELS,
        Row(
            {
                **read_keys("embedding_size", "hidden_sizes", "depths"),
                "layer_type": only("bottleneck", "basic"),
            },
            _read_resnet,
            _write_resnet,
        ),
        constant("hidden_act", "relu"),
        constant("downsample_in_first_stage", False),
        Row(
            read_keys("downsample_in_bottleneck"),
            write=lambda _: {"downsample_in_bottleneck": False},
        ),
        CLASSES,
        ignore(
            "it selects outputs of a backbone; this model is a classifier",
            "out_features", "out_indices", "stage_names",
        ),
    ),
    names=_resnet_names,
    prefix="resnet.",
    copies={},
    buffers=r".*\.num_batches_tracked",
    counts=_counts,
)  # fmt: skip

FAMILIES = (_VIT, _RESNET)
