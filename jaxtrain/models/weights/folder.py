"""Published models: a Hugging Face folder (config.json, tensors by name), or a GGUF file.

Nothing in a folder is trusted: only JSON and safetensors are read, names in an index must be files
in it, and links must not lead out of it.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.config.buckets import on_disk
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors
from jaxtrain.config.untrusted import parse_json_object, read_bounded
from jaxtrain.models.model import Model
from jaxtrain.models.weights.family import Family, model_of, their_shapes
from jaxtrain.models.weights.formats import awq, float8, mxfp4
from jaxtrain.models.weights.formats.gguf import GgufFile
from jaxtrain.models.weights.formats.safetensors import DTYPES, Tensor, read_header
from jaxtrain.models.weights.sentences import read_sentence_files

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, PREPROCESSOR = "tokenizer.json", "preprocessor_config.json"
SENTENCES = "sentence_bert_config.json"
# Files that are copied to exports, so that the exported model is used like the imported one.
CARRIED = (
    CONFIG, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "generation_config.json", "chat_template.jinja", "chat_template.json",
    PREPROCESSOR, SENTENCES, "config_sentence_transformers.json",
)  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_SHOWN = 8


class StoredTensor(Protocol):
    """A tensor in a file, such as `safetensors.Tensor`."""

    @property
    def dtype(self) -> str:
        """Dtype of the tensor, as in safetensors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...

    def open(self) -> np.ndarray:
        """Read the tensor, and nothing else of the file."""
        ...


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder with a config.json.

    Attributes:
      path: the folder.
    """

    path: Path

    @classmethod
    def at(cls, name: str, *, named: str) -> "Folder":
        """Open the folder at this path.

        Args:
          name: a path.
          named: the argument's name, for messages.

        Raises:
          UserError: there is no such folder, or no config.json in it.
        """
        path = on_disk(name)
        with path_errors(f"{named} {name}", needs="name a folder that can be read"):
            if not (path / CONFIG).is_file():
                raise UserError(
                    f"{named} {name}: no Hugging Face folder there (no {CONFIG}); it is what "
                    "save_pretrained writes and what the hub serves as a snapshot"
                )
        return cls(path.absolute())

    @functools.cached_property
    def content(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return self._json(CONFIG)

    @functools.cached_property
    def family_and_model(self) -> tuple[Family, Model]:
        """The family and the sizes of config.json and, for a sentence encoder, of its
        further files; UserError for unsupported settings."""
        content = {**self.content, **read_sentence_files(self._read)}
        return model_of(content, where=str(self.path / CONFIG))

    @property
    def read_otherwise(self) -> str | None:
        """Why transformers reads the same files differently; None: it does not."""
        return None

    def extra_files(self) -> dict[str, bytes]:
        """Return the other files next to the weights, by name."""
        files = {name: self.path / name for name in CARRIED}
        return {
            name: read_bounded(self._resolve_inside(file))
            for name, file in files.items()
            if file.exists()
        }

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return every tensor by name, dequantized to floats; only headers are read.

        Raises:
          UserError: there is not a safetensors file, or one of them is invalid.
        """
        found: dict[str, Tensor] = {}
        for file in self._files():
            for name, tensor in read_header(self._resolve_inside(file)).items():
                if name in found:
                    raise UserError(f"{self.path}: {name}is in two of its files")
                found[name] = tensor
        settings = self.content.get("quantization_config") or {}
        if not isinstance(settings, dict):
            raise UserError(
                f"{self.path / CONFIG}: quantization_config is not an object; fetch it again"
            )
        merge_of = {
            mxfp4.METHOD: mxfp4.merge,
            awq.METHOD: awq.merge,
            float8.METHOD: functools.partial(float8.merge, settings=settings),
        }
        method = settings.get("quant_method")
        return merge_of[method](found, where=str(self.path)) if method in merge_of else found

    def _files(self) -> list[Path]:
        index = self.path / INDEX
        if index.exists():
            return [self.path / name for name in self._files_of_index(self._json(INDEX))]
        if (self.path / WEIGHTS).exists():
            return [self.path / WEIGHTS]
        pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in _PICKLES)
        if pickles:
            raise UserError(
                f"{self.path}: its weights are in a pickle ({pickles[0]}), which runs code when it "
                "is opened and is not read here; if you trust it, convert it with "
                "transformers: AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
            )
        raise UserError(f"{self.path}: no weights there ({WEIGHTS} or {INDEX})")

    def _files_of_index(self, content: Mapping[str, Any]) -> list[str]:
        """Return the files that an index names, without duplicates."""
        table = content.get("weight_map")
        values = list(table.values()) if isinstance(table, dict) else []
        for name in values:
            if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.+-]*\.safetensors", name):
                raise UserError(
                    f"{self.path / INDEX} names {name!r}, which is not a safetensors file in its "
                    "folder; fetch it again from a source that you trust"
                )
        names = list(dict.fromkeys(values))
        missing = [name for name in names if not (self.path / name).exists()]
        if missing or not names:
            raise UserError(
                f"{self.path}: {INDEX} names {len(names)} files, of which {len(missing)} are not "
                f"there ({', '.join(missing[:_MAX_SHOWN])}); fetch them again"
            )
        return names

    def _read(self, name: str) -> bytes | None:
        file = self.path / name
        return read_bounded(self._resolve_inside(file)) if file.exists() else None

    def _json(self, name: str) -> Mapping[str, Any]:
        file = self._resolve_inside(self.path / name)
        return json_object(read_bounded(file), file)

    def _resolve_inside(self, file: Path) -> Path:
        """Return the path of the file in the folder; the hub's cache links to its own blobs."""
        real, root = file.resolve(), self.path.resolve()
        blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
        if not (real.is_relative_to(root) or real.is_relative_to(blobs)):
            raise UserError(
                f"{file} is a link out of its folder, to {real}; if you trust the file, copy it "
                "there"
            )
        return real


