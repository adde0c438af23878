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
NOTICE = ("--notice-seconds", "5")


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


@pytest.fixture
def run(config, tmp_path):
    """Four hosts that train, past their first checkpoint."""
    train = [str(config), "--simulate-devices", "4"]
    with namespaces.network(tmp_path) as hosts:
        hosts.restart = lambda name: hosts.start(name, "2:4", train, *NOTICE)
        for name in NAMES:
            hosts.restart(name)
        hosts.wait_for_step(60)
        yield hosts


def generation(hosts):
    files = (hosts.workdir / "attempts" / "generations").glob("*.json")
    newest = max(files, key=lambda file: int(file.stem))
    return [member["name"] for member in json.loads(newest.read_text())["members"]]


def go_on(hosts, names, beyond=None):
    """Waits until these hosts have trained on, past a save."""
    hosts.wait_until(lambda: sorted(generation(hosts)) == sorted(names), 120)
    step = hosts.steps() if beyond is None else beyond
    hosts.wait_for_step(step + 60)


def stop_and_compare(hosts, undisturbed, names):
    """Stops the run, which saves, and compares every step's loss."""
    for name in names:
        hosts.stop(name)
    assert [hosts.wait(name, 120) for name in names] == [75] * len(names)
    found = losses_of(hosts.workdir)
    last = max(found)
    assert sorted(found) == list(range(1, last + 1))
    expected = undisturbed(last)
    np.testing.assert_allclose(
        [found[step] for step in range(1, last + 1)],
        [expected[step] for step in range(1, last + 1)],
        rtol=2e-3,
    )


@pytest.mark.parametrize("lost", ["a", "c"])
def test_a_host_lost_for_good(run, undisturbed, lost):
    rest = [name for name in NAMES if name != lost]
    run.each[lost].lose()
    go_on(run, rest)
    stop_and_compare(run, undisturbed, rest)


@pytest.mark.parametrize("cut", ["a", "d"])
def test_a_link_that_is_cut_for_half_a_minute(run, undisturbed, cut):
    rest = [name for name in NAMES if name != cut]
    run.each[cut].cut()
    go_on(run, rest)
    run.wait_for_line(cut, "1 of 2 hosts are here")
    time.sleep(20)
    run.each[cut].join()
    go_on(run, NAMES)
    stop_and_compare(run, undisturbed, NAMES)


@pytest.mark.parametrize("empty", [False, True], ids=["its disk", "an empty disk"])
def test_a_host_comes_back(run, undisturbed, empty):
    back = run.each["b"]
    back.lose()
    go_on(run, ["a", "c", "d"])
    if empty:
        shutil.rmtree(back.folder)
        back.folder.mkdir()
    back.join()
    run.restart("b")
    go_on(run, NAMES)
    stop_and_compare(run, undisturbed, NAMES)


@pytest.mark.parametrize("frozen", ["a", "c"])
def test_a_frozen_host_wakes(run, undisturbed, frozen):
    rest = [name for name in NAMES if name != frozen]
    run.each[frozen].signal(signal.SIGSTOP)
    go_on(run, rest)
    run.each[frozen].signal(signal.SIGCONT)
    go_on(run, NAMES)
    stop_and_compare(run, undisturbed, NAMES)


def test_a_host_that_is_told_to_stop_leaves_the_others(run, undisturbed):
    run.stop("b")
    assert run.wait("b", 120) == 75
    go_on(run, ["a", "c", "d"])
    stop_and_compare(run, undisturbed, ["a", "c", "d"])
