"""Prints the lowest versions that pyproject.toml allows, as constraints for pip (`make lowest`)."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def lowest_versions(requirements: list[str]) -> list[str]:
    """Return `name==version` of each requirement `name>=version`.

    Raises:
      ValueError: a requirement without a lower bound.
    """
    pins = []
    for requirement in requirements:
        found = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement)
        if found is None:
            raise ValueError(f"{PROJECT.name}: {requirement!r} has no lower bound")
        pins.append("==".join(found.groups()))
    return pins


if __name__ == "__main__":
    project = tomllib.loads(PROJECT.read_text())["project"]
    sys.stdout.write("\n".join(lowest_versions(project["dependencies"])) + "\n")
