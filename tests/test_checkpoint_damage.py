"""Files changed, cut or lost on the disk are named, and the checkpoint before is used instead."""

import errno
import io
import json
import os
import shutil

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.manifest import CheckpointError, UnreadError
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

STATES = {
    step: {
        "noise": jax.random.normal(jax.random.key(step), (16, 256)),  # does not compress
        "small": jnp.arange(3) + step,
    }
    for step in (2, 3)
}
LIKE = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATES[3]
)
KINDS = {
    "truncated": lambda file, content: file.write_bytes(content[: len(content) // 2]),
    "emptied": lambda file, content: file.write_bytes(b""),
    "deleted": lambda file, content: file.unlink(),
    "flipped": lambda file, content: file.write_bytes(flipped(content, 4 * len(content))),
}


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def look(workdir, report=lambda line: None):
    """Opens a folder and changes nothing there."""
    return Checkpoints(workdir, Checkpoint(), read_only=True, report=report)


def same(restored, step):
    return all(
        np.asarray(restored[name]).tobytes() == np.asarray(x).tobytes()
        for name, x in STATES[step].items()
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 3; not to be changed."""
    workdir = tmp_path_factory.mktemp("pair")
    checkpoints = Checkpoints(workdir, Checkpoint())
    for step, state in STATES.items():
        checkpoints.save(step, state, {"step": step})
    checkpoints.close()
    return workdir


@pytest.fixture
def copy(pair, tmp_path):
    """A copy of the pair, to be damaged."""
    shutil.copytree(pair, tmp_path / "copy")
    return tmp_path / "copy"


def files(workdir, step=3):
    folder = workdir / f"checkpoints/{step}"
    return {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_file_is_damaged_is_named_and_the_step_before_is_good(copy, kind):
    found = files(copy)
    assert {"manifest.json", "extra/metadata", "state/_METADATA"} <= found.keys()
    assert len(found) > 10
    for name, file in found.items():
        content = file.read_bytes()
        KINDS[kind](file, content)
        lines = []
        looking = look(copy, lines.append)
        for read in (lambda c: c.restore(3, LIKE), lambda c: c.verify(3)):
            with pytest.raises(CheckpointError, match="step 3 in .*/3 cannot be read") as raised:
                read(look(copy))
            assert name in str(raised.value)
        assert looking.newest_good() == 2, name
        if (name, kind) != ("manifest.json", "deleted"):  # then it counts as never finished
            assert len(lines) == 1
            assert "step 3" in lines[0]
            assert name in lines[0]
        assert same(looking.restore(2, LIKE), 2)
        file.write_bytes(content)
    assert look(copy).newest_good() == 3
    assert same(look(copy).restore(3, LIKE), 3)


@pytest.fixture(scope="module")
def flippable(pair, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("flippable") / "copy"
    shutil.copytree(pair, workdir)
    return workdir


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(data=strategies.data())
def test_no_flipped_bit_goes_unseen(flippable, data):
    found = files(flippable)
    file = found[data.draw(strategies.sampled_from(sorted(found)))]
    content = file.read_bytes()
    file.write_bytes(flipped(content, data.draw(strategies.integers(0, 8 * len(content) - 1))))
    try:
        assert look(flippable).newest_good() == 2
    finally:
        file.write_bytes(content)


def test_a_damaged_checkpoint_is_put_aside_and_its_step_saved_again(copy):
    file = max(files(copy).values(), key=lambda p: p.stat().st_size)
    for number in range(2):
        content = file.read_bytes()
        file.write_bytes(flipped(content, 77))
        lines = []
        checkpoints = Checkpoints(copy, Checkpoint(), report=lines.append)
        assert checkpoints.newest_good() == 2
        assert checkpoints.steps() == [2]
        aside = copy / "checkpoints" / ("damaged-3" if number == 0 else "damaged-3-2")
        assert aside.is_dir()
        assert len(lines) == 1
        assert f"it was moved to {aside}" in lines[0]
        checkpoints.save(3, STATES[3], {})
        checkpoints.close()
        assert look(copy).newest_good() == 3
        file = max(files(copy).values(), key=lambda p: p.stat().st_size)
    assert Checkpoints(copy, Checkpoint()).cleaned == []  # what was put aside stays


@pytest.mark.parametrize("read_only", [True, False])
def test_with_nothing_good_left_nothing_is_changed_and_nobody_begins_anew(copy, read_only):
    for step in (2, 3):
        files(copy, step)["state/_METADATA"].unlink()
    lines = []
    for _ in range(2):  # a supervisor starts it again
        checkpoints = Checkpoints(copy, Checkpoint(), read_only=read_only, report=lines.append)
        with pytest.raises(CheckpointError) as raised:
            checkpoints.newest_good()
        told = str(raised.value)
        assert told.startswith("the checkpoint of step 3 in ")
        assert "(state/_METADATA is missing), nor can that of step 2: no good one is" in told
        assert checkpoints.steps() == [2, 3]
    assert lines == []


def test_without_any_checkpoint_there_is_none(tmp_path):
    assert Checkpoints(tmp_path, Checkpoint()).newest_good() is None


@pytest.mark.parametrize("name", ["manifest.json", "state/_METADATA"])
@pytest.mark.parametrize(
    ("number", "is_damage"),
    [(errno.EIO, True), (errno.EACCES, False), (errno.EMFILE, False), (errno.ESTALE, False)],
)
def test_what_the_system_does_not_let_be_read_now_is_no_damage(
    copy, monkeypatch, name, number, is_damage
):
    victim, opened = files(copy)[name], io.open
    lines = []

    def refusing(file, *arguments, **named):
        if file == victim:
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, *arguments, **named)

    checkpoints = Checkpoints(copy, Checkpoint(), report=lines.append)
    with monkeypatch.context() as patch:
        patch.setattr(io, "open", refusing)
        if is_damage:
            assert checkpoints.newest_good() == 2
            assert checkpoints.steps() == [2]
            return
        with pytest.raises(UnreadError) as raised:
            checkpoints.newest_good()
    assert f"cannot be read now ({name} cannot be read: " in str(raised.value)
    assert os.strerror(number) in str(raised.value)
    assert lines == []
    assert checkpoints.newest_good() == 3  # when it can be read again


def test_bytes_that_were_wrong_before_they_were_digested_are_found_in_the_arrays(copy):
    """A manifest sealed over altered files: the digests agree, the fingerprints do not."""
    folder = copy / "checkpoints/3"
    leaves = manifest.read(folder, 3).leaves
    file = max(files(copy).values(), key=lambda p: p.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(flipped(content, 4 * len(content)))
    manifest.seal(folder, 3, leaves)
    for read in (lambda c: c.restore(3, LIKE), lambda c: c.verify(3)):
        with pytest.raises(CheckpointError, match=r"checkpoints/3 cannot be read .*noise"):
            read(look(copy))


def test_damaged_metadata_are_named_by_those_who_only_look(copy):
    for name, read in {
        "state/_METADATA": lambda c: c.tree(3),
        "state/_sharding": lambda c: c.tree(3),
        "extra/metadata": lambda c: c.extra(3),
    }.items():
        content = files(copy)[name].read_bytes()
        files(copy)[name].write_bytes(b"{")
        with pytest.raises(CheckpointError, match=f"step 3 in .*/3 cannot be read .{name} has 1"):
            read(look(copy))
        files(copy)[name].write_bytes(content)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_swapped_elements_are_found_in_every_dtype(tmp_path, dtype):
    """The fingerprint weighs each element by its place."""
    x = jnp.array([[0, 1, 1, 0], [1, 0, 1, 1]], dtype)
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    for step, value in ((1, x), (2, x[:, ::-1]), (3, x[::-1])):
        checkpoints.save(step, {"x": value}, {})
    checkpoints.close()
    found = [manifest.read(tmp_path / f"checkpoints/{s}", s).leaves["x"] for s in (1, 2, 3)]
    assert len({leaf.fingerprint for leaf in found}) == 3
    assert {(leaf.shape, leaf.dtype) for leaf in found} == {((2, 4), dtype)}


def test_damage_that_only_the_arrays_show_can_be_put_aside_too(copy):
    """What a run does that cannot restore a checkpoint whose files are as they were written."""
    for read_only in (True, False):
        checkpoints = Checkpoints(copy, Checkpoint(), read_only=read_only, report=lambda line: None)
        assert checkpoints.newest_good() == 3
        checkpoints.pass_over(3, CheckpointError("altered"))
        assert checkpoints.newest_good() == 2
        assert checkpoints.steps() == ([2, 3] if read_only else [2])
    checkpoints.save(3, STATES[3], {})
    checkpoints.close()
    assert checkpoints.newest_good() == 3


# -- names and links are data ----------------------------------------------------------------------


def reseal(folder, change):
    """Rewrites a manifest with its digest in order, as somebody with a plan would."""
    content = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    change(content)
    (folder / "manifest.json").write_bytes(manifest._envelope(content))


@pytest.mark.parametrize("name", ["../../../canary", "{workdir}/canary", "state/../../../canary"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(copy, name):
    (copy / "canary").write_text("secret")
    name = name.format(workdir=copy)
    reseal(
        copy / "checkpoints/3",
        lambda content: content["files"].update({name: [6, "crc32:" + "0" * 8]}),
    )
    with pytest.raises(
        CheckpointError, match="canary.*, which is not a file inside the checkpoint"
    ):
        look(copy).restore(3, LIKE)
    assert look(copy).newest_good() == 2
    assert (copy / "canary").read_text() == "secret"


def test_a_linked_file_that_leaves_the_folder_is_refused(copy):
    file = files(copy)["extra/metadata"]
    file.rename(copy / "elsewhere")  # the same bytes: no digest tells
    file.symlink_to(copy / "elsewhere")
    for read in (lambda c: c.restore(3, LIKE), lambda c: c.extra(3), lambda c: c.tree(3)):
        with pytest.raises(CheckpointError, match="extra/metadata is a link that leads out of"):
            read(look(copy))


def test_a_linked_step_that_leaves_the_folder_is_refused(copy):
    folder = copy / "checkpoints/3"
    folder.rename(copy / "elsewhere")
    folder.symlink_to(copy / "elsewhere")
    with pytest.raises(CheckpointError, match="checkpoints/3 is a link that leads out of"):
        look(copy).extra(3)
    assert Checkpoints(copy, Checkpoint(), report=lambda line: None).newest_good() == 2
    assert files(copy, "../elsewhere")  # the link was put aside, nothing behind it was touched


def test_the_checkpoint_of_another_step_under_this_name_is_refused(copy):
    shutil.copytree(copy / "checkpoints/3", copy / "checkpoints/9")
    with pytest.raises(CheckpointError, match="step 9 .*manifest.json is that of step 3"):
        look(copy).restore(9, LIKE)


def test_a_newer_format_is_refused_and_left_alone(copy):
    reseal(copy / "checkpoints/3", lambda content: content.update(format=5, surprise={}))
    before = {name: file.read_bytes() for name, file in files(copy).items()}
    words = "step 3 is of format 5, written by a newer jaxtrain; this one reads formats up to 4"
    for read in (
        lambda: look(copy).restore(3, LIKE),
        lambda: Checkpoints(copy, Checkpoint()).newest_good(),
    ):
        with pytest.raises(UserError, match=words) as raised:
            read()
        assert "\n" not in str(raised.value)
    assert {name: file.read_bytes() for name, file in files(copy).items()} == before
