"""Every command of docs/launch.md, by dry run: the scripts take it, the configs bind it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain import load_config
from jaxtrain.cli import parser
from jaxtrain.run.attempts import DONE, FAILED, PREEMPTED, USER_ERROR
from jaxtrain.run.commands import supervise

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "launch.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.S)

# Stand-ins note their words; the scripts themselves run, dry.
NOTE = "import json, sys; open('called.jsonl', 'a').write(json.dumps(sys.argv[1:]) + '\\n')"


def run_block(block: str, folder: Path) -> tuple[str, list[list[str]]]:
    """What a block prints where no command reaches a cloud, and the calls of its other programs."""
    for name in ("jaxtrain", "sbatch", "kubectl"):
        stub = folder / name
        stub.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -c "{NOTE}" {name} "$@"\n')
        stub.chmod(0o755)
    (folder / "tpu_scripts").symlink_to(ROOT / "tpu_scripts")
    kept = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder), "DRY_RUN": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), block
    called = folder / "called.jsonl"
    lines = called.read_text().splitlines() if called.exists() else []
    return done.stdout, [json.loads(line) for line in lines]


def check_train(words: list[str]) -> None:
    """The command line takes these words, and the config its bindings."""
    request = supervise.parse(["--", *words])
    whole = parser()
    train = whole.parse_args(request.train)
    load_config(train.config, bindings=train.gin_bindings)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[-2][:40])
def test_a_block_of_the_page_runs(block, tmp_path):
    printed, called = run_block(block, tmp_path)
    checked = 0
    for name, *words in called:
        if name == "kubectl":
            if words[0] == "create":
                made = shlex.join(words)
                manifests = (ROOT / "tpu_scripts").glob("gke_jobset*.yaml")
                assert all(made in manifest.read_text() for manifest in manifests)
            else:
                assert words[:2] == ["apply", "-f"]
                assert (ROOT / words[2]).is_file()
        elif name == "sbatch":
            place = words.index("tpu_scripts/slurm.sbatch")
            known = (ROOT / words[place]).read_text()
            given = [word for word in words[:place] if word.startswith("--")]
            assert all(f"#SBATCH {option}=" in known for option in given)
            check_train(words[place + 1 :])
        elif words[0] == "plan":
            asked = parser().parse_args(words)
            load_config(asked.config, bindings=asked.gin_bindings)
        else:
            supervised = words[0] == "supervise"
            if supervised:
                supervise.parse(words[1:])
            check_train(words[words.index("--") + 1 :] if supervised else words)
        checked += 1
    for line in printed.splitlines():
        command = shlex.split(line)[-1]
        assert shlex.split(line)[0] in ("gcloud", "env", "mkdir", "bash")
        if "worker.sh start" in command:
            check_train(shlex.split(command)[5:])
        checked += 1
    # Every line of the block did something.
    lines = [line for line in block.splitlines() if line and not line.startswith("export")]
    assert checked >= len(lines)


def test_the_page_names_every_script_and_status():
    for script in (ROOT / "tpu_scripts").iterdir():
        if script.stem not in ("common", "worker"):
            assert script.name in PAGE, script.name
    for status in (DONE, FAILED, USER_ERROR, PREEMPTED):
        assert f"| {status} |" in PAGE
