"""Ancestry of a run's parameters: the checkpoints that they were initialized from.

An ancestor is a JSON object: `path`, where it lay; `step`, of its checkpoint, null for a published
folder or file; and `digest`: of a checkpoint the BLAKE2b of its manifest, which names the digest of
each of its files, of a published model that of such a list of its own.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.buckets import BucketPath, Place
from jaxtrain.config.untrusted import parse_json
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.digests import CRC32, digest
from jaxtrain.run.checkpoint.store import Checkpoints

Ancestor = dict[str, Any]

RECEIPT = "parity.json"  # of an exported model: how far it is that of its run


def of_checkpoint(checkpoints: Checkpoints, workdir: Place, step: int) -> list[Ancestor]:
    """A run's sealed checkpoint and its ancestors, the nearest first.

    Raises:
      CheckpointError: its manifest, or what stands beside its state, is damaged.
    """
    own = {
        "path": _name(workdir),
        "step": step,
        "digest": manifest.own_digest(checkpoints.folder / str(step), step),
    }
    return [own, *checkpoints.extra(step).get("ancestors", [])]


def of_published(path: Path) -> list[Ancestor]:
    """A Hugging Face folder or a GGUF file, and the ancestors that an export has written down.

    Process 0 alone reads the files for the digest, which is null in the others.
    """
    from jaxtrain.models.weights.folder import CONFIG, INDEX

    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), path / CONFIG, path / INDEX])
    found = None
    if jax.process_index() == 0:
        listed = [[file.name, *digest(file, CRC32)] for file in files if file.is_file()]
        found = _blake2b(json.dumps(listed).encode())
    own = {"path": _name(path), "step": None, "digest": found}
    return [own, *_read_ancestors(path / RECEIPT)]


def describe_ancestors(ancestors: Sequence[Ancestor]) -> list[str]:
    """A line for each ancestor, for people."""
    lines = []
    for ancestor in ancestors:
        verb = "Its parameters began as those of" if not lines else "which began as those of"
        step = "" if ancestor["step"] is None else f", step {ancestor['step']:,}"
        lines.append(f"{verb} {ancestor['path']}{step} ({ancestor['digest']})")
    return lines


def _read_ancestors(receipt: Path) -> list[Ancestor]:
    """What a receipt says of ancestors; [] where there is none, or what it says is no such list."""
    try:
        found = parse_json(receipt.read_bytes())["ancestors"]
        return [
            {
                "path": str(one["path"]),
                "step": None if one["step"] is None else int(one["step"]),
                "digest": None if one["digest"] is None else str(one["digest"]),
            }
            for one in found
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _name(where: Place) -> str:
    return str(where if isinstance(where, BucketPath) else where.absolute())


def _blake2b(content: bytes) -> str:
    return "blake2b:" + hashlib.blake2b(content, digest_size=32).hexdigest()
