"""preprocessor_config.json of an image model, converted to our image settings.

The classes are transformers' ViTImageProcessor, DeiTImageProcessor and ConvNextImageProcessor,
which differ in their defaults and in how they resize.
"""

import sys
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import KeyTable, check_keys, ignore_keys, only, read_keys
from jaxtrain.models.model import ImageModel
from jaxtrain.models.transformers.vit import ViT

KEYS: KeyTable = {
    **read_keys(
        "image_processor_type", "feature_extractor_type", "size", "crop_size", "do_center_crop",
        "crop_pct", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean",
        "image_std",
    ),
    **ignore_keys("images are converted to the model's channels", "do_convert_rgb"),
    **ignore_keys("it sets how transformers returns arrays, or where it computes them",
                 "return_tensors", "data_format", "input_data_format", "device",
                 "disable_grouping", "processor_class", "_valid_processor_keys"),
    **ignore_keys("size says it", "default_to_square"),
    **ignore_keys("padding is off", "pad_size"),
    **ignore_keys("it counts tokens of vision-language models", "image_seq_length"),
    "do_resize": only(True),
    "do_pad": only(False, None),
}  # fmt: skip
# Pillow's filters by their numbers there.
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_STANDARD = [0.5, 0.5, 0.5]
# Defaults by class.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {"size": 224, "resample": 2},
    "DeiT": {"size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224},
    "ConvNext": {"size": 384, "resample": 3, "crop_pct": 224 / 256},
}
_ENDINGS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_MOST_PIXELS = 8192  # of a side: no model reads more, and a typo would fill the memory
# From this size on ConvNextImageProcessor does not crop.
_UNCUT = 384


def image_settings(content: Mapping[str, Any], model: ImageModel, *, where: str) -> dict[str, Any]:
    """Return the settings of ImageData that match the published model's image processor.

    Args:
      content: of preprocessor_config.json.
      model: the sizes of the model.
      where: the file, for the message.

    Raises:
      UserError: everything that is not supported, in one message.
    """
    reader = _Reader(content, model)
    settings = reader.settings()
    if reader.reasons:
        lines = "\n".join(f"  {reason}" for reason in reader.reasons)
        raise UserError(f"{where}: these settings are not supported:\n{lines}")
    return settings


