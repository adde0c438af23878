"""The files that a batch, a request and a save cross are as many as docs/design/tour.md says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json
from benchmarks.journeys import journeys
print(json.dumps({path.partition(":")[0]: sorted(files) for path, files in journeys().items()}))
"""


@pytest.mark.slow
def test_the_tour_says_how_many_files_a_batch_a_request_and_a_save_cross():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = json.loads(done.stdout.splitlines()[-1])
    tour = (ROOT / "docs" / "design" / "tour.md").read_text()
    named = dict(re.findall(r"^\| a (batch|request|checkpoint), .* \| (\d+) \|$", tour, re.M))
    assert {path: len(files) for path, files in found.items()} == {
        path: int(count) for path, count in named.items()
    }
    assert len(named) == 3
    # What a reader would look for on each path.
    assert {"data/text/packing.py", "run/metrics/files.py"} <= set(found["batch"])
    assert {"run/generation/generate.py"} <= set(found["request"])
    assert {"run/checkpoint/manifest.py"} <= set(found["checkpoint"])
