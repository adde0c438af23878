"""Runs tpu_scripts/*.sh with a stand-in for gcloud on PATH, and tells what they called."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tpu_scripts"
COMMANDS = ["create", "setup", "run", "watch", "fetch", "delete"]
USER = {
    "TPU_NAME": "my-tpu",
    "ZONE": "us-west4-a",
    "PROJECT": "my-project",
    "ACCELERATOR_TYPE": "v5litepod-8",
    "BUCKET": "gs://my-bucket/",
    "POLL_SECONDS": "0",
}
TRAIN = [
    *("--", "train", "gpt2_124m"),
    *("-b", "Train.data = @TextData()"),
    *("-b", "TextData.source='a b'"),
]
TOOLS = shlex.split(
    "base64 bash cat dirname env grep gzip head mkdir mktemp rm sed sleep tail tar tr"
)


@dataclasses.dataclass
class Shell:
    """Runs scripts with nothing but the tools they name and the stand-in on PATH."""

    folder: Path

    def __post_init__(self) -> None:
        self.record = self.folder / "record.jsonl"
        self.answers = self.folder / "answers.json"
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        gcloud = self.bin / "gcloud"
        stand_in = ROOT / "tests" / "gcloud_stand_in.py"
        gcloud.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{stand_in}" "$@"\n')
        gcloud.chmod(0o755)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        places = {"PATH": str(self.bin), "TMPDIR": str(self.folder), "HOME": str(self.folder)}
        record = {"GCLOUD_RECORD": str(self.record), "GCLOUD_ANSWERS": str(self.answers)}
        return places | record | USER | dict(more or {})

    def __call__(self, *words, answers=None, stdin="", **more) -> subprocess.CompletedProcess:
        """Runs `NAME.sh WORDS`, or a shell text where the first word has blanks."""
        self.record.write_text("")
        self.answers.write_text(json.dumps(answers or {}))
        script = SCRIPTS / f"{words[0]}.sh"
        command = [script, *words[1:]] if words[0] in COMMANDS else ["bash", "-euc", words[0]]
        return subprocess.run(
            command,
            input=stdin,
            cwd=self.folder,
            env={k: v for k, v in self.environment(more).items() if v is not None},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def verbs(self) -> list[str]:
        """The calls in a word or two, `create` or `ssh install`."""
        found = []
        for call in self.calls():
            told = re.search(r"worker\.sh (\w+)|(flock)", " ".join(call))
            verb = call[1] if call[0] == "storage" else call[3]
            found.append(f"{verb} {told[1] or 'look'}" if told and verb == "ssh" else verb)
        return found
