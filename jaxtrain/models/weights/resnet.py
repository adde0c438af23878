"""ResNet-18 to 152: Hugging Face names and settings, running statistics included."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.convolutional.resnet import BLOCKS_PER_STAGE, BOTTLENECKS, ResNet
from jaxtrain.models.weights import config_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.labels import read_classes, write_classes
from jaxtrain.models.weights.names import Name

_WIDENING = {"basic": 1, "bottleneck": 4}  # channels after a stage over its width
_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}
_NORM_EPS = 1e-5  # of PyTorch's batch norms; no config.json says another


def _convolution_and_norm(theirs: str, ours: str) -> Iterator[Name]:
    """A convolution and its batch norm."""
    yield Name(f"{theirs}.convolution.weight", f"{ours}/kernel", "HWCD->DCHW")
    for there, here in _NORM.items():
        yield Name(f"{theirs}.normalization.{there}", f"{ours}/{here}", "D->D")


def _names(model: ResNet) -> tuple[Name, ...]:
    counts = BLOCKS_PER_STAGE[model.depth]
    places = [(stage, layer) for stage, count in enumerate(counts) for layer in range(count)]
    found = list(_convolution_and_norm("resnet.embedder.embedder", "stem"))
    for number, (place, block) in enumerate(zip(places, model.blocks(), strict=True)):
        theirs, ours = "resnet.encoder.stages.{}.layers.{}".format(*place), f"blocks/{number}"
        for i in range(len(block.convolutions)):
            found += _convolution_and_norm(f"{theirs}.layer.{i}", f"{ours}/convolutions/{i}")
        if block.shortcut is not None:
            found += _convolution_and_norm(f"{theirs}.shortcut", f"{ours}/shortcut")
    found.append(Name("classifier.1.weight", "head", "DC->CD"))
    found.append(Name("classifier.1.bias", "head_bias", "C->C"))
    return tuple(found)


def _counts(model: ResNet) -> tuple[str, ...]:
    """How many batches statistics are of, which PyTorch reads where a norm has no momentum."""
    means = (name.theirs for name in _names(model) if name.theirs.endswith(".running_mean"))
    return tuple(mean.replace("running_mean", "num_batches_tracked") for mean in means)


_KEYS: KeyTable = {
    **config_keys.CLASSES,
    **used("num_channels", "embedding_size", "hidden_sizes", "depths", "downsample_in_bottleneck"),
    **irrelevant(
        "it chooses outputs of a backbone, which a classifier is not",
        "out_features",
        "out_indices",
        "stage_names",
    ),
    "hidden_act": only("relu"),
    "downsample_in_first_stage": only(False),
    "layer_type": only("bottleneck", "basic"),
}


def _read(asked: Asked) -> Mapping[str, Any]:
    kind = _kind(asked.content.get("layer_type") != "basic")
    if kind == "bottleneck":  # there it puts the stride into the first convolution, of 1x1
        asked.only("downsample_in_bottleneck", [False], default=False)
    depths = {
        depth: list(counts)
        for depth, counts in BLOCKS_PER_STAGE.items()
        if _kind(depth in BOTTLENECKS) == kind
    }
    asked.only("depths", depths.values(), default=[3, 4, 6, 3])
    told = asked.content.get("depths") or [3, 4, 6, 3]
    width = asked.whole("embedding_size", 64)
    asked.only("hidden_sizes", [_sizes(width, kind)], default=[256, 512, 1024, 2048])
    return {
        "depth": next((depth for depth, counts in depths.items() if counts == told), 50),
        "num_classes": read_classes(asked),
        "channels": asked.whole("num_channels", 3),
        "width": width,
        "norm_eps": _NORM_EPS,
    }


def _kind(of_bottlenecks: bool) -> str:
    return "bottleneck" if of_bottlenecks else "basic"


def _sizes(width: int, kind: str) -> list[int]:
    """Channels after each stage."""
    return [width * _WIDENING[kind] * 2**stage for stage in range(4)]


def _write(model: ResNet) -> Mapping[str, Any] | None:
    if not model.for_imagenet or model.norm_eps != _NORM_EPS:
        return None
    kind = _kind(model.depth in BOTTLENECKS)
    return {
        "num_channels": model.channels,
        "embedding_size": model.first_width,
        "hidden_sizes": _sizes(model.first_width, kind),
        "depths": list(BLOCKS_PER_STAGE[model.depth]),
        "layer_type": kind,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        **write_classes(model.num_classes),
    }


FAMILY = Family(
    architecture="ResNetForImageClassification",
    model_type="resnet",
    model=ResNet,
    keys=_KEYS,
    read=_read,
    write=_write,
    names=_names,
    prefix="resnet.",
    copies={},
    buffers=r".*\.num_batches_tracked",
    counts=_counts,
)
