"""Entry point of `python -m jaxtrain` and of the program `jaxtrain`."""

import os
import sys

# `python -m` puts the current folder first on the search path, where a downloaded `matplotlib.py`
# would run in place of the library: it goes before anything else is imported.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

from jaxtrain.cli import main


def run() -> int:
    """Run the command line in a process of its own; return the exit status."""
    # Worker processes start as `python -c`, which would put the current folder first likewise.
    os.environ["PYTHONSAFEPATH"] = "1"
    return main()


if __name__ == "__main__":
    sys.exit(run())
