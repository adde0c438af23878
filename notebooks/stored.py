"""Runs notebooks and keeps small pictures and short text of what they show, for code hosts.

    python notebooks/stored.py               # all of them, for minutes
    python notebooks/stored.py 1_first_run   # these

A reader of the repository then sees what a cell shows without running it. What is kept says of
which code it is: after a change of a notebook's code the tests ask for another run.
"""

import argparse
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
CELL_SECONDS = 600
WIDEST, COLOURS = 640, 32  # pixels and palette of a picture that is kept
LONGEST = 1200  # characters of text that are kept of a cell

# What a terminal obeys, and what says nothing of an object but where it lay.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>|<Figure size .*>")


class ThisPython(AsyncKernelManager):
    """Starts the interpreter that asks, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=start, display_name="this Python", language="python")


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook as it stands in its file."""
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_digest(book: nbformat.NotebookNode) -> str:
    """The sha256 of a notebook's code, in hexadecimal."""
    code = "\0".join(cell.source for cell in book.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def run(book: nbformat.NotebookNode, folder: Path, cell_seconds: int = CELL_SECONDS) -> None:
    """Runs a notebook as a reader would, in a folder; its cells then have their outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: what a cell raised.
    """
    # None of a test suite's flags; compiled programs are kept beside the folder.
    suites = ("XLA_FLAGS", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in suites}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "JAXTRAIN_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "JAXTRAIN_CACHE": str(folder.parent / "cache"),
        "IPYTHONDIR": str(folder.parent / "ipython"),
    }
    NotebookClient(
        book,
        timeout=cell_seconds,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=kept | own)


def keep(book: nbformat.NotebookNode) -> None:
    """Leaves of a notebook that has run what is stored of it: see `kept`."""
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
            cell.execution_count = None
    names = ("kernelspec", "language_info")
    book.metadata = {name: book.metadata[name] for name in names}
    book.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book.metadata.language_info = {"name": "python"}
    book.metadata["jaxtrain"] = {"outputs_of": code_digest(book)}


def kept(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The pictures of a cell, made small, and the beginning of its text."""
    found, text = [], []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stdout":
            text.append(output.text)
            continue
        data = output.get("data", {})
        if "image/png" in data:
            small = {"image/png": smaller(data["image/png"])}
            found.append(nbformat.v4.new_output("display_data", data=small))
        elif "text/plain" in data and not _ADDRESS.fullmatch(data["text/plain"].strip()):
            text.append(data["text/plain"] + "\n")
    told = shortened("".join(text))
    if told:
        found.insert(0, nbformat.v4.new_output("stream", name="stdout", text=told))
    return found


def smaller(picture: str) -> str:
    """A PNG in base64, at most WIDEST pixels wide, in COLOURS colours."""
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.convert("RGBA").getchannel("A"))
        white.thumbnail((WIDEST, WIDEST))
        out = io.BytesIO()
        # Of few colours these keep the hues of thin lines, which the median cut makes grey.
        method = Image.Quantize.MAXCOVERAGE
        palette = white.quantize(COLOURS, method=method, dither=Image.Dither.NONE)
        palette.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def shortened(text: str) -> str:
    """Text as a page shows it, without what was overwritten and empty lines, cut where too long."""
    lines = [line.rpartition("\r")[2].rstrip() for line in _CONTROL.sub("", text).split("\n")]
    whole = "\n".join(filter(None, lines))
    if len(whole) > LONGEST:
        whole = whole[:LONGEST].rpartition("\n")[0] + "\n[...]"
    return whole + "\n" if whole else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", help="names without their ending; none: all")
    names = parser.parse_args().notebooks
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            if names and path.stem not in names:
                continue
            book = read(path)
            (Path(folder) / path.stem).mkdir()
            run(book, Path(folder) / path.stem)
            keep(book)
            nbformat.write(book, path)
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")  # noqa: T201


if __name__ == "__main__":
    main()
