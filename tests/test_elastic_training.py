"""A whole elastic run of local processes: a lost host changes no loss."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.hosts import ROOT, XLA_FLAGS, write_config

STEPS = 60


def losses(workdir):
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def start(folder, name, *words):
    hidden = ("SLURM_", "JAX_", "JAXTRAIN_", "XLA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    environment |= {
        "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS,
        "JAXTRAIN_CACHE": str(folder / "cache"), "TPU_SKIP_MDS_QUERY": "1",
    }  # fmt: skip
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxtrain", *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment,
        )  # fmt: skip


def kill(process):
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        children = [int(word) for word in file.read().split()]
    for pid in (process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.rotated("processes")
def test_a_lost_host_changes_no_loss(tmp_path):
    config = write_config(tmp_path, steps=STEPS, save_every=10)
    train = ["train", str(config), "--simulate-devices", "4"]
    reference = start(tmp_path, "one", *train, "--workdir", str(tmp_path / "one"))
    assert reference.wait(300) == 0
    expected = losses(tmp_path / "one")
    workdir = tmp_path / "run"
    hosts = {
        name: start(
            tmp_path, name, "supervise", "--hosts", "2:4", "--host-name", name, "--address",
            "127.0.0.1", "--", *train, "--workdir", str(workdir),
        )
        for name in "abcd"
    }  # fmt: skip
    try:
        until = time.monotonic() + 300
        while len(losses(workdir)) < 15:
            assert time.monotonic() < until, (tmp_path / "a.log").read_text()[-3000:]
            time.sleep(0.05)
        kill(hosts.pop("d"))
        assert {name: host.wait(300) for name, host in hosts.items()} == dict.fromkeys("abc", 0)
    finally:
        for host in hosts.values():
            if host.poll() is None:
                kill(host)
    newest = json.loads((workdir / "attempts" / "generations" / "2.json").read_text())
    assert [member["name"] for member in newest["members"]] == ["a", "b", "c"]
    assert "Train.accumulation = 3" in newest["words"]
    found = losses(workdir)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(
        [loss for _, loss in found], [loss for _, loss in expected], rtol=1e-3
    )
