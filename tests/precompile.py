"""Compiles the modules of the tests and of what they import, once a core (`make test`).

Every worker of pytest imports all test files. In a new environment none is compiled, and each
worker would compile all of them at the same time as the others.
"""

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    folder, cores = Path(__file__).parent, os.cpu_count() or 1
    files = sorted(str(file) for file in folder.glob("test_*.py"))
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # What cannot be collected says so in the run itself.
    parts = [
        subprocess.Popen([*collect, *files[n::cores]], stdout=subprocess.DEVNULL)
        for n in range(cores)
    ]
    for part in parts:
        part.wait()
