"""Documents of text from a file, a folder, Python's own library, or TFDS records."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.buckets import BucketPath, Place, in_threads
from jaxtrain.data.source import walk_files
from jaxtrain.errors import UserError

# What a folder source reads; anything else in the folder is not text.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".bash", ".c", ".cc", ".cfg", ".cpp", ".css", ".csv", ".cu", ".go", ".h", ".hpp", ".html",
    ".ini", ".ipynb", ".java", ".jl", ".js", ".json", ".jsonl", ".lua", ".md", ".org", ".php",
    ".pl", ".py", ".r", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".swift", ".tex", ".text",
    ".toml", ".ts", ".tsv", ".txt", ".xml", ".yaml", ".yml",
))
# fmt: on

# Tests repeat themselves, and installed packages are not Python's.
EMBEDDED_EXCLUDED_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
)


def read_file(path: Place) -> list[str]:
    """The one document of a UTF-8 text file."""
    return [_decode(path)]


def read_folder(root: Place) -> Iterator[str]:
    """One document a text file under `root` (TEXT_SUFFIXES), in order of its path.

    Raises:
      UserError: a link leads out of the folder (see `walk_files`), or a file is not UTF-8.
    """
    files = walk_files(root, "TextData.source")
    paths = [path for path, *_ in files if path.suffix.lower() in TEXT_SUFFIXES]
    if isinstance(root, BucketPath):
        return iter(in_threads(_decode, paths))
    return map(_decode, paths)


def read_embedded() -> Iterator[str]:
    """The source of Python's standard library, one document a file, then its language reference.

    Raises:
      UserError: this Python came without its sources.
    """
    # Imported here: a string of 700 kB.
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if _is_embedded(path.relative_to(root))]
    if not paths:
        raise UserError(
            f"TextData.source = 'embedded': this Python has no .py files in {root}; "
            "set TextData.source to a text file or folder"
        )
    for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
        yield _decode(path)
    for name in sorted(topics):
        yield topics[name]


def _is_embedded(relative: Path) -> bool:
    # _sysconfigdata holds this machine's paths; topics.py is read as text, below.
    own = relative.name.startswith("_sysconfigdata") or relative.name == "sitecustomize.py"
    excluded = EMBEDDED_EXCLUDED_FOLDERS.intersection(relative.parts)
    configuration = relative.parts[0].startswith("config-")
    return not (own or excluded or configuration or relative.parts[0] == "pydoc_data")


def _decode(path: Place) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"TextData.source: {path} is not UTF-8 text (byte {error.start}); convert it to UTF-8, "
            "for example with iconv, or remove it from the source"
        ) from error
    except PermissionError as error:
        raise UserError(f"TextData.source: {path} cannot be read: permission denied") from error
