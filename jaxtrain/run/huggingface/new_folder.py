"""Atomic creation of an output folder: whole or absent."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxtrain.config.buckets import on_disk
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, remove_tree


@contextlib.contextmanager
def new_folder(out: str) -> Iterator[tuple[Path, Path]]:
    """The folder of this name, and the one beside it that is written to and becomes it.

    Raises:
      UserError: the folder holds something already, or cannot be made.
    """
    folder = on_disk(out)
    with path_errors(f"--out {out}", needs="name a folder that can be made"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {out} is there already; name a folder that is new")
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.absolute().with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        beside.mkdir()
    try:
        yield folder, beside
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        remove_tree(beside)


def require_one_process(out: str) -> None:
    """Raises UserError in a run of several processes, each of which has a part of the arrays."""
    if jax.process_count() > 1:
        raise UserError(
            f"--out {out}: a run of {jax.process_count()} processes is exported by one alone; call "
            "'jaxtrain export-hf' on its folder, with bindings of Mesh for one machine"
        )
