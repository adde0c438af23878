"""Checkpoints whose files were changed, cut or lost on the disk."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpoint, CheckpointError, Checkpoints


@pytest.fixture
def opened():
    """Opens checkpoints and closes them at the end."""
    living = []

    def open_(workdir, read_only=False, **settings):
        living.append(Checkpoints(workdir, Checkpoint(**settings), read_only=read_only))
        return living[-1]

    yield open_
    for checkpoints in living:
        checkpoints.close()


@pytest.fixture
def noisy(tmp_path, opened):
    """A checkpoint whose array does not compress, its largest file and its abstract state."""
    state = {"noise": jax.random.normal(jax.random.key(1), (64, 1024)), "small": jnp.arange(3)}
    checkpoints = opened(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    files = [p for p in (tmp_path / "checkpoints/3").rglob("*") if p.is_file()]
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    return tmp_path, max(files, key=lambda p: p.stat().st_size), like


def test_a_flipped_bit_on_the_disk_is_found(noisy, opened):
    workdir, file, like = noisy
    content = bytearray(file.read_bytes())
    opened(workdir).restore(3, like)
    opened(workdir).verify(3)
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for read in (lambda c: c.restore(3, like), lambda c: c.verify(3)):
        with pytest.raises(CheckpointError, match=r"checkpoints/3 cannot be read .*noise"):
            read(opened(workdir))


# Orbax leaves coroutines behind that complain when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["cut short", "deleted", "emptied"])
def test_a_damaged_file_names_step_and_folder(noisy, opened, damage):
    workdir, file, like = noisy
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "cut short" else b"")
    if damage == "deleted":
        file.unlink()
    with pytest.raises(CheckpointError, match="step 3 in .*/checkpoints/3 cannot be read"):
        opened(workdir).restore(3, like)


@pytest.mark.parametrize("name", ["state/_METADATA", "state/manifest.ocdbt", "state/_sharding"])
def test_damaged_metadata_name_step_and_folder(noisy, opened, name):
    workdir, _, like = noisy
    (workdir / "checkpoints/3" / name).write_bytes(b"{")
    for read in (lambda c: c.restore(3, like), lambda c: c.tree(3)):
        with pytest.raises(CheckpointError, match="step 3 in .*/checkpoints/3 cannot be read"):
            read(opened(workdir))


def test_damaged_extra_names_step_and_folder(noisy, opened):
    workdir, _, _ = noisy
    (workdir / "checkpoints/3/extra/metadata").write_text('{"format":')
    with pytest.raises(CheckpointError, match="step 3 in .*/checkpoints/3 cannot be read"):
        opened(workdir).extra(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_swapped_elements_are_found_in_every_dtype(tmp_path, opened, dtype):
    """The fingerprint weighs each element by its place."""
    x = jnp.array([[0, 1, 1, 0], [1, 0, 1, 1]], dtype)
    checkpoints = opened(tmp_path)
    for step, value in ((1, x), (2, x[:, ::-1]), (3, x[::-1])):
        checkpoints.save(step, {"x": value}, {})
    checkpoints.wait()
    files = [tmp_path / f"checkpoints/{step}/fingerprints/metadata" for step in (1, 2, 3)]
    assert len({json.loads(file.read_text())["x"] for file in files}) == 3
