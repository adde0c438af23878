"""The commands `configs`, a list of the shipped configs, and `init`, a starter project."""

import argparse
from pathlib import Path

from rich.console import Console

from jaxtrain.config.buckets import on_disk
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, write_atomically
from jaxtrain.config.shipped import shipped_headers
from jaxtrain.run.attempts import DONE
from jaxtrain.run.show.progress import print_lines


def show_configs(console: Console) -> int:
    """Print a line for each shipped config: its name, what it trains and its hardware."""
    headers = shipped_headers()
    longest = max(len(header.name) for header in headers)
    for header in headers:
        line = f"{header.name:{longest}}  {header.trains}; for {header.hardware}"
        print_lines(console, line)
    return DONE


_PACKAGE = Path(__file__).resolve().parents[2]
FILES = ("README.md", "my_model.py", "slurm.sbatch", "train.gin")


def init(arguments: argparse.Namespace, console: Console) -> int:
    """Write the starter project into a new folder, or into one without any of its files.

    Raises:
      UserError: a file of it exists there already, or the folder cannot be written.
    """
    folder = on_disk(arguments.folder)
    with path_errors(f"DIR {arguments.folder!r}", needs="name a folder that can be written"):
        present = [name for name in FILES if (folder / name).exists()]
        if present:
            raise UserError(
                f"DIR {arguments.folder!r} already has {', '.join(present)}, and nothing is "
                f"overwritten; name a new folder, such as {_free(folder)}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            write_atomically(folder / name, _template(name).read_bytes())
    for name in FILES:
        console.print(f"{folder / name}", highlight=False, soft_wrap=True)
    console.print(
        f"Next: cd {folder} && jaxtrain train train.gin --allow-imports --workdir runs/first",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _template(name: str) -> Path:
    """Return a file of the starter: in the package, or of a checkout in the folder of its own
    kind."""
    inside = _PACKAGE / "run" / "starter" / name
    return inside if inside.is_file() else _PACKAGE.parent / "tpu_scripts" / name


def _free(folder: Path) -> Path:
    """Return a folder of a similar name that does not exist."""
    number = 2
    while folder.with_name(f"{folder.name}_{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}_{number}")