def json_object(content: bytes, file: Path) -> Mapping[str, Any]:
    """Parse a JSON file of a published folder.

    Args:
      content: of the file.
      file: for the message.

    Raises:
      UserError: it is not a JSON object.
    """
    return parse_json_object(content, named=str(file))


def match(
    family: Family,
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    *,
    where: str,
    unread: Collection[str] = (),
) -> dict[str, StoredTensor]:
    """Match the stored tensors with the family's name map.

    Args:
      family: the map.
      model: our sizes.
      shapes: of our parameters, by name.
      stored: the folder's tensors.
      where: the folder, for the message.
      unread: names of our parameters whose tensors are skipped, present or not; with
        these, so are those of a head that this model lacks.

    Raises:
      UserError: tensors that are missing, unexpected, of another shape or not floating point.
    """
    every = family.names(model)
    lines = [line for line in every if line.ours in shapes]
    wanted = their_shapes((line for line in lines if line.ours not in unread), shapes)
    passed_over = set(their_shapes((line for line in lines if line.ours in unread), shapes))
    if unread:
        passed_over |= {line.theirs for line in every if line.ours not in shapes}
    bare = not any(name.startswith(family.prefix) for name in stored)
    known = {line.ours for line in lines}
    found: dict[str, StoredTensor] = {}
    problems = [
        f"{ours} {list(shape)} is not in the file; Finetune.reinitialize initializes such tensors"
        for ours, shape in shapes.items()
        if ours not in known and ours not in unread
    ]
    for name, shape in wanted.items():
        there = name.removeprefix(family.prefix) if bare else name
        tensor = stored.get(there)
        if tensor is None:
            problems.append(f"{there} {list(shape)} is missing")
            continue
        found[name] = tensor
        if tensor.shape != shape:
            problems.append(f"{there} is {list(tensor.shape)}; it must be {list(shape)}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{there} is {tensor.dtype}; it must be {', '.join(DTYPES)}")
    taken = set(found.values())
    for name, tensor in stored.items():
        whole = name if not bare else family.prefix + name
        if {name, whole} & passed_over:
            continue
        if tensor not in taken and not re.fullmatch(family.buffers, name):
            problems += _leftover_error(name, tensor, family.copies.get(name), found)
    if problems:
        shown = [f"  {one}" for one in problems[:_MAX_SHOWN]]
        shown += [f"  and {len(problems) - _MAX_SHOWN} more"] * (len(problems) > _MAX_SHOWN)
        raise UserError(
            "\n".join([f"{where}: its tensors are not those of {_format(family, model)}:", *shown])
        )
    return found


def _format(family: Family, model: Model) -> str:
    sizes = " ".join(f"{key}={value}" for key, value in (family.write(model) or {}).items())
    return f"{family.architecture} with {sizes}"


def _leftover_error(
    name: str, tensor: StoredTensor, copy_of: str | None, found: Mapping[str, StoredTensor]
) -> Iterable[str]:
    """Return a clause for a tensor without a parameter; a tied output matrix has one."""
    first = None if copy_of is None else found.get(copy_of)
    if first is not None:
        same = (first.dtype, first.shape) == (tensor.dtype, tensor.shape)
        if not (same and _equal(tensor, first)):
            yield f"{name} differs from {copy_of}, to which {CONFIG} ties it"
        return
    yield f"{name} {list(tensor.shape)} does not belong to this architecture"


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    return all((a == b).all() for a, b in zip(one.open(), other.open(), strict=True))


# -- a published model from any source -------------------------------------------------------------


class Published(Protocol):
    """A published model; members as in `Folder`."""

    @property
    def path(self) -> Path: ...
    @property
    def content(self) -> Mapping[str, Any]: ...
    @property
    def family_and_model(self) -> tuple[Family, Model]: ...
    @property
    def read_otherwise(self) -> str | None: ...

    def extra_files(self) -> dict[str, bytes]: ...
    def tensors(self) -> Mapping[str, StoredTensor]: ...


def open_published(name: str, *, named: str) -> Published:
    """Open a published model.

    Args:
      name: the path of a Hugging Face folder, or of a file that ends in .gguf.
      named: the argument's name, for messages.

    Raises:
      UserError: there is neither.
    """
    path = on_disk(name)
    if path.suffix == ".gguf" and path.is_file():
        return GgufFile(path.absolute())
    return Folder.at(name, named=named)
