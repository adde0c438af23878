"""WebDataset tar files: an image and its label per sample, read by offset.

A sample is the members whose names agree up to the first dot: `0001.jpg` with `0001.cls`, a number,
or with `0001.json`, a field of which is one. A tar is read once, header by header, to index where
the images are stored; the index is kept in the cache folder.
"""

import dataclasses
import io
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import cache_folder, path_errors, write_atomically, writing
from jaxtrain.config.untrusted import parse_json
from jaxtrain.data.images.stores import IMAGE_SUFFIXES, decode
from jaxtrain.data.source import part_digest

_ENDINGS = frozenset(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
# A sample with one of these and no image of `_ENDINGS` would be left out.
_OTHER_IMAGES = frozenset(
    ("webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "jp2", "jxl", "avif", "npy",
     "npz", "pt", "pth", "pyd", "pickle")
)  # fmt: skip
_SHOWN = 3
_FORMAT = 2  # of the cached index
_LABEL_BYTES = 1 << 20  # of a .cls or .json next to an image


class _Tar(NamedTuple):
    """Index of a tar file: offsets, sizes and labels of its images, int64 [samples] each, and the
    sha256 hex of all its names.
    """

    begins: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    names: str


@dataclasses.dataclass(frozen=True)
class TarImages:
    """Samples of several tar files in order; implements LabelledImages.

    Attributes:
      paths: the files.
      of_file: int64 [samples], which of them has the image.
      begins, sizes: int64 [samples], its byte range there.
      of_class: int64 [samples].
      identity: sha256 hex of each file's names and sizes of members.
    """

    paths: tuple[Path, ...]
    of_file: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray
    of_class: np.ndarray
    identity: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Read one image and its label, as in `LabelledImages`."""
        path = self.paths[self.of_file[index]]
        begin = int(self.begins[index])
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(int(self.sizes[index]))
        image = decode(io.BytesIO(content), "ImageData.source", f"{path}, byte {begin}")
        return image, int(self.of_class[index])

    def labels(self) -> np.ndarray:
        """Return the labels of all images, as in `LabelledImages`."""
        return self.of_class

    def content(self) -> list[bytes | np.ndarray]:
        """Return the inputs of the digest, as in `LabelledImages`."""
        return ["\n".join(self.identity).encode(), self.of_class]


def is_tar(name: str) -> bool:
    """Whether a name is that of a tar file, compressed or not."""
    return name.lower().endswith((".tar", ".tar.gz", ".tgz"))


def open_tars(paths: list[AnyPath], label_field: str) -> TarImages:
    """Return the samples of these files.

    Args:
      paths: at least one.
      label_field: the field of a `.json` that holds the label.

    Raises:
      UserError: a file is in a bucket, compressed, truncated or not a tar; a sample has no label;
        there is no image.
    """
    own = [_on_disk(path) for path in paths]
    found = [_load_or_read(path, label_field) for path in own]
    counts = [len(tar.begins) for tar in found]
    if not sum(counts):
        others = f" and the {len(own) - 1} other files have" if len(own) > 1 else " has"
        raise UserError(
            f"ImageData.source: {own[0]}{others} no member that ends in .jpg, .jpeg or .png"
        )
    return TarImages(
        tuple(own),
        np.repeat(np.arange(len(own)), counts),
        *(np.concatenate(column) for column in list(zip(*found, strict=True))[:3]),
        identity=tuple(tar.names for tar in found),
    )


def _on_disk(path: AnyPath) -> Path:
    if isinstance(path, BucketPath):
        raise UserError(
            f"ImageData.source: {path} is in a bucket, and tar files are read by random access; "
            "copy them to a disk of this machine"
        )
    if not path.name.lower().endswith(".tar"):
        raise UserError(
            f"ImageData.source: {path} is compressed, which rules out random access; decompress "
            "it to a .tar (its images are compressed themselves)"
        )
    return path


def _load_or_read(path: Path, label_field: str) -> _Tar:
    """Return the index of a tar file, from the cache if it was read before."""
    state = path.stat()
    key = f"{_FORMAT} {path.absolute()} {state.st_size} {state.st_mtime_ns} {label_field}"
    kept = cache_folder("tars") / f"{part_digest(key.encode())[:32]}.npz"
    if kept.is_file():
        with np.load(kept) as arrays:
            begins, sizes, labels, names = (arrays[field] for field in _Tar._fields)
            return _Tar(begins, sizes, labels, str(names))
    found = _read(path, label_field)
    content = io.BytesIO()
    np.savez(content, **found._asdict())
    needs = "set JAXTRAIN_CACHE to another"
    with path_errors(f"the cache folder {kept.parent}", needs=needs), writing(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, content.getvalue())
    return found


def _read(path: Path, label_field: str) -> _Tar:
    rows, names = list[tuple[int, int, int]](), list[str]()
    without, unread = list[str](), list[str]()
    try:
        with tarfile.open(path, "r:") as tar:
            for key, members in _samples(tar):
                names += [f"{member.name}\0{member.size}" for member in members.values()]
                images = [members[one] for one in sorted(_ENDINGS & members.keys())]
                if len(images) != 1:
                    if images or _has_example(members):
                        unread.append(f"{key} ({', '.join(f'.{one}' for one in members)})")
                    continue
                [image] = images
                try:
                    label = _label(tar, members, label_field)
                except ValueError as error:
                    without.append(f"{key} ({error})")
                    continue
                rows.append((image.offset_data, image.size, label))
            _validate_no_end(path, tar.offset)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(
            f"ImageData.source: {path} is not a readable tar file, or it is truncated ({error}); "
            "copy it here again"
        ) from error
    for samples, what in (
        (without, "images without a label"),
        (unread, "samples without exactly one .jpg, .jpeg or .png"),
    ):
        if samples:
            shown, more = "; ".join(samples[:_SHOWN]), len(samples) - _SHOWN
            raise UserError(
                f"ImageData.source: {path} has {len(samples):,} {what}: {shown}"
                + (f"; and {more:,} more" if more > 0 else "")
            )
    begins, sizes, labels = np.array(rows, np.int64).reshape(-1, 3).T
    return _Tar(begins, sizes, labels, part_digest("\n".join(names).encode()))


def _has_example(members: Collection[str]) -> bool:
    """Whether a sample without an image has a label or an image of another kind or name."""
    last = {ending.rpartition(".")[2] for ending in members}
    return "cls" in members or bool(last & (_ENDINGS | _OTHER_IMAGES))


def _validate_no_end(path: Path, offset: int) -> None:
    """Raise EOFError unless a block of zeros, which ends a tar file, follows the members."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise EOFError(f"it breaks off at byte {offset:,}")


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield each sample's name and its members by suffix; the members of a sample are
    consecutive.
    """
    before, members = None, dict[str, tarfile.TarInfo]()
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        if not member.isfile() or name.startswith("."):
            continue
        stem, _, ending = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if key != before and before is not None:
            yield before, members
            members = {}
        before = key
        members[ending.lower()] = member
    if before is not None:
        yield before, members


def _label(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], field: str) -> int:
    """Return the label of a sample; ValueError if there is none."""
    for ending in ("cls", "json"):
        if ending not in members:
            continue
        file = tar.extractfile(members[ending])
        assert file is not None, "a file"
        if members[ending].size > _LABEL_BYTES:
            raise ValueError(f"a .{ending} of {members[ending].size:,} bytes")
        content = file.read()
        if ending == "cls":
            return _number(content.decode("utf-8").strip())
        record = parse_json(content)
        if not isinstance(record, dict) or field not in record:
            near = did_you_mean(field, record) if isinstance(record, dict) else ""
            raise ValueError(f"its .json has no field {field!r}{near}")
        return _number(record[field])
    raise ValueError("no .cls or .json next to it")


def _number(text: object) -> int:
    if isinstance(text, bool) or not str(text).isdecimal():
        raise ValueError(f"{text!r}, but it must be a number of at least 0")
    return int(str(text))
