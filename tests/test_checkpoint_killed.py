"""Killed at any point of a save, a run finds a whole checkpoint and removes the remains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

# Imports once and forks a process for each point, before JAX has made a thread. Each has two whole
# checkpoints' worth of `keep = 1`: step 1, and step 2, during whose save it kills itself.
KILLS = """
import os, shutil, signal, sys
from pathlib import Path
import jax, numpy as np
from jaxtrain.run.checkpoint import manifest
from jaxtrain.training.settings import Checkpoint
from jaxtrain.run.checkpoint.store import Checkpoints

def kill(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)

def state(step):
    noise = np.random.default_rng(step).standard_normal((512, 512))
    return {"noise": jax.numpy.asarray(noise, "float32")}

def after(function):
    def wrapped(*arguments, **keywords):
        function(*arguments, **keywords)
        kill()
    return wrapped

def run(point, workdir):
    jax.config.update("jax_platforms", "cpu")
    calls = []
    def may_write():
        calls.append(None)
        if len(calls) == {"before": 3, "written, not sealed": 4}.get(point):
            kill()
    checkpoints = Checkpoints(workdir, Checkpoint(keep=1), may_write=may_write)
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.wait()
    if point == "written, not named":
        rename = os.rename
        def killed(source, target, *arguments, **keywords):
            if str(target).endswith("/2"):
                kill()
            return rename(source, target, *arguments, **keywords)
        os.rename = os.replace = killed
    if point == "manifest written, not named":
        Path.replace = kill
    if point == "sealed":
        manifest.seal = after(manifest.seal)
    if point == "old one renamed":
        shutil.rmtree = kill
    if point == "old one deleted":
        shutil.rmtree = after(shutil.rmtree)
    checkpoints.save(2, state(2), {"step": 2})
    if point == "being written":
        kill()
    checkpoints.wait()

for point in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        run(point, Path(sys.argv[1]) / point)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
# By point: the steps found, and what is removed; None where it depends on the moment.
POINTS = {
    "before": ([1], 0),
    "being written": (None, None),
    "written, not named": ([1], 1),
    "written, not sealed": ([1], 1),
    "manifest written, not named": ([1], 1),
    "sealed": ([1, 2], 0),
    "old one renamed": ([2], 1),
    "old one deleted": ([2], 0),
}


def state(step):
    noise = np.random.default_rng(step).standard_normal((512, 512))
    return {"noise": jax.numpy.asarray(noise, "float32")}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder of folders, one for each point, each left by a killed process."""
    folder = tmp_path_factory.mktemp("killed")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", KILLS, str(folder), *POINTS],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    )
    assert found.stdout.split() == [str(-signal.SIGKILL)] * len(POINTS)
    return folder


@pytest.mark.slow_cases("before", "written, not sealed", "old one renamed", "sealed")
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_save_leaves_a_whole_checkpoint_and_its_remains_are_removed(killed, point):
    steps, removed = POINTS[point]
    workdir = killed / point
    entries = {path.name for path in (workdir / "checkpoints").iterdir()}

    looking = Checkpoints(workdir, Checkpoint(), read_only=True)
    found = looking.newest_good()
    assert found in (1, 2)
    assert steps is None or looking.steps() == steps
    assert looking.cleaned == []
    # What is left might belong to a living run: who only looks leaves it.
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == entries

    checkpoints = Checkpoints(workdir, Checkpoint(keep=1))
    left = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert removed is None or len(checkpoints.cleaned) == removed
    assert len(checkpoints.cleaned) == len(entries - left)
    assert all(str(workdir / "checkpoints") in line for line in checkpoints.cleaned)
    assert left == {str(step) for step in checkpoints.steps()}
    assert checkpoints.newest_good() == found
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(found)
    )
    restored = checkpoints.restore(found, like)["noise"]
    np.testing.assert_array_equal(restored, state(found)["noise"])
    assert checkpoints.extra(found) == {"step": found}

    for step in (2, 3):  # and it goes on
        checkpoints.save(step, state(step), {})
        checkpoints.wait()
    assert checkpoints.steps() == [3]
    checkpoints.close()
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["3"]
