"""Saves that fail, on full disks above all: survived, told, retried, and in the end a stop."""

import contextlib
import errno
import os
import re
import resource
import subprocess
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.manifest import CheckpointError
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

MEGABYTE = 1 << 20


def noise(megabytes: float) -> dict:
    count = int(megabytes * MEGABYTE) // 4
    return {"x": jnp.asarray(np.random.default_rng(0).standard_normal(count), "float32")}


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 6 MB at `folder`, full on demand."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", folder], check=True)
    try:
        yield lambda full: None
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def small_files(folder):
    """No file may grow over 64 kB while it is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(full):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16 if full else hard, hard))

    try:
        yield limit
    finally:
        limit(False)


def can_mount(folder) -> bool:
    if os.geteuid() != 0:
        return False
    found = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True
    )
    if found.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return found.returncode == 0


@pytest.fixture(params=[small_disk, small_files], ids=["disk", "files"])
def disk(request, tmp_path):
    """A run's folder, and a function that makes saves of over 4 MB fail or lets them succeed."""
    if request.param is small_disk and not can_mount(tmp_path):
        pytest.skip("no right to mount a small file system")
    with request.param(tmp_path) as limit:
        yield tmp_path, limit


def entries(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_survived_told_and_retried(disk, asynchronous):
    workdir, limit = disk
    lines = []
    settings = Checkpoint(asynchronous=asynchronous)
    checkpoints = Checkpoints(workdir, settings, report=lines.append)
    checkpoints.save(1, noise(0.5), {"step": 1})
    checkpoints.wait()
    before = {p: p.read_bytes() for p in (workdir / "checkpoints").rglob("*") if p.is_file()}

    limit(True)
    checkpoints.save(2, noise(8), {})  # training goes on
    checkpoints.save(3, noise(8), {})  # and is told here, of step 2
    assert "step 2 could not be written" in lines[0]
    assert re.search(r"[\d,]+ bytes are free there", lines[0])
    assert "stops after 3 failures in a row (this is number 1)" in lines[0]
    with pytest.raises(CheckpointError, match=r"step 3 could not be written to .*/checkpoints"):
        checkpoints.wait()
    checkpoints.wait()  # told once
    assert "(this is number 2)" in lines[1]
    assert entries(workdir) == ["1"]
    assert {p: p.read_bytes() for p in before} == before
    limit(False)

    checkpoints.save(4, noise(0.5), {"step": 4})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4]
    limit(True)
    for step in (5, 6):  # the count restarts
        checkpoints.save(step, noise(8), {})
    with pytest.raises(CheckpointError, match="step 6"):
        checkpoints.close()
    limit(False)
    assert entries(workdir) == ["1", "4"]


def test_failures_in_a_row_stop_the_run(disk):
    workdir, limit = disk
    lines = []
    checkpoints = Checkpoints(workdir, Checkpoint(max_failed_saves=2), report=lines.append)
    limit(True)
    checkpoints.save(1, noise(8), {})
    checkpoints.save(2, noise(8), {})
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        checkpoints.save(3, noise(8), {})
    limit(False)
    assert len(lines) == 1
    checkpoints.close()
    assert entries(workdir) == []


@pytest.mark.parametrize("inner", [False, True], ids=["step's", "item's"])
def test_a_folder_that_cannot_be_made_leaves_no_thread_to_wait_for(tmp_path, monkeypatch, inner):
    """The interpreter waited for Orbax's at its end, which waited for the folder: 20 minutes."""
    lines, mkdir = [], os.mkdir

    def refusing(path, *arguments, **named):
        if "orbax" in Path(path).name and ("orbax" in Path(path).parent.name) == inner:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return mkdir(path, *arguments, **named)

    checkpoints = Checkpoints(tmp_path, Checkpoint(), report=lines.append)
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refusing)
        checkpoints.save(1, noise(0.5), {})
        with pytest.raises(CheckpointError, match=r"step 1 could not be .*Permission denied"):
            checkpoints.wait()
    checkpoints.save(2, noise(0.5), {})
    checkpoints.close()
    assert checkpoints.steps() == [2]
    assert [t for t in threading.enumerate() if not t.daemon and t not in before] == []


def test_little_space_is_told_before_the_save(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("no right to mount a small file system")
    with small_disk(tmp_path):
        lines = []
        checkpoints = Checkpoints(tmp_path, Checkpoint(keep=1), report=lines.append)
        checkpoints.save(1, noise(1), {})
        checkpoints.save(2, noise(1), {})
        checkpoints.wait()
        assert lines == []
        (tmp_path / "ballast").write_bytes(b"x" * int(3.5 * MEGABYTE))
        checkpoints.save(3, noise(0.5), {})
        checkpoints.close()
        assert len(lines) == 1
        assert re.match(
            r"[\d,]+ bytes are free in .*less than twice the last checkpoint's", lines[0]
        )
        assert checkpoints.steps() == [3]


def test_settings_that_never_fail_are_refused():
    with pytest.raises(UserError, match=r"Checkpoint.max_failed_saves = 0: .* 1 failed save"):
        Checkpoint(max_failed_saves=0)


# -- another attempt owns the folder --------------------------------------------------------------


class FencedOutError(RuntimeError):
    """What a lock would raise."""


@pytest.mark.parametrize("error", [FencedOutError, UserError, OSError, SystemExit])
def test_nothing_is_saved_or_sealed_or_removed_where_another_attempt_owns_the_folder(
    tmp_path, error
):
    """Asked before a save, before it counts, and before leftovers are removed."""
    calls, refused_at = [], {3}  # the calls that are rejected, counted from 1

    def may_write():
        calls.append(None)
        if len(calls) in refused_at:
            raise error("another attempt")

    checkpoints = Checkpoints(tmp_path, Checkpoint(keep=1), may_write=may_write)
    checkpoints.save(1, noise(0.01), {})
    checkpoints.wait()
    with pytest.raises(error, match="another attempt"):  # the third call: nothing is begun
        checkpoints.save(2, noise(0.01), {})
    assert entries(tmp_path) == ["1"]
    calls.clear()
    refused_at = {2}
    checkpoints.save(2, noise(0.01), {})
    with pytest.raises(error, match="another attempt"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert entries(tmp_path) == ["1", "2"]  # written, not sealed: the owner's to remove
    calls.clear()
    refused_at = {1}
    with pytest.raises(error, match="another attempt"):
        Checkpoints(tmp_path, Checkpoint(), may_write=may_write)
    assert entries(tmp_path) == ["1", "2"]
    assert len(Checkpoints(tmp_path, Checkpoint()).cleaned) == 1
    assert entries(tmp_path) == ["1"]