class _Reader:
    """A preprocessor_config.json with the defaults of its class; collects unsupported settings."""

    def __init__(self, content: Mapping[str, Any], model: ImageModel) -> None:
        self.model = model
        self.reasons = list(check_keys(content, KEYS))
        default = "ViT" if isinstance(model, ViT) else "ConvNext"
        key = "image_processor_type"
        named = (
            content.get(key) or content.get("feature_extractor_type") or f"{default}{_ENDINGS[0]}"
        )
        known = {f"{kind}{ending}": kind for kind in _DEFAULTS for ending in _ENDINGS}
        if not isinstance(named, str) or named not in known:
            kinds = " or ".join(f"{kind}ImageProcessor" for kind in _DEFAULTS)
            self.reasons.append(f"{key} = {named!r}; it must be {kinds}")
        self.kind = known.get(str(named), default)
        stated = {key: value for key, value in content.items() if value is not None}
        self.content = {**_DEFAULTS[self.kind], **stated}

    def settings(self) -> dict[str, Any]:
        """Return every setting that the file determines."""
        scales, normalizes = self._flag("do_rescale", True), self._flag("do_normalize", True)
        return {
            **self._sizes(),
            "resample": self._filter(),
            "rescale_factor": self._number("rescale_factor", 1 / 255) if scales else 1.0,
            "mean": self._values("image_mean") if normalizes else (0.0,),
            "std": self._values("image_std") if normalizes else (1.0,),
        }

    def _sizes(self) -> dict[str, Any]:
        """Settings of resizing and cropping."""
        if self.kind == "ConvNext":
            if self._flag("do_center_crop", False):
                self._validate("do_center_crop", "false, since crop_pct cuts")
            size = self._side("size", "shortest_edge")
            if size >= _UNCUT:
                return {"image_size": self._fitting(size, "size"), "resize": "stretch"}
            return {
                "image_size": self._fitting(size, "size"),
                "resize": "shortest_edge",
                "resize_to": self._uncut(size),
                "crop": "resized",
            }
        cuts = self._flag("do_center_crop", False)
        by_edge = isinstance(self.content["size"], dict) and "shortest_edge" in self.content["size"]
        size = self._side("size", "shortest_edge" if by_edge and cuts else "height")
        kind = "shortest_edge" if by_edge else "stretch"
        if not cuts:
            return {"image_size": self._fitting(size, "size"), "resize": kind}
        side = self._fitting(self._side("crop_size", "height"), "crop_size")
        if not side <= size <= _MOST_PIXELS:
            self._validate("size", f"the {side} of crop_size to {_MOST_PIXELS}")
            size = side
        return {"image_size": side, "resize": kind, "resize_to": size}

    def _uncut(self, size: int) -> int:
        """Size of the shorter side before cropping by crop_pct."""
        part = self._number("crop_pct", 1.0)
        if not size / _MOST_PIXELS <= part <= 1:
            self._validate("crop_pct", f"at most 1, and its image at most {_MOST_PIXELS} pixels")
            return size
        return int(size / part)

    def _side(self, key: str, name: str) -> int:
        """Return a size in pixels, which older files have as a number and newer ones in an
        object."""
        value = self.content.get(key)
        if isinstance(value, dict):
            found = [value.get(name)]
            names = {name}
            if name == "height":
                found.append(value.get("width"))
                names.add("width")
            is_one = found.count(found[0]) == len(found) and value.keys() == names
            value = found[0] if is_one else None
        if type(value) is int and value > 0:
            return value
        allowed = "one number above 0 as height and width" if name == "height" else (
            "a number above 0 as shortest_edge"
        )  # fmt: skip
        self._validate(key, allowed)
        return self.model.least_pixels

    def _fitting(self, side: int, key: str) -> int:
        """Image size, fixed for a ViT and a minimum for others."""
        model = self.model
        if isinstance(model, ViT) and side != model.image_size:
            self._validate(key, f"{model.image_size}, as the image_size of config.json")
            return model.image_size
        if not model.least_pixels <= side <= _MOST_PIXELS:
            self._validate(key, f"{model.least_pixels} to {_MOST_PIXELS}")
            return model.least_pixels
        return side

    def _filter(self) -> str:
        value = self.content["resample"]
        if type(value) is int and 0 <= value < len(_FILTERS):
            return _FILTERS[value]
        self._validate("resample", f"a number of Pillow's, 0 to {len(_FILTERS) - 1}")
        return "bilinear"

    def _flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key, default)
        if not isinstance(value, bool):
            self._validate(key, "true or false")
        return value is True

    def _number(self, key: str, default: float) -> float:
        value = self.content.get(key, default)
        if _is_number(value) and value > 0:
            return float(value)
        self._validate(key, "a number above 0")
        return default

    def _values(self, key: str) -> tuple[float, ...]:
        """Values per channel; for a model of one channel transformers uses one value."""
        channels = self.model.channels
        value = self.content.get(key, _STANDARD[:channels])
        value = value if isinstance(value, list) else [value]
        if not all(map(_is_number, value)) or len(value) not in (1, channels):
            self._validate(key, f"1 number, or {channels}, one a channel")
            return (0.5,)
        if key == "image_std" and min(value) <= 0:
            self._validate(key, "over 0")
            return (0.5,)
        return tuple(map(float, value))

    def _validate(self, key: str, allowed: str) -> None:
        value = self.content.get(key)
        found = f"{key} is missing" if value is None else f"{key} = {value!r}"
        self.reasons.append(f"{found}; it must be {allowed}")


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that a float can represent; booleans are not."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
