"""Lookup of config files, and the headers of the shipped ones."""

import dataclasses
import re
from pathlib import Path

from jaxtrain.config.buckets import on_disk
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import path_errors

HUGGING_FACE = "hf:"  # prefix of a folder whose model becomes the configuration
MODEL_CONFIG = "config.json"  # its file with the model's settings


def configs_folder() -> Path:
    """Return the folder of shipped configs: inside the installed package, or next to it in a
    checkout.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """Return the .gin file that `name` refers to: a path, or a shipped config without its suffix.

    Raises:
      UserError: there is no such file, or no such user.
    """
    path = on_disk(name)
    shipped = {p.stem: p for p in configs_folder().glob("*.gin")}
    if path.suffix == ".gin":
        with path_errors(f"config {name!r}", needs="use a .gin file that can be read"):
            if path.is_file():
                return path
            siblings = [str(p) for p in path.parent.glob("*.gin")]
            known = [path.stem] if path.stem in shipped else [*siblings, *shipped]
        raise UserError(f"config {name!r}: no such file{did_you_mean(name, known)}")
    if name in shipped:
        return shipped[name]
    with path_errors(f"config {name!r}", needs="use a .gin file that can be read"):
        if (path / "config.gin").is_file():
            raise UserError(
                f"config {name!r} is a run's folder; use {str(path / 'config.gin')!r}, with "
                "another --workdir for another run"
            )
        if (path / "config.json").is_file():
            raise UserError(
                f"config {name!r} is a Hugging Face folder; use '{HUGGING_FACE}{name}', which "
                "starts from its parameters"
            )
    raise UserError(f"config {name!r}: no .gin file and not shipped{did_you_mean(name, shipped)}")


@dataclasses.dataclass(frozen=True)
class Header:
    """Header comment of a shipped config.

    Attributes:
      name: of the config.
      trains: its first sentence.
      hardware: the target hardware, without text in brackets and after a semicolon.
    """

    name: str
    trains: str
    hardware: str


def shipped_headers() -> list[Header]:
    """Return the header of each shipped config, by name."""
    files = sorted(configs_folder().glob("*.gin"))
    return [_header(file.stem, file.read_text(encoding="utf-8")) for file in files]


def _header(name: str, text: str) -> Header:
    lines = re.match(r"(?:#.*\n)*", text)
    assert lines is not None
    # A paragraph ends with an empty line; the hardware begins a line.
    lines_text = re.sub(r"^# ?", "", lines[0], flags=re.M)
    first = " ".join(lines_text.partition("\n\n")[0].split())
    found = re.search(r"^Hardware: (.*?)(?:\.\s|\.?\Z)", lines_text, re.M | re.S)
    hardware = "" if found is None else " ".join(found[1].split())
    without = re.sub(r" \([^()]*\)", "", hardware).partition(";")[0]
    return Header(name, first.rstrip("."), without)
