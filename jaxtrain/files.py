"""Files written whole or not at all, and the folder of what may be deleted at any time."""

import os
import uuid
from pathlib import Path


def write_atomically(file: Path, content: bytes) -> None:
    """Writes beside the file and renames: readers see the old content or the new, never a part."""
    beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def cache_folder(kind: str) -> Path:
    """Where results of one kind are kept for later processes: under $JAXTRAIN_CACHE, else home."""
    chosen = os.environ.get("JAXTRAIN_CACHE")
    if chosen:
        return Path(chosen) / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxtrain" / kind
