"""Writes a file whole or not at all."""

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
