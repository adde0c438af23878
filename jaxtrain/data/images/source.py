"""`ImageData`: labelled images, split by class, augmented and normalized."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.images import stores
from jaxtrain.data.images import transform as transform
from jaxtrain.data.images.saved import is_parquet, open_parquet, open_saved
from jaxtrain.data.images.stores import (
    LabelledImages,
    Subset,
    has_colors,
    open_folder,
    sample_images,
)
from jaxtrain.data.images.tars import is_tar, open_tars
from jaxtrain.data.images.transform import Augment
from jaxtrain.data.source import (
    TFDS_PREFIX,
    Dataset,
    check_heldout_fraction,
    check_heldout_split,
    digest,
    existing_path,
    file_facts,
    glob_files,
    heldout_facts,
    hold_out,
    is_glob,
    is_heldout,
    tfds_name,
)
from jaxtrain.data.text.formats.saved_datasets import has_splits, holds_saved
from jaxtrain.data.tfds import check_feature, open_builder, open_split

SOURCE_WORDS = (*stores.DEMO, "synthetic", "tfds:NAME")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData:
    """Labelled images for classification.

    Attributes:
      source: `'digits'` (1,797 of 8x8) or `'mnist5k'` (5,000 of 28x28), both from jaxtrain[demo]; a
        folder with a folder of PNG and JPEG files for each class, numbered by sorted name;
        WebDataset's `.tar` files or `.parquet` files, one, a folder or a pattern (`*`, `**`, `?`,
        `[...]`) of them; a folder of images that `datasets` saved; `'tfds:NAME'`; or `'synthetic'`,
        random pixels for benchmarks.
      image_size: height and width of the model's input, in pixels.
      resize: how images of another size are resized, unless `crop` is 'resized' in training:
        'crop' scales the shorter side to it and crops the middle in one step; 'shortest_edge' does
        so in two, of whole pixels, and 'stretch' resizes both sides whatever their ratio, both like
        image processors of transformers do.
      resize_to: pixels of a side, for 'shortest_edge' and 'stretch', before the center crop; None:
        image_size.
      resample: Pillow's filter that resizes.
      channels: 1 (gray) or 3 (RGB); for class folders, if not set, that of their first images.
      num_classes: number of classes of the source; for class folders, if not set, their number.
      crop: in training 'pad' shifts by up to `padding` pixels and 'resized' scales a random box; in
        evaluation 'resized' takes the middle 224/256. 'none' does neither.
      padding: largest shift of crop 'pad', in pixels.
      flip: mirror half of the training images left to right.
      augment: `@Augment()`, further augmentation of training images; None: none.
      rescale_factor: factor of pixels of 0 to 255.
      mean: subtracted from rescaled pixels; one value, or one per channel.
      std: divisor of rescaled pixels, after subtracting the mean; one value, or one per channel.
      workers: processes that decode and augment; 0: two threads of this process. Batches
        are the same with any number.
      heldout_fraction: share of each class that is held out, evenly spaced over its order.
      data_dir: where TFDS keeps prepared data sets; None is TFDS's own default.
      train_split: the split to train on, of TFDS or of a folder that `datasets` saved.
      heldout_split: the split to evaluate on, or for `.tar` and `.parquet` files those with this
        word in their names, such as 'val'; None holds out a part of `train_split`.
      image_feature: the feature or column with the image, in TFDS, `datasets` and `.parquet`.
      label_feature: the one with the label, or the field of a `.tar` sample's `.json`.
    """

    source: Annotated[str, PathOr((*stores.DEMO, "synthetic", TFDS_PREFIX))] = "digits"
    image_size: int = 8
    resize: Literal["crop", "shortest_edge", "stretch"] = "crop"
    resize_to: int | None = None
    resample: transform.Filter = "bilinear"
    channels: Literal[1, 3] = 1
    num_classes: int = 10
    crop: Literal["none", "pad", "resized"] = "none"
    padding: int = 4
    flip: bool = False
    augment: Augment | None = None
    rescale_factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    workers: int = 0
    heldout_fraction: float = 0.2
    data_dir: Annotated[str | None, PathOr()] = None
    train_split: str = "train"
    heldout_split: str | None = None
    image_feature: str = "image"
    label_feature: str = "label"

    def __post_init__(self) -> None:
        for name, least in (("image_size", 1), ("num_classes", 2), ("padding", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise UserError(f"ImageData.{name} = {getattr(self, name)}: use at least {least}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) not in (1, self.channels):
                raise UserError(
                    f"ImageData.{name} = {values} has {len(values)} values; it takes one, or one "
                    f"for each of ImageData.channels = {self.channels}"
                )
        if self.rescale_factor <= 0:
            raise UserError(
                f"ImageData.rescale_factor = {self.rescale_factor}; use a number above 0"
            )
        if self.resize_to is not None and self.resize == "crop":
            raise UserError(
                f"ImageData.resize_to = {self.resize_to} applies to ImageData.resize = "
                "'shortest_edge' or 'stretch'; use None, or one of these"
            )
        if self.resize_to is not None and self.resize_to < self.image_size:
            raise UserError(
                f"ImageData.resize_to = {self.resize_to} is under ImageData.image_size = "
                f"{self.image_size}; use at least that, or None"
            )
        if min(self.std) <= 0:
            raise UserError(f"ImageData.std = {self.std}; use numbers above 0")
        check_heldout_fraction("ImageData.heldout_fraction", self.heldout_fraction)
        check_heldout_split(
            "ImageData",
            self.train_split,
            self.heldout_split,
            # Whether a folder contains tars is checked when it is opened.
            named=self.source not in (*stores.DEMO, "synthetic"),
        )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of an example."""
        return self.image_size, self.image_size, self.channels

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed in pairs; each then has two labels."""
        return self.augment is not None and self.augment.mixes

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, *self.image_shape)
        images: Any = jax.ShapeDtypeStruct(shape, np.float32)
        label_shape = (global_batch_size, 2) if self.mixes else shape[:1]
        labels: Any = jax.ShapeDtypeStruct(label_shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(label_shape, np.float32)
        return Batch(images, labels, mask)

    def prepare(self, image: Image.Image, rng: np.random.Generator | None) -> np.ndarray:
        """Preprocess an image for the model: float32 [H, W, C], augmented if there is an `rng`."""
        pixels = self._pixels(transform.convert(image, self.channels), rng)
        return transform.normalize(pixels, self.mean, self.std, factor=self.rescale_factor)

    def _pixels(self, image: Image.Image, rng: np.random.Generator | None) -> np.ndarray:
        if rng is not None and self.crop == "resized":
            image = transform.random_resized_crop(
                image, self.image_size, rng, resample=self.resample
            )
        else:
            image = self._resize(image)
        pixels = transform.to_array(image)
        if rng is None:
            return pixels
        if self.crop == "pad":
            pixels = transform.pad_and_crop(pixels, self.padding, rng)
        pixels = transform.flip(pixels, rng) if self.flip else pixels
        return pixels if self.augment is None else self.augment.pixels(pixels, rng)

    def _resize(self, image: Image.Image) -> Image.Image:
        """Resize an image for the model, without randomness."""
        if self.resize == "crop":
            zoom = transform.EVALUATION_ZOOM if self.crop == "resized" else 1.0
            return transform.center_crop(image, self.image_size, zoom=zoom, resample=self.resample)
        return transform.resize_and_crop(
            image,
            self.image_size,
            to=self.resize_to or self.image_size,
            stretch=self.resize == "stretch",
            resample=self.resample,
        )

    def class_names(self) -> list[str]:
        """Return the names of the classes by label; their numbers if the source has no names.

        Raises:
          UserError: the source does not exist, or has another number of classes.
        """
        return self._split(0)[2]

    def open(self, *, seed: int) -> Dataset:
        """Find and split the images; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: no such source, an extra that is not installed, another number of classes, or a
            split that would be empty.
        """
        train, heldout, class_names = self._split(seed)
        for name, images in (("training", train), ("held-out", heldout)):
            if not len(images):
                raise UserError(
                    f"ImageData.source = {self.source!r}: its {name} part would be empty; use more "
                    f"images or another ImageData.heldout_fraction (now {self.heldout_fraction})"
                )
        where = ("source", "data_dir", "workers")
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k not in where}
        header = {"kind": "image", "class_names": class_names, **settings}
        # Settings of later versions: omitted by default, so that older digests stay valid.
        for name in ("augment", "resize", "resize_to", "resample", "rescale_factor"):
            if getattr(self, name) == getattr(ImageData, name):
                del header[name]
        kind = PreparedImages if self.augment is None or not self.mixes else MixedImages
        facts: dict[str, float | int | str] = {
            "source": self.source,
            "classes": self.num_classes,
            "class_names": ", ".join(class_names),
            "train_images": len(train),
            "heldout_images": len(heldout),
            **self._describe_choices(train, heldout),
        }
        return Dataset(
            kind(train, self),
            kind(heldout, self),
            digest(header, [*train.content(), *heldout.content()]),
            facts,
            None,
            "images",
            workers=self.workers,
        )

    def _describe_choices(
        self, train: LabelledImages, heldout: LabelledImages
    ) -> dict[str, int | str]:
        """Return facts on files left out, colors not read, and the rule for held-out images."""
        if not (isinstance(train, Subset) and isinstance(heldout, Subset)):
            return {}
        images, facts = train.images, dict[str, int | str]()
        if isinstance(images, stores.FileImages):
            facts |= file_facts(len(images), images.left_out)
            if self.channels == 1 and any(map(has_colors, sample_images(images))):
                facts["converted"] = (
                    "Images in color are converted to grey, because ImageData.channels = 1; 3 "
                    "keeps the colors"
                )
        counts = np.unique(images.labels(), return_counts=True)[1].tolist()
        if not any(is_heldout(count, self.heldout_fraction).any() for count in counts):
            setting, most = "ImageData.heldout_fraction", max(counts)
            facts |= heldout_facts(setting, self.heldout_fraction, most, "image", each="class")
        return facts

    def _split(self, seed: int) -> tuple[LabelledImages, LabelledImages, list[str]]:
        if self.source == "synthetic":
            train, heldout = (
                stores.RandomImages(count, self.image_shape, self.num_classes, (seed, number))
                for number, count in enumerate(stores.SYNTHETIC_IMAGES.values())
            )
            return train, heldout, _numbers(self.num_classes)
        name = tfds_name("ImageData.source", self.source)
        if name is not None:
            builder, class_names = self._builder(name)
            self._check_num_classes(len(class_names))
            train = self._tfds(builder, self.train_split, "ImageData.train_split")
            if self.heldout_split is not None:
                held = self._tfds(builder, self.heldout_split, "ImageData.heldout_split")
                return train, held, class_names
            return *self._hold_out(train), class_names
        if self.source in stores.DEMO:
            images, class_names = stores.DEMO[self.source](), _numbers(10)
        else:
            if is_glob(self.source):
                found = glob_files(self.source, "ImageData.source")
                for path in found:
                    if not _holds_images(path.name):
                        raise UserError(
                            f"ImageData.source = {self.source!r}: {path} is not a .tar or .parquet "
                            "file; name one, or a folder of class folders"
                        )
                return self._of_files(found)
            path = existing_path("ImageData.source", self.source, words=SOURCE_WORDS)
            inside = self._resolve_inside(path)
            files = [one for one in inside if _holds_images(one.name) and not one.is_dir()]
            if files:
                return self._of_files(files)
            if holds_saved(one.name for one in inside):
                return self._of_saved(path)
            check_heldout_split("ImageData", self.train_split, self.heldout_split, named=False)
            images, class_names = open_folder(path)
        self._check_num_classes(len(class_names))
        return *self._hold_out(images), class_names

    def _resolve_inside(self, path: AnyPath) -> list[AnyPath]:
        if path.is_dir():
            return sorted(path.iterdir())
        if _holds_images(path.name):
            return [path]
        raise UserError(
            f"ImageData.source = {str(path)!r} is a file; it takes a folder of folders, or .tar or "
            ".parquet files"
        )

    def _of_saved(self, path: AnyPath) -> tuple[LabelledImages, LabelledImages, list[str]]:
        check_heldout_split(
            "ImageData", self.train_split, self.heldout_split, named=has_splits(path)
        )
        fields = {"image_field": self.image_feature, "label_field": self.label_feature}
        train, names = open_saved(path, self.train_split, "ImageData.train_split", **fields)
        if names is not None:
            self._check_num_classes(len(names))
        names = names or _numbers(self.num_classes)
        self._check_labels(train)
        if self.heldout_split is None:
            return *self._hold_out(train), names
        held, _ = open_saved(path, self.heldout_split, "ImageData.heldout_split", **fields)
        self._check_labels(held)
        return train, held, names

    def _of_files(self, files: list[AnyPath]) -> tuple[LabelledImages, LabelledImages, list[str]]:
        """Return the images of tar files or of Parquet files."""
        kinds = {is_tar(path.name): path for path in files}
        if len(kinds) > 1:
            raise UserError(
                f"ImageData.source = {self.source!r} holds {kinds[True].name} and "
                f"{kinds[False].name}; name files of one kind, such as '*.tar'"
            )
        word = self.heldout_split
        held = [path for path in files if word is not None and word in path.name]
        if word is not None and len(held) in (0, len(files)):
            which = "all" if held else "none"
            raise UserError(
                f"ImageData.heldout_split = {word!r} is in the names of {which} of the "
                f"{len(files)} files of ImageData.source = {self.source!r}, such as "
                f"{files[0].name}; use a word that some of them have, or None"
            )
        rest = [path for path in files if path not in held]
        opened = [self._open_files(some) for some in (rest, held) if some]
        names = opened[0][1]
        if names is not None:
            self._check_num_classes(len(names))
        for images, _ in opened:
            self._check_labels(images)
        names = names or _numbers(self.num_classes)
        if held:
            return opened[0][0], opened[1][0], names
        return *self._hold_out(opened[0][0]), names

    def _open_files(self, files: list[AnyPath]) -> tuple[LabelledImages, list[str] | None]:
        if is_tar(files[0].name):
            return open_tars(files, self.label_feature), None
        return open_parquet(files, image_field=self.image_feature, label_field=self.label_feature)

    def _hold_out(self, images: LabelledImages) -> tuple[Subset, Subset]:
        labels = images.labels()
        held = np.zeros(len(labels), bool)
        for hold in (is_heldout, hold_out):  # the last of each class, if the fraction has none
            for label in np.unique(labels):
                (of_class,) = np.nonzero(labels == label)
                held[of_class] = hold(len(of_class), self.heldout_fraction)
            if held.any():
                break
        return Subset(images, np.flatnonzero(~held)), Subset(images, np.flatnonzero(held))

    def _builder(self, name: str) -> tuple[Any, list[str]]:
        builder = open_builder(name, self.data_dir, "ImageData.source")
        check_feature(builder, self.image_feature, "Image", "ImageData.image_feature")
        label = check_feature(builder, self.label_feature, "ClassLabel", "ImageData.label_feature")
        return builder, list(label.names)

    def _tfds(self, builder: Any, split: str, setting: str) -> stores.TfdsImages:
        records = open_split(builder, split, setting, skip=(self.image_feature,))
        size = builder.info.splits[split].num_bytes
        identity = f"{builder.info.full_name} {split} {len(records)} records {size} bytes"
        return stores.TfdsImages(records, self.image_feature, self.label_feature, identity)

    def _check_labels(self, images: LabelledImages) -> None:
        most = int(images.labels().max())
        if most >= self.num_classes:
            raise UserError(
                f"ImageData.num_classes = {self.num_classes}, but ImageData.source = "
                f"{self.source!r} has a label {most}; set ImageData.num_classes = {most + 1}"
            )

    def _check_num_classes(self, found: int) -> None:
        if found != self.num_classes:
            raise UserError(
                f"ImageData.num_classes = {self.num_classes}, but ImageData.source = "
                f"{self.source!r} has {found} classes; set ImageData.num_classes = {found}"
            )


@dataclasses.dataclass(frozen=True)
class PreparedImages:
    """Preprocessed images; implements Examples."""

    images: LabelledImages
    config: ImageData

    def __len__(self) -> int:
        return len(self.images)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return an image [H, W, C], its label and a mask of 1; `rng` None is evaluation."""
        image, label = self.images.read(index)
        inputs = self.config.prepare(image, rng)
        return Batch(inputs, np.asarray(label, np.int32), np.ones((), np.float32))


@dataclasses.dataclass(frozen=True)
class MixedImages(PreparedImages):
    """Training images mixed in pairs; implements MixedRows.

    Each has two labels, weighted by their images' shares.
    """

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return an image [H, W, C] and its label twice, of which the first counts."""
        one = super().example(index, rng)
        return Batch(one.inputs, np.repeat(one.targets, 2), np.array([1, 0], np.float32))

    def mix(self, own: Batch, other: Batch, rng: np.random.Generator) -> Batch:
        """Mix two images and their labels (mixup, CutMix), as in `MixedRows`."""
        assert self.config.augment is not None, "what mixes"
        inputs, share = self.config.augment.mix(own.inputs, other.inputs, rng)
        return Batch(
            inputs,
            np.stack([own.targets[0], other.targets[0]]),
            np.stack([own.loss_mask[0] * share, other.loss_mask[0] * (1 - share)]).astype(
                np.float32
            ),
        )


def _holds_images(name: str) -> bool:
    return is_tar(name) or is_parquet(name)


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]
