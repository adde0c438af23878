"""A release: its version, changelog and citation agree, and its wheel works on its own."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGES = (ROOT / "CHANGELOG.md").read_text()
# https://keepachangelog.com/en/1.1.0/
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_changelog_has_the_form_of_keep_a_changelog():
    releases = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGES, re.M)
    assert releases[0] == ("Unreleased", "")
    assert releases[1][0] == PROJECT["version"]
    dates = [date for _, date in releases[1:]]
    assert all(dates)
    assert dates == sorted(dates, reverse=True)
    assert set(re.findall(r"^### (.+)$", CHANGES, re.M)) <= KINDS
    assert set(re.findall(r"^\[(.+?)\]: https://", CHANGES, re.M)) == {name for name, _ in releases}


def test_the_citation_names_the_release():
    """The keys that the Citation File Format 1.2.0 requires, and the release's own."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == PROJECT["version"]
    date = re.search(rf"## \[{re.escape(citation['version'])}\] - (\S+)", CHANGES)
    assert str(citation["date-released"]) == date[1]
    assert citation["license"] == PROJECT["license"]


def test_issue_forms_are_forms():
    for name in ("bug", "feature"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all(field["attributes"]["label"] for field in form["body"])


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # builds, installs every dependency anew and trains
def test_the_wheel_alone_trains_the_quickstart_from_an_empty_folder(tmp_path):
    dist, empty = tmp_path / "dist", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT, cwd=tmp_path)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name.startswith(f"jaxtrain-{PROJECT['version']}-py3")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"jaxtrain/py.typed", "jaxtrain/configs/gpt_quickstart.gin"} <= {*names}
    assert not [name for name in names if not name.startswith("jaxtrain")]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/tests/test_release.py") for name in archive.getnames())
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=empty)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel, cwd=empty)
    jaxtrain = python.with_name("jaxtrain")
    assert PROJECT["version"] in run(jaxtrain, "--version", cwd=empty)
    train = [
        jaxtrain, "train", "gpt_quickstart", "--simulate-devices", "8", "--workdir", "runs/first",
        "-b", "Train.steps=20",
    ]  # fmt: skip
    run(*train, cwd=empty)
    lines = [
        json.loads(line) for line in (empty / "runs/first/metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert {path.name for path in empty.iterdir()} == {"runs"}
