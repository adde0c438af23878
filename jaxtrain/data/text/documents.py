"""Documents of text from a file, a folder, Python's own library, or TFDS records."""

import dataclasses
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxtrain.config.buckets import BucketPath, Place, in_threads
from jaxtrain.config.errors import UserError
from jaxtrain.data.source import walk_files
from jaxtrain.data.text import json_lines
from jaxtrain.data.text.pieces import Document, Text, TextFile

# What a folder source reads beside JSON lines; anything else in the folder is left out, and said.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".bash", ".c", ".cc", ".cfg", ".cpp", ".css", ".csv", ".cu", ".go", ".h", ".hpp", ".html",
    ".ini", ".ipynb", ".java", ".jl", ".js", ".json", ".lua", ".md", ".org", ".php",
    ".pl", ".py", ".r", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".swift", ".tex", ".text",
    ".toml", ".ts", ".tsv", ".txt", ".xml", ".yaml", ".yml",
))
# fmt: on

# Tests repeat themselves, and installed packages are not Python's.
EMBEDDED_EXCLUDED_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
)


NO_ENDING = "no ending"


@dataclasses.dataclass(frozen=True)
class Files:
    """The text files of a source.

    Attributes:
      paths: those that are read, in the order of their documents.
      left_out: how many others there are, by ending; a source that is one file leaves out none.
    """

    paths: list[Place]
    left_out: Mapping[str, int]

    def facts(self) -> dict[str, int | str]:
        """Of a folder from which files are left out: how many, and their endings, most first."""
        if not self.left_out:
            return {}
        most = sorted(self.left_out.items(), key=lambda pair: (-pair[1], pair[0]))
        return {
            "files": len(self.paths),
            "files_left_out": sum(self.left_out.values()),
            "endings_left_out": ", ".join(f"{ending} {count:,}" for ending, count in most),
        }

    def documents(self, text_field: str) -> Iterator[Document]:
        """A document a file, or a record of the files of JSON lines; blank ones too.

        Raises:
          UserError: a file is not UTF-8, or has lines that are no records with this field.
        """
        bad = json_lines.Bad(text_field)
        for path in self.paths:
            if json_lines.is_named(path):
                yield from map(Text, bad.passed_over(json_lines.read(path, text_field)))
            else:
                yield TextFile(path)
        bad.refuse()

    def texts(self, text_field: str) -> Iterator[str]:
        """The same as texts; objects of a bucket are read side by side."""
        if any(isinstance(path, BucketPath) for path in self.paths):
            bad = json_lines.Bad(text_field)
            for records in in_threads(lambda path: _read(path, text_field), self.paths):
                yield from bad.passed_over(records)
            bad.refuse()
            return
        for document in self.documents(text_field):
            yield "".join(document.pieces())


def files_of(source: Place) -> Files:
    """The file itself, or every text file under a folder, in order of its path.

    A file is text by its ending: one of TEXT_SUFFIXES or json_lines.SUFFIXES.

    Raises:
      UserError: a link leads out of the folder (see `walk_files`).
    """
    if not source.is_dir():
        return Files([source], {})
    paths, left_out = [], Counter[str]()
    for path, *_ in walk_files(source, "TextData.source"):
        if path.suffix.lower() in TEXT_SUFFIXES or json_lines.is_named(path):
            paths.append(path)
        else:
            left_out[path.suffix.lower() or NO_ENDING] += 1
    return Files(paths, left_out)


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
        yield "".join(TextFile(path).pieces())
    for name in sorted(topics):
        yield topics[name]


def _is_embedded(relative: Path) -> bool:
    # _sysconfigdata holds this machine's paths; topics.py is read as text, below.
    own = relative.name.startswith("_sysconfigdata") or relative.name == "sitecustomize.py"
    excluded = EMBEDDED_EXCLUDED_FOLDERS.intersection(relative.parts)
    configuration = relative.parts[0].startswith("config-")
    return not (own or excluded or configuration or relative.parts[0] == "pydoc_data")


def _read(path: Place, text_field: str) -> list[str | json_lines.BadLine]:
    if json_lines.is_named(path):
        return list(json_lines.read(path, text_field))
    return ["".join(TextFile(path).pieces())]
