"""Elastic runs on hosts that are network namespaces: lost, cut off, frozen, and back again.

The losses of every run are those of a run that nothing happens to.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import hosts as namespaces

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing())),
]
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return namespaces.write_config(tmp_path_factory.mktemp("elastic"), steps=100_000, save_every=50)


@pytest.fixture(scope="module")
def undisturbed(config):
    """Losses by step of a run on one process, as many as a disturbed run has asked for."""
    workdir = config.parent / "undisturbed"
    words = ["train", str(config), "--simulate-devices", "4", "--workdir", str(workdir)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": namespaces.XLA_FLAGS}

    def losses_to(step):
        while max(losses_of(workdir), default=0) < step:
            run = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxtrain", *words], env=environment,
                stdout=subprocess.DEVNULL, cwd=namespaces.ROOT,
            )  # fmt: skip
            try:
                while max(losses_of(workdir), default=0) < step and run.poll() is None:
                    with_timeout(run, 0.5)
            finally:
                run.send_signal(signal.SIGTERM)
                assert run.wait(120) == 75
        return losses_of(workdir)

    return losses_to


def with_timeout(run, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(seconds)


def losses_of(workdir):
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps))
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """Four hosts that train, past their first checkpoint; each test leaves all four."""
    train = [str(config), "--simulate-devices", "4"]
    with namespaces.network(tmp_path_factory.mktemp("hosts")) as hosts:
        hosts.restart = lambda name: hosts.start(name, "2:4", train, "--notice-seconds", "5")
        for name in NAMES:
            hosts.restart(name)
        hosts.wait_for_step(60)
        yield hosts


def members(hosts):
    """The hosts of the newest generation, the leader first."""
    files = (hosts.workdir / "attempts" / "generations").glob("*.json")
    newest = max(files, key=lambda file: int(file.stem))
    return [member["name"] for member in json.loads(newest.read_text())["members"]]


def host_of(hosts, place):
    """The host that leads, or the last that follows."""
    assert sorted(members(hosts)) == sorted(NAMES)
    return hosts.each[members(hosts)[{"leads": 0, "follows": -1}[place]]]


def train_on(hosts, names):
    """Waits until exactly these hosts train, and have saved."""
    names = sorted(names)
    hosts.wait_until(lambda: sorted(members(hosts)) == names, 120)
    folders = {f.name for f in (hosts.workdir / "checkpoints").iterdir()}
    step = max(int(name) for name in folders if name.isdecimal())
    hosts.wait_for_step(step + 60)
    assert sorted(members(hosts)) == names


def others(host):
    return [name for name in NAMES if name != host.name]


PLACES = pytest.mark.parametrize("place", ["leads", "follows"])


@PLACES
def test_the_others_train_without_a_lost_host_until_it_is_back(run, place):
    lost = host_of(run, place)
    lost.lose()
    train_on(run, others(lost))
    lost.join()
    run.restart(lost.name)
    train_on(run, NAMES)


def test_a_host_comes_back_with_an_empty_disk(run):
    lost = host_of(run, "follows")
    lost.lose()
    train_on(run, others(lost))
    shutil.rmtree(lost.folder)
    lost.folder.mkdir()
    lost.join()
    run.restart(lost.name)
    train_on(run, NAMES)


@PLACES
def test_a_link_is_cut_for_half_a_minute(run, place):
    cut = host_of(run, place)
    began, before = time.monotonic(), len(cut.log())
    cut.cut()
    train_on(run, others(cut))
    assert "1 of 2 hosts are here" in cut.log()[before:]
    time.sleep(max(0, began + 30 - time.monotonic()))
    cut.join()
    train_on(run, NAMES)


@PLACES
def test_a_frozen_host_wakes(run, place):
    frozen = host_of(run, place)
    frozen.signal(signal.SIGSTOP)
    train_on(run, others(frozen))
    frozen.signal(signal.SIGCONT)
    train_on(run, NAMES)


def test_a_host_that_is_told_to_stop_leaves_the_others(run):
    leaving = host_of(run, "follows")
    run.stop(leaving.name)
    assert run.wait(leaving.name, 120) == 75
    train_on(run, others(leaving))
    run.restart(leaving.name)
    train_on(run, NAMES)


def test_every_step_has_the_loss_of_a_run_that_nothing_happens_to(run, undisturbed):
    """After the faults before: no step is missing or there twice."""
    for name in NAMES:
        run.stop(name)
    assert [run.wait(name, 120) for name in NAMES] == [75] * 4
    found = losses_of(run.workdir)
    last = max(found)
    assert sorted(found) == list(range(1, last + 1))
    expected = undisturbed(last)
    np.testing.assert_allclose(
        [found[step] for step in range(1, last + 1)],
        [expected[step] for step in range(1, last + 1)],
        rtol=2e-3,
    )
