"""Which checkpoints stay, and that nothing else in their folder is touched."""

import os
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from jaxtrain.config.files import remove_tree
from jaxtrain.run.checkpoint import sealing
from jaxtrain.run.checkpoint.manifest import seal


@hypothesis.given(
    steps=strategies.sets(strategies.integers(0, 60)),
    keep=strategies.integers(1, 5),
    keep_every=strategies.none() | strategies.integers(1, 9),
)
def test_the_newest_and_the_multiples_stay(steps, keep, keep_every):
    expired = sealing.select_expired(steps, keep=keep, keep_every=keep_every)
    assert set(expired) <= steps
    for step in steps:
        newer = sum(other > step for other in steps)
        stays = newer < keep or (keep_every is not None and step % keep_every == 0)
        assert (step not in expired) == stays


@hypothesis.given(
    steps=strategies.sets(strategies.integers(0, 30)),
    best=strategies.lists(strategies.integers(0, 30), unique=True).map(sorted),
    keep=strategies.integers(1, 5),
)
def test_the_last_of_the_best_that_is_whole_stays_beside_the_newest(steps, best, keep):
    without = sealing.select_expired(steps, keep=keep, keep_every=None)
    whole = [step for step in best if step in steps]
    expected = [step for step in without if step != (whole or [None])[-1]]
    assert sealing.select_expired(steps, keep=keep, keep_every=None, best=best) == expected


@pytest.fixture
def root(tmp_path):
    """Two finished checkpoints, what kills leave of four others, and things of other people."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    root = tmp_path / "checkpoints"
    for name in ("3", "10", "07", "notes", "4", "damaged-2", "deleted-1", "6.orbax-checkpoint-tmp"):
        (root / name / "deep").mkdir(parents=True)
        (root / name / "deep/file").write_text(name)
    (root / "5.orbax-checkpoint-tmp-123").mkdir()
    (root / "8").symlink_to(outside)
    (root / "4/deep/link").symlink_to(outside)
    (root / "file").write_text("a file")
    for step in (3, 10):
        seal(root / str(step), step, {})
    return root


def test_only_what_is_left_of_saves_is_swept_out(root):
    assert sealing.sealed_steps(root) == [3, 10]
    lines = sealing.sweep(root)
    assert len(lines) == 5
    gone = ("4", "8", "deleted-1", "6.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-123")
    for name in gone:
        assert sum(f"{root / name} " in line or f"{root / name}," in line for line in lines) == 1
    assert {p.name for p in root.iterdir()} == {"3", "10", "07", "notes", "damaged-2", "file"}
    assert (root.parent / "outside/precious").read_text() == "kept"
    assert sealing.sweep(root) == []


def test_deleting_and_putting_aside_leave_the_others(root):
    sealing.sweep(root)
    (root / "deleted-3").mkdir()  # of an earlier kill
    sealing.delete(root, 3)
    assert sealing.put_aside(root, 10) == root / "damaged-10"
    assert sealing.sealed_steps(root) == []
    names = {p.name for p in root.iterdir()}
    assert names == {"damaged-10", "07", "notes", "damaged-2", "file"}


def test_a_folder_that_is_not_there_is_empty(tmp_path):
    assert sealing.sealed_steps(tmp_path / "none") == []
    assert sealing.leftovers(tmp_path / "none") == []


def test_what_others_delete_meanwhile_is_gone_too(tmp_path, monkeypatch):
    folder = tmp_path / "1.orbax-checkpoint-tmp"
    (folder / "d").mkdir(parents=True)
    for name in ("manifest.ocdbt.__lock", "rest"):
        (folder / "d" / name).write_text("x")
    unlink, theirs = os.unlink, []

    def after_them(name, *, dir_fd=None):
        if Path(name).name.endswith("__lock") and not theirs:
            theirs.append(name)
            unlink(name, dir_fd=dir_fd)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", after_them)
    remove_tree(folder)
    assert theirs
    assert not folder.exists()
