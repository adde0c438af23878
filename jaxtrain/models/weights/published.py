"""Published model from any source: a Hugging Face folder or a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config.buckets import on_disk
from jaxtrain.models.model import Model
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.folder import Folder, StoredTensor
from jaxtrain.models.weights.formats.gguf import GgufFile


class Published(Protocol):
    """A published model; members as in `folder.Folder`."""

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
